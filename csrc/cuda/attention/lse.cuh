// Log-denominators of the softmax where the caller has none: one part per item, then the parts of a block together.
#pragma once

#include <cstdint>

#include "../isa.cuh"
#include "problem.cuh"
#include "scores.cuh"

namespace comppo::cuda {

__device__ __forceinline__ float negative_infinity() { return __uint_as_float(0xff800000u); }

// The parts of two sets of keys joined. A set without keys has max −inf and sum 0.
template <class T>
__device__ __forceinline__ LsePart join(const LsePart& a, const LsePart& b) {
  const float max = fmaxf(a.max, b.max);
  if (max == negative_infinity()) return {max, a.sum + b.sum};
  return {max, a.sum * exp_of<T>(a.max - max) + b.sum * exp_of<T>(b.max - max)};
}

template <int heads>
struct LseShared {
  Stage<heads> stages[kStages];
};

// Adds the thread's scores of one head with a tile to that head's part.
template <class T, int heads>
__device__ __forceinline__ void add_scores(const Scores<heads>& scores, int head, float scale, int first_key, int from,
                                           int to, LsePart& part) {
  float masked[kKeys / 4];
  LsePart tile = {negative_infinity(), 0.0f};
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) {
    const int key = first_key + i / 2 * 8 + threadIdx.x % 4 * 2 + i % 2;
    const float score = scores[head / 2][i / 2][head % 2 * 2 + i % 2] * scale;
    masked[i] = key >= from && key <= to ? score : negative_infinity();
    tile.max = fmaxf(tile.max, masked[i]);
  }
  const float shift = tile.max == negative_infinity() ? 0.0f : tile.max;
#pragma unroll
  for (int i = 0; i < kKeys / 4; ++i) tile.sum += exp_of<T>(masked[i] - shift);
  part = join<T>(part, tile);
}

template <class T, int heads>
__global__ void __launch_bounds__(kScoreThreads, 1) lse_parts(const __grid_constant__ Problem p) {
  auto& shared = dynamic_shared<LseShared<heads>>();
  const int item = blockIdx.x;
  const WorkItem work = p.op.items[item];
  const int tiles = num_tiles(work);
  const int token = threadIdx.x / 4;
  RowRange range = {};
  range.visible_from = 1;  // a row of padding sees nothing
  if (token < work.num_rows) range = p.op.rows[work.row_begin + token];
  ScorePipeline<T, heads, PassesThenTiles> pipeline(p, work, p.item_block[item], shared.stages,
                                                    PassesThenTiles(tiles, p.shape.passes));
#pragma unroll 1
  for (int pass = 0; pass < p.shape.passes; ++pass) {
    LsePart part[heads];
#pragma unroll
    for (int h = 0; h < heads; ++h) part[h] = {negative_infinity(), 0.0f};
#pragma unroll 1
    for (int tile = 0; tile < tiles; ++tile) {
      Scores<heads> scores;
      pipeline.next(scores);
#pragma unroll
      for (int h = 0; h < heads; ++h)
        add_scores<T, heads>(scores, h, p.scale, work.key_begin + tile * kKeys, range.visible_from, range.position,
                             part[h]);
    }
#pragma unroll
    for (int h = 0; h < heads; ++h) {
      LsePart& all = part[h];
#pragma unroll
      for (int lanes = 1; lanes < 4; lanes *= 2)
        all = join<T>(all, {__shfl_xor_sync(kAllLanes, all.max, lanes), __shfl_xor_sync(kAllLanes, all.sum, lanes)});
      if (threadIdx.x % 4 == 0)
        p.partial_lse[pass_at(p.shape, item, pass) + query_row<heads>(token, h)] = all;
    }
  }
}

// One thread per row of a packed query matrix; padding gets +inf.
template <class T, int heads>
__global__ void __launch_bounds__(kTokens * heads) combine_lse(const __grid_constant__ Problem p) {
  const int block = blockIdx.x / p.shape.passes, pass = blockIdx.x % p.shape.passes;
  const int head = threadIdx.x % heads, token = threadIdx.x / heads;
  const int row = query_row<heads>(token, head);
  const bool real = token < p.op.items[p.op.blocks[block]].num_rows &&
                    pass % p.shape.passes_of_group * heads + head < p.shape.group;
  LsePart all = {negative_infinity(), 0.0f};
  for (int item = p.op.blocks[block]; item < p.op.blocks[block + 1]; ++item)
    all = join<T>(all, p.partial_lse[pass_at(p.shape, item, pass) + row]);
  const float log_sum = sizeof(T) == 4 ? logf(all.sum) : log2f(all.sum);
  p.denominators[pass_at(p.shape, block, pass) + row] = real ? all.max + log_sum : __uint_as_float(0x7f800000u);
}

}  // namespace comppo::cuda
