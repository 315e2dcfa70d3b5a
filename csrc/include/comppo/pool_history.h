// Op B: causal top-K pooling of projected history features (Eq. 22–26), and its backward.
//
//   s_tj = a_tj · σ(⟨q^β_t, k^β_i⟩/√d) · ReLU(⟨q^r_t, k^r_i⟩/√d),   i = seq_start_t + index_tj
//   pooled_t = Σ_j s_tj v_i / (Σ_j s_tj + ε)
//
// An edge is a pair (t, j), numbered t · top_k + j. Edges with index −1 are selected away: whatever stands
// beside them reaches no result. All pointers are of one device and aligned to their element type, no more.
#pragma once

#include <cstdint>

#include "comppo/dtype.h"

namespace comppo {

constexpr int32_t kEdgesPerChunk = 256;  // edges of one key that are summed in one go in the backward

struct PoolHistory {
  // --- inputs; row strides in elements, the last dimension has stride 1
  DType dtype;                     // of every floating tensor here: kFloat32, or kFloat64 for gradient checks
  const void* query_beta;          // q^β [num_rows, width]
  int64_t query_beta_stride;
  const void* query_rel;           // q^r [num_rows, width]
  int64_t query_rel_stride;
  const void* key_features;        // [k^β | k^r | v], [num_keys, 2 · width + out_width], by packed position
  int64_t key_features_stride;
  const int32_t* index;            // [num_rows, top_k] contiguous, position inside the sequence; −1 is padding
  const void* weight;              // a [num_rows, top_k] contiguous
  const int64_t* seq_start;        // [num_rows], packed position of the first token of each row's sequence
  int32_t num_rows;                // R ≥ 0
  int32_t num_keys;                // packed tokens; every seq_start + index is below it
  int32_t top_k;                   // K ≥ 0; at most 64 on CUDA
  int32_t width;                   // d ≥ 1
  int32_t out_width;               // F ≥ 1
  double epsilon;                  // ε of Eq. 26

  // --- results; inputs of the backward
  void* pooled;                    // [num_rows, out_width] contiguous
  void* score_sum;                 // Σ_j s_tj [num_rows]
};

// The edges by key. `order` holds the numbers of the edges with index ≥ 0, by packed key position and then by number.
struct Transposed {
  const int32_t* order;            // [num_rows · top_k], of which the first key_offsets[num_keys] are in use
  const int32_t* key_offsets;      // [num_keys + 1]: the edges of key i are order[key_offsets[i] … key_offsets[i + 1] − 1]
  const int32_t* chunk_offsets;    // [num_keys + 1]: prefix sum of ⌈edges of the key / kEdgesPerChunk⌉
};

// The sum over the edges of a key runs in two levels, chunk by chunk in order of `order`, then over the chunks, so that
// a key every row attends to is spread over many threads and the result does not depend on their number.
struct PoolHistoryBackward {
  PoolHistory forward;             // as it was called, results included (read only)
  Transposed transposed;
  const void* grad_pooled;         // [num_rows, out_width] contiguous
  const void* grad_score_sum;      // [num_rows] contiguous

  // --- results, contiguous, every element written
  void* grad_query_beta;           // [num_rows, width]
  void* grad_query_rel;            // [num_rows, width]
  void* grad_key_features;         // [num_keys, 2 · width + out_width]

  // --- scratch of the CUDA kernels; null on the CPU
  void* workspace;                 // 256-byte aligned, cuda::pool_history_backward_workspace() bytes
};

}  // namespace comppo
