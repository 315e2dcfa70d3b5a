// Op A: row statistics and top-K of head-averaged attention (Eq. 18).
//
//   a_ti = 1/H_q · Σ_h exp(scale · ⟨q_h,t , k_g(h),i⟩ − lse_h,t),   g(h) = ⌊h · H_kv / H_q⌋,   i ∈ I_t
//
// The mean over heads precedes everything else. Keys outside I_t are selected away, never multiplied: above the
// diagonal exp may be inf. All pointers are of one device and aligned to their element type, no more.
#pragma once

#include <cstdint>

#include "comppo/dtype.h"
#include "comppo/plan.h"

namespace comppo {

constexpr int32_t kMaxTopK = 64;
constexpr float kMinMass = 1e-20f;  // a row with less over I_t, or whose mass is not finite, has no top-K and c = 1/2

struct AttentionStatistics {
  // --- inputs; strides in elements, the last dimension of q and k has stride 1
  DType dtype;             // of q and k: kFloat32, kBFloat16 or kFloat16
  const void* q;           // [num_rows, num_heads, head_dim], the wanted rows' queries by RowRange::slot
  int64_t q_row_stride;
  int64_t q_head_stride;
  const void* k;           // [num_keys, num_kv_heads, head_dim], by packed position
  int64_t k_row_stride;
  int64_t k_head_stride;
  const float* lse;        // [num_heads, num_rows], natural log of the softmax denominator over all visible keys;
  int64_t lse_head_stride; //   null: computed here
  int64_t lse_row_stride;
  int32_t num_rows;        // R, wanted rows, ≥ 0
  int32_t num_keys;        // packed tokens
  int32_t num_heads;       // H_q, a multiple of num_kv_heads
  int32_t num_kv_heads;    // H_kv ≥ 1
  int32_t head_dim;        // d ≥ 1
  float scale;             // softmax scale, on the natural-log scores

  // --- plan
  const RowRange* rows;    // [num_rows]
  const WorkItem* items;   // [num_items]
  const int32_t* blocks;   // [num_blocks + 1], offsets into items: block b owns items blocks[b] … blocks[b + 1] − 1
  int32_t num_items;
  int32_t num_blocks;

  // --- what is asked for
  int32_t top_k;           // K, 0 … kMaxTopK
  int32_t mass_top_k;      // k of topk_mass, 1 … kMaxTopK; read where topk_mass is not null
  float renyi_alpha;       // α of power_sum; read where power_sum is not null
  float kappa_lo;          // Eq. 20: κ = κ_lo + (κ_hi − κ_lo) σ(τ (c − 1/2)), c of Eq. 19 clamped to [0, 1],
  float kappa_hi;          //   c = 1/2 where n_t ≤ 1 or the row has no mass; read where kappa is not null
  float tau;

  // --- results, float32 [num_rows] by slot, over I_t and unnormalised; null: not wanted
  float* mass;             // Σ a; never null, as sum_squares
  float* sum_squares;      // Σ a²
  float* entropy_sum;      // Σ a log a, 0 log 0 = 0, nats
  float* max_weight;       // max a; 0 where I_t is empty
  float* power_sum;        // Σ a^α
  float* topk_mass;        // sum of the mass_top_k largest a
  float* kappa;            // κ of Eq. 20, with the Herfindahl statistic
  int32_t* index;          // [num_rows, top_k] contiguous: positions in the sequence of the largest a, descending,
                           //   ties by the smaller position; −1 past the end of I_t. A weight of 0 still counts
  float* weight;           // [num_rows, top_k] contiguous: a / Σ a; 0 beside an index of −1

  // --- scratch of the CUDA kernels; null on the CPU
  void* workspace;         // 256-byte aligned, cuda::attention_statistics_workspace() bytes
};

}  // namespace comppo
