// Joins the items of every row, in order, into the results of comppo/attention_statistics.h. A warp owns a row.
#pragma once

#include <cfloat>
#include <cstdint>

#include "../isa.cuh"
#include "problem.cuh"
#include "top64.cuh"

namespace comppo::cuda {

constexpr int kCombineThreads = 256;

// Whether a row says where the policy looked; NaN does not.
__device__ __forceinline__ bool is_usable(float mass) { return mass >= kMinMass && mass <= FLT_MAX; }

// κ of Eq. 18–20 with the Herfindahl statistic.
__device__ __forceinline__ float kappa_of(const AttentionStatistics& op, int num_history, double mass, double squares) {
  double c = 0.5;
  if (num_history > 1 && is_usable(static_cast<float>(mass))) {
    const double log_n = log(static_cast<double>(num_history));
    c = (log_n + log(squares) - 2 * log(mass)) / log_n;
    c = c < 0 ? 0 : c > 1 ? 1 : c;
  }
  const double sigmoid = 1 / (1 + exp(-op.tau * (c - 0.5)));
  return static_cast<float>(op.kappa_lo + (static_cast<double>(op.kappa_hi) - op.kappa_lo) * sigmoid);
}

// Adds up the first `count` weights of a list in a fixed order.
__device__ __forceinline__ float sum_of_largest(const Sixty4& list, int count) {
  const int lane = threadIdx.x % 32;
  float sum = lane < count ? weight_of(list.low) : 0.0f;
  if (32 + lane < count) sum += weight_of(list.high);
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(kAllLanes, sum, lanes);
  return sum;
}

__device__ __forceinline__ void store_entry(const AttentionStatistics& op, int slot, int entry, uint64_t rank, float mass) {
  if (entry >= op.top_k) return;
  const bool present = rank != 0 && is_usable(mass);
  const int64_t at = static_cast<int64_t>(slot) * op.top_k + entry;
  op.index[at] = present ? key_of(rank) : -1;
  op.weight[at] = present ? weight_of(rank) / mass : 0.0f;
}

__device__ __forceinline__ void store_sums(const AttentionStatistics& op, const RowRange& range,
                                           const double (&sum)[kNumSums]) {
  const int slot = range.slot;
  op.mass[slot] = static_cast<float>(sum[kMass]);
  op.sum_squares[slot] = static_cast<float>(sum[kSumSquares]);
  if (op.entropy_sum) op.entropy_sum[slot] = static_cast<float>(sum[kEntropy]);
  if (op.power_sum) op.power_sum[slot] = static_cast<float>(sum[kPower]);
  if (op.kappa) op.kappa[slot] = kappa_of(op, range.position - range.history_from + 1, sum[kMass], sum[kSumSquares]);
}

// One thread block per kCombineThreads / 32 tokens of a block of rows.
__global__ void __launch_bounds__(kCombineThreads) combine_items(const __grid_constant__ Problem p) {
  constexpr int kWarps = kCombineThreads / 32;
  const int block = blockIdx.x / (kTokens / kWarps);
  const int token = blockIdx.x % (kTokens / kWarps) * kWarps + threadIdx.x / 32;
  const int first_item = p.op.blocks[block], last_item = p.op.blocks[block + 1];
  const WorkItem work = p.op.items[first_item];
  if (token >= work.num_rows) return;
  const RowRange range = p.op.rows[work.row_begin + token];
  double sum[kNumSums] = {};
  Sixty4 best = {0, 0};
  for (int item = first_item; item < last_item; ++item) {
#pragma unroll
    for (int s = 0; s < kNumSums; ++s)
      sum[s] += p.sums[(static_cast<int64_t>(item) * kNumSums + s) * kTokens + token];
    best = largest_of(best, load_list(p.lists + (static_cast<int64_t>(item) * kTokens + token) * kTopCapacity));
  }
  const int lane = threadIdx.x % 32;
  const float mass = static_cast<float>(sum[kMass]);
  store_entry(p.op, range.slot, lane, best.low, mass);
  store_entry(p.op, range.slot, 32 + lane, best.high, mass);
  const float largest = sum_of_largest(best, p.op.mass_top_k);
  if (lane != 0) return;
  store_sums(p.op, range, sum);
  if (p.op.topk_mass) p.op.topk_mass[range.slot] = largest;
  if (p.op.max_weight) p.op.max_weight[range.slot] = best.low == 0 ? 0.0f : weight_of(best.low);
}

}  // namespace comppo::cuda
