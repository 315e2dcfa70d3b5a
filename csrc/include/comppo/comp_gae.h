// Op C: gated TD residuals, advantages and λ-returns of packed responses (Eq. 10, 11, 28).
//
//   δ_t = r_t + κ_t V_{t+1} m_{t+1} − V_t,   A_t = δ_t + λ κ_t A_{t+1} m_{t+1},   G_t = A_t + V_t
//
// A suffix scan of the affine maps x ↦ δ_t + λ κ_t x. V and κ outside the mask are never read.
#pragma once

#include <cstdint>

#include "comppo/dtype.h"

namespace comppo {

enum class Gaps : int32_t {
  kCompact,  // t + 1 is the next valid token; the reward of a gap moves to the last valid token before it, or to the first
  kCut,      // m_{t+1} literally: a gap ends the trace, and its reward is dropped
};

struct CompGae {
  // --- inputs, all contiguous
  DType dtype;                   // of every floating tensor here: kFloat32, or kFloat64 on the CPU
  const void* rewards;           // r [num_tokens]
  const void* values;            // V [num_tokens]
  const void* kappa;             // κ [num_tokens], in [0, 1]
  const bool* mask;              // m [num_tokens], false at gaps; one byte each
  const int64_t* cu_seqlens;     // [num_responses + 1]: response b owns tokens cu_seqlens[b] … cu_seqlens[b + 1] − 1
  const void* bootstrap_values;  // [num_responses]: V after the last token of each response; null: 0. Under kCompact it
                                 //   follows the last valid token, under kCut only a valid last token
  int64_t num_tokens;            // N ≥ 0
  int32_t num_responses;         // B ≥ 0
  Gaps gaps;
  double lam;                    // λ in [0, 1]

  // --- results [num_tokens], exactly 0 outside the mask
  void* delta;                   // δ
  void* advantage;               // A
  void* lambda_return;           // G
};

}  // namespace comppo
