// Epilogue of a tile: takes the weights of 8 rows × 128 keys from a warp's registers into the rows' sums and lists.
//
// Lanes 4 r … 4 r + 3 share row r. Lane c of the four holds the weights of keys 8 n + 2 c and 8 n + 2 c + 1, n = 0 … 15,
// which is how accumulators of the tensor cores lie. Nothing stays in registers between tiles, where the main loop
// needs them all: a row's sums and candidates wait in shared memory, its list of the 64 largest in global
// memory (the L2 cache), which is brought up to date when 64 candidates have come together.
#pragma once

#include <cstdint>

#include "../isa.cuh"
#include "problem.cuh"
#include "top64.cuh"

namespace comppo::cuda {

constexpr int kWeights = kKeys / 4;  // of a tile that a lane holds

// What a warp keeps of its rows, in shared memory.
struct RowState {
  uint64_t candidates[kTokensPerWarp][kTopCapacity];
  uint64_t threshold[kTokensPerWarp];  // the row's 64th largest rank when last merged
  float sums[kTokensPerWarp][kNumSums];
  int pending[kTokensPerWarp];  // candidates
};

// The rows of work item blockIdx.x. Warp w of them is w warps after `first_thread`.
template <int first_thread>
class RowSums {
 public:
  __device__ RowSums(const Problem& problem, RowState* states) : problem_(problem), states_(states) {
    enter();
    for (int r = 0; r < kTokensPerWarp; ++r) list(r)[lane_] = list(r)[32 + lane_] = 0;
    if (lane_ < kTokensPerWarp) {
      state().threshold[lane_] = 0;
      state().pending[lane_] = 0;
      for (int s = 0; s < kNumSums; ++s) state().sums[lane_][s] = 0;
    }
    __syncwarp();
  }

  // Adds a tile: `total` holds Σ over heads of the softmax weights, anything at keys outside I_t.
  __device__ __forceinline__ void add(const float (&total)[kWeights], int first_key) {
    enter();
    const History history = history_of_row();
    if (!__ballot_sync(kAllLanes, first_key <= history.to && first_key + kKeys > history.from)) return;
    const float per_head = 1.0f / static_cast<float>(problem_.op.num_heads);
    float weight[kWeights];
#pragma unroll
    for (int i = 0; i < kWeights; ++i)
      weight[i] = history.contains(key_at(first_key, i)) ? total[i] * per_head : 0.0f;
    add_sums(weight);
    if (problem_.selects) {
      select<0>(weight, history, first_key);
      select<kWeights / 2>(weight, history, first_key);
    }
  }

  // Writes the sums and brings the lists up to date.
  __device__ void finish() {
    __syncwarp();
    enter();
    const int sum = lane_ / kTokensPerWarp, token = lane_ % kTokensPerWarp;
    problem_.sums[(static_cast<int64_t>(blockIdx.x) * kNumSums + sum) * kTokens + first_token() + token] =
        state().sums[token][sum];
    flush(__ballot_sync(kAllLanes, state().pending[row()] > 0));
  }

 private:
  struct History {
    int from, to;
    __device__ __forceinline__ bool contains(int key) const { return key >= from && key <= to; }
  };

  // Everything about the thread is derived anew in each call, so that none of it takes a register in between.
  __device__ __forceinline__ void enter() {
    const int thread = thread_now() - first_thread;
    lane_ = thread % 32;
    warp_ = thread / 32;
  }

  __device__ __forceinline__ RowState& state() const { return states_[warp_]; }
  __device__ __forceinline__ int first_token() const { return warp_ * kTokensPerWarp; }
  __device__ __forceinline__ int row() const { return lane_ / 4; }

  __device__ __forceinline__ int key_at(int first_key, int i) const {
    return first_key + i / 2 * 8 + lane_ % 4 * 2 + i % 2;
  }

  // I_t; a row of padding has none.
  __device__ __forceinline__ History history_of_row() const {
    const WorkItem& work = problem_.op.items[blockIdx.x];
    const int token = first_token() + row();
    if (token >= work.num_rows) return {1, 0};
    const RowRange& range = problem_.op.rows[work.row_begin + token];
    return {range.history_from, range.position};
  }

  __device__ __forceinline__ uint64_t* list(int row) const {
    return problem_.lists + (static_cast<int64_t>(blockIdx.x) * kTokens + first_token() + row) * kTopCapacity;
  }

  // Over the row's four lanes, then onto what earlier tiles left. A tile without history adds an exact 0: where a
  // row's items begin does not matter to its bits.
  __device__ __forceinline__ void add_to_row(Sum which, float x) {
    x += __shfl_xor_sync(kAllLanes, x, 1);
    x += __shfl_xor_sync(kAllLanes, x, 2);
    if (lane_ % 4 == 0) state().sums[row()][which] += x;
  }

  __device__ __forceinline__ void add_sums(const float (&weight)[kWeights]) {
    float mass = 0, squares = 0;
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      mass += weight[i];
      squares += weight[i] * weight[i];
    }
    add_to_row(kMass, mass);
    add_to_row(kSumSquares, squares);
    if (problem_.op.entropy_sum) {
      float entropy = 0;
#pragma unroll
      for (int i = 0; i < kWeights; ++i) entropy += weight[i] > 0 ? weight[i] * logf(weight[i]) : weight[i];
      add_to_row(kEntropy, entropy);
    }
    if (problem_.op.power_sum) {
      float power = 0;
#pragma unroll
      for (int i = 0; i < kWeights; ++i) power += powf(weight[i], problem_.op.renyi_alpha);
      add_to_row(kPower, power);
    }
  }

  // Bit i: weight first + i beats the row's threshold. Weights of 0 count, keys outside I_t do not.
  template <int first>
  __device__ __forceinline__ unsigned promising(const float (&weight)[kWeights], const History& history,
                                                int first_key) const {
    const uint64_t threshold = state().threshold[row()];
    unsigned bits = 0;
#pragma unroll
    for (int i = 0; i < kWeights / 2; ++i) {
      const int key = key_at(first_key, first + i);
      if (history.contains(key) && rank_of(weight[first + i], key) > threshold) bits |= 1u << i;
    }
    return bits;
  }

  // Puts the promising ones among 64 keys with the row's candidates.
  template <int first>
  __device__ __forceinline__ void select(const float (&weight)[kWeights], const History& history, int first_key) {
    unsigned bits = promising<first>(weight, history, first_key);
    if (!__ballot_sync(kAllLanes, bits != 0)) return;
    const unsigned full =
        __ballot_sync(kAllLanes, state().pending[row()] + count_in_row(bits).total > kTopCapacity);
    if (full) {
      flush(full);
      bits = promising<first>(weight, history, first_key);
    }
    const Count count = count_in_row(bits);
    const int pending = state().pending[row()];
    int at = pending + count.before;
#pragma unroll
    for (int i = 0; i < kWeights / 2; ++i)
      if (bits >> i & 1) state().candidates[row()][at++] = rank_of(weight[first + i], key_at(first_key, first + i));
    __syncwarp();
    if (lane_ % 4 == 0) state().pending[row()] = pending + count.total;
    __syncwarp();
  }

  struct Count {
    int before;  // bits of the row's lanes before this one
    int total;
  };

  __device__ __forceinline__ Count count_in_row(unsigned bits) const {
    const int mine = __popc(bits), place = lane_ % 4;
    const int neighbour = __shfl_xor_sync(kAllLanes, mine, 1);
    const int pair = mine + neighbour;
    const int other_pair = __shfl_xor_sync(kAllLanes, pair, 2);
    return {(place & 1 ? neighbour : 0) + (place & 2 ? other_pair : 0), pair + other_pair};
  }

  // Merges the candidates of the rows whose lanes are set in `lanes` into their lists.
  __device__ __forceinline__ void flush(unsigned lanes) {
    const int lane = lane_;
#pragma unroll 1
    for (int r = 0; r < kTokensPerWarp; ++r) {
      if (!(lanes >> 4 * r & 1)) continue;
      const int count = state().pending[r];
      const auto& fresh = state().candidates[r];
      const Sixty4 sorted =
          sort_descending({lane < count ? fresh[lane] : 0, 32 + lane < count ? fresh[32 + lane] : 0});
      const Sixty4 best = largest_of(load_list(list(r)), sorted);
      list(r)[lane] = best.low;
      list(r)[32 + lane] = best.high;
      if (lane == 31) {
        state().threshold[r] = best.high;
        state().pending[r] = 0;
      }
    }
    __syncwarp();
  }

  const Problem& problem_;
  RowState* states_;
  int lane_;
  int warp_;
};

}  // namespace comppo::cuda
