// The 64 largest ranks of a row, sorted by a warp. Lane l holds entries l and 32 + l; all ranks but 0 are distinct.
#pragma once

#include <cstdint>

#include "../isa.cuh"
#include "problem.cuh"

namespace comppo::cuda {

struct Sixty4 {
  uint64_t low;   // entry lane
  uint64_t high;  // entry 32 + lane
};

__device__ __forceinline__ uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }
__device__ __forceinline__ uint64_t smaller(uint64_t a, uint64_t b) { return a > b ? b : a; }

// Compares with the entry `distance` away; the lower of the two keeps the larger rank where `descending`.
__device__ __forceinline__ uint64_t exchange(uint64_t x, int distance, bool descending) {
  const uint64_t other = __shfl_xor_sync(kAllLanes, x, distance);
  const bool is_lower = (threadIdx.x & distance) == 0;
  return is_lower == descending ? larger(x, other) : smaller(x, other);
}

// Sorts a bitonic sequence of 64, descending.
__device__ __forceinline__ Sixty4 merge_bitonic(Sixty4 x) {
  x = {larger(x.low, x.high), smaller(x.low, x.high)};
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2)
    x = {exchange(x.low, distance, true), exchange(x.high, distance, true)};
  return x;
}

// Sorts 64 ranks, descending: runs of alternating direction, twice as long each time.
__device__ __forceinline__ Sixty4 sort_descending(Sixty4 x) {
#pragma unroll
  for (int run = 2; run <= 32; run *= 2) {
    const bool low_descends = run == 32 || (threadIdx.x & run) == 0;
    const bool high_descends = run != 32 && low_descends;
#pragma unroll
    for (int distance = run / 2; distance > 0; distance /= 2)
      x = {exchange(x.low, distance, low_descends), exchange(x.high, distance, high_descends)};
  }
  return merge_bitonic(x);
}

// The 64 largest of two descending sequences. Entry e against entry 63 − e leaves the largest, as a bitonic sequence.
__device__ __forceinline__ Sixty4 largest_of(const Sixty4& x, const Sixty4& y) {
  const int mirrored = 31 - threadIdx.x % 32;
  const uint64_t y_high = __shfl_sync(kAllLanes, y.high, mirrored);
  const uint64_t y_low = __shfl_sync(kAllLanes, y.low, mirrored);
  return merge_bitonic({larger(x.low, y_high), larger(x.high, y_low)});
}

__device__ __forceinline__ Sixty4 load_list(const uint64_t* list) {
  const int lane = threadIdx.x % 32;
  return {list[lane], list[32 + lane]};
}

}  // namespace comppo::cuda
