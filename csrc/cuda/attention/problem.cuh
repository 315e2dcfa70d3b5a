// Sizes and layouts that all kernels of op A share.
//
// A block of the plan (64 rows) meets its keys in tiles of 128. Scores are computed pass by pass: a pass is one key
// head with up to kHeads of its query heads, stacked into one matrix of 64 · kHeads rows; groups that kHeads does
// not divide are padded. Queries, keys and log-denominators are first packed so that every pass reads whole,
// aligned, zero-padded tiles whatever the strides, the head dimension and the order of the rows.
#pragma once

#include <cstdint>

#include "../isa.cuh"
#include "comppo/attention_statistics.h"

namespace comppo::cuda {

constexpr int kTokens = kRowsPerBlock;          // rows of a block: 8 warps of 8 tokens
constexpr int kKeys = kKeyTile;                 // keys of a tile
constexpr int kChunkBytes = 128;                // of a packed row that are in shared memory at a time
constexpr int kTokensPerWarp = 8;
constexpr int kTopCapacity = kMaxTopK;          // entries of a row's list
constexpr float kLog2E = 1.4426950408889634f;

// Unit of scaled scores and log-denominators: log 2 for 16-bit elements, where one instruction then makes a
// weight of a score; 1 for float32, because rounding a log-denominator to another unit costs up to half its last place.
template <class T>
constexpr float kUnitsPerNat = sizeof(T) == 4 ? 1.0f : kLog2E;

// Row of a pass's query matrix that holds `token` with the pass's head `head`.
//
// The 16 rows that one warp feeds to the tensor core are 8 tokens × 2 heads, so that a thread's accumulators are all
// heads of its own token and the mean over heads needs no communication. Four warps form the 64 contiguous
// rows of a warpgroup instruction.
template <int heads>
__host__ __device__ constexpr int query_row(int token, int head) {
  const int warp = token / kTokensPerWarp;
  return warp / 4 * (32 * heads) + head / 2 * 64 + warp % 4 * 16 + head % 2 * 8 + token % kTokensPerWarp;
}

// The log-denominators of a token's heads in a pass: `of_token` points at that of its first head.
template <int heads>
__device__ __forceinline__ void load_denominators(const float* of_token, float (&denominator)[heads]) {
#pragma unroll
  for (int h = 0; h < heads; ++h) denominator[h] = __ldg(of_token + query_row<heads>(0, h));
}

// How the heads are cut into passes and a head into chunks.
struct Shape {
  int heads;            // of a pass: 2 or 4
  int group;            // query heads of a key head
  int passes_of_group;
  int passes;           // of all key heads
  int chunk;            // elements
  int chunks;           // of a head
  int padded_dim;       // chunk · chunks

  __host__ __device__ int query_rows() const { return kTokens * heads; }
};

struct Workspace {  // byte offsets
  int64_t queries;      // T [num_blocks, passes, query_rows, padded_dim]
  int64_t keys;         // T [num_kv_heads, num_keys, padded_dim]
  int64_t denominators; // float [num_blocks, passes, query_rows]: log of the softmax denominator; +inf in padding
  int64_t partial_lse;  // LsePart [num_items, passes, query_rows], only where no lse is given
  int64_t sums;         // float [num_items, kNumSums, kTokens]
  int64_t lists;        // uint64 [num_items, kTokens, kTopCapacity]: ranks, descending; 0 is no entry
  int64_t item_block;   // int32 [num_items]: the block that owns an item
  int64_t bytes;
};

enum Sum { kMass, kSumSquares, kEntropy, kPower, kNumSums };

// max m and Σ exp(score − m) over some keys.
struct LsePart {
  float max;
  float sum;
};

// A weight and its key in one integer that orders by weight and then by the smaller key: the bits of a non-negative
// float sort like the float. Never 0, which stands for no entry.
__device__ __forceinline__ uint64_t rank_of(float weight, int key) {
  return static_cast<uint64_t>(__float_as_uint(weight)) << 32 | (0xffffffffu - static_cast<unsigned>(key));
}

__device__ __forceinline__ float weight_of(uint64_t rank) { return __uint_as_float(static_cast<unsigned>(rank >> 32)); }

__device__ __forceinline__ int key_of(uint64_t rank) {
  return static_cast<int>(0xffffffffu - static_cast<unsigned>(rank));
}

// The arrays of the workspace and what the kernels need of the problem.
struct Problem {
  AttentionStatistics op;
  Shape shape;
  void* queries;
  void* keys;
  float* denominators;
  LsePart* partial_lse;
  float* sums;
  uint64_t* lists;
  int32_t* item_block;
  float scale;             // of scores, in the unit of kUnitsPerNat
  bool selects;            // whether the largest weights are wanted
  bool queries_aligned;    // whether q and k can be read 16 bytes at a time
  bool keys_aligned;
};

// exp of a difference of scores, in the unit of T.
template <class T>
__device__ __forceinline__ float exp_of(float x) {
  return exp2_approx(sizeof(T) == 4 ? x * kLog2E : x);
}

// The softmax weight of an unscaled score.
template <class T>
__device__ __forceinline__ float weight_of_score(float score, float scale, float denominator) {
  return exp_of<T>(sizeof(T) == 4 ? fmaf(score, scale, -denominator) : score * scale - denominator);
}

// A pass's log-denominators or LSE parts within an array [outer, passes, query_rows].
__device__ __forceinline__ int64_t pass_at(const Shape& shape, int outer, int pass) {
  return (static_cast<int64_t>(outer) * shape.passes + pass) * shape.query_rows();
}

}  // namespace comppo::cuda
