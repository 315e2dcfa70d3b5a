// Main loop without TMA: scores of a pass, tile by tile, through a two-stage cp.async pipeline.
//
// 8 warps, each with all heads of its 8 tokens against all 128 keys. 16-bit elements go through mma.sync, float32
// through plain FMAs; both leave the same thread with the same scores.
#pragma once

#include <cstdint>

#include "../isa.cuh"
#include "problem.cuh"

namespace comppo::cuda {

constexpr int kScoreThreads = 256;
constexpr int kStages = 2;

template <class T>
constexpr int kChunk = kChunkBytes / static_cast<int>(sizeof(T));  // elements

// 128-byte rows. The 16-byte pieces of row r are permuted by r mod 8: no two rows of a group of eight
// have the same column in the same banks.
template <int heads>
struct Stage {
  alignas(1024) unsigned char queries[kTokens * heads][kChunkBytes];
  unsigned char keys[kKeys][kChunkBytes];
};

__device__ __forceinline__ int swizzled(int row, int byte) { return byte ^ (row % 8 * 16); }

// scores[m][n][2 h + j]: of the thread's token with head 2 m + h against key 8 n + 2 (lane % 4) + j.
template <int heads>
using Scores = float[heads / 2][kKeys / 8][4];

// One chunk of the pipeline: what to load.
struct Step {
  int tile;
  int pass;
  int chunk;
};

// Copies the chunk of a step: the queries of a pass and the keys of a tile, zeros past `key_end`.
template <class T, int heads>
__device__ __forceinline__ void load_stage(const Problem& p, const WorkItem& work, int sequence_start, int block,
                                           const Step& step, Stage<heads>& stage) {
  constexpr int kPieces = kChunkBytes / 16, kPiece = 16 / static_cast<int>(sizeof(T));
  const int row_of_thread = threadIdx.x / kPieces, piece = threadIdx.x % kPieces;
  const int64_t column = step.chunk * kChunk<T> + piece * kPiece;
  const T* queries = static_cast<const T*>(p.queries) + pass_at(p.shape, block, step.pass) * p.shape.padded_dim;
#pragma unroll
  for (int row = row_of_thread; row < kTokens * heads; row += kScoreThreads / kPieces)
    cp_async_16(&stage.queries[row][swizzled(row, piece * 16)], queries + row * p.shape.padded_dim + column, true);
  const int kv_head = step.pass / p.shape.passes_of_group;
  const T* keys = static_cast<const T*>(p.keys) +
                  (static_cast<int64_t>(kv_head) * p.op.num_keys + sequence_start) * p.shape.padded_dim;
  const int first_key = work.key_begin + step.tile * kKeys;
#pragma unroll
  for (int row = row_of_thread; row < kKeys; row += kScoreThreads / kPieces) {
    const bool exists = first_key + row < work.key_end;
    cp_async_16(&stage.keys[row][swizzled(row, piece * 16)],
                keys + static_cast<int64_t>(exists ? first_key + row : 0) * p.shape.padded_dim + column, exists);
  }
}

// scores += queries · keysᵀ over a chunk, on the tensor cores.
template <class T, int heads>
__device__ __forceinline__ void multiply_chunk(const Stage<heads>& stage, Scores<heads>& scores) {
  const int lane = threadIdx.x % 32;
  const int first_token = threadIdx.x / 32 * kTokensPerWarp;
#pragma unroll
  for (int k = 0; k < kChunkBytes; k += 32) {
    uint32_t left[heads / 2][4];
#pragma unroll
    for (int m = 0; m < heads / 2; ++m) {
      const int row = query_row<heads>(first_token, 2 * m) + lane % 16;
      ldmatrix_x4(left[m], shared_address(&stage.queries[row][swizzled(row, k + lane / 16 * 16)]));
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; n += 2) {
      uint32_t right[4];
      const int row = n * 8 + lane % 8 + lane / 16 * 8;
      ldmatrix_x4(right, shared_address(&stage.keys[row][swizzled(row, k + lane / 8 % 2 * 16)]));
#pragma unroll
      for (int m = 0; m < heads / 2; ++m) {
        mma_m16n8k16(scores[m][n], left[m], right[0], right[1], T());
        mma_m16n8k16(scores[m][n + 1], left[m], right[2], right[3], T());
      }
    }
  }
}

__device__ __forceinline__ float4 four_floats(const unsigned char* shared) {
  return *reinterpret_cast<const float4*>(shared);
}

// The same in float32, one fused multiply-add after another.
template <int heads>
__device__ __forceinline__ void multiply_chunk_fma(const Stage<heads>& stage, Scores<heads>& scores) {
  const int lane = threadIdx.x % 32;
  const int token = threadIdx.x / 32 * kTokensPerWarp + lane / 4;
#pragma unroll 1
  for (int k = 0; k < kChunkBytes; k += 16) {
    float4 left[heads];
#pragma unroll
    for (int h = 0; h < heads; ++h) {
      const int row = query_row<heads>(token, h);
      left[h] = four_floats(&stage.queries[row][swizzled(row, k)]);
    }
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const int row = n * 8 + lane % 4 * 2 + j;
        const float4 right = four_floats(&stage.keys[row][swizzled(row, k)]);
#pragma unroll
        for (int h = 0; h < heads; ++h) {
          float& score = scores[h / 2][n][h % 2 * 2 + j];
          score = fmaf(left[h].x, right.x, score);
          score = fmaf(left[h].y, right.y, score);
          score = fmaf(left[h].z, right.z, score);
          score = fmaf(left[h].w, right.w, score);
        }
      }
  }
}

// Streams the chunks of an item in the order of `Order` (tile, pass and chunk of each step).
//
// Two stages: while one is multiplied, the other one fills. A stage is refilled only behind a barrier that every
// warp reaches after it is done with it.
template <class T, int heads, class Order>
class ScorePipeline {
 public:
  __device__ ScorePipeline(const Problem& problem, const WorkItem& work, int block, Stage<heads> (&stages)[kStages],
                           Order order)
      : problem_(problem), work_(work), block_(block), stages_(stages), order_(order) {
    sequence_start_ = problem.op.rows[work.row_begin].sequence_start;
    load(0);
  }

  // scores = queries · keysᵀ of the next pass and tile of the order, unscaled.
  __device__ __forceinline__ void next(Scores<heads>& scores) {
#pragma unroll
    for (int m = 0; m < heads / 2; ++m)
#pragma unroll
      for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) scores[m][n][i] = 0.0f;
#pragma unroll 1
    for (int chunk = 0; chunk < problem_.shape.chunks; ++chunk) {
      cp_async_wait<0>();
      __syncthreads();
      const Stage<heads>& stage = stages_[filled_];
      filled_ ^= 1;
      load(filled_);
      if constexpr (sizeof(T) == 4)
        multiply_chunk_fma(stage, scores);
      else
        multiply_chunk<T>(stage, scores);
    }
  }

 private:
  __device__ __forceinline__ void load(int stage) {
    if (!order_.done()) {
      load_stage<T>(problem_, work_, sequence_start_, block_, order_.step(), stages_[stage]);
      order_.advance(problem_.shape);
    }
    cp_async_commit();
  }

  const Problem& problem_;
  const WorkItem& work_;
  int block_;
  Stage<heads> (&stages_)[kStages];
  Order order_;
  int sequence_start_;
  int filled_ = 0;
};

// Tile by tile, all passes of each: for sums over all heads.
class TilesThenPasses {
 public:
  __device__ explicit TilesThenPasses(int tiles) : tiles_(tiles) {}
  __device__ bool done() const { return step_.tile == tiles_; }
  __device__ Step step() const { return step_; }
  __device__ __forceinline__ void advance(const Shape& shape) {
    if (++step_.chunk < shape.chunks) return;
    step_.chunk = 0;
    if (++step_.pass < shape.passes) return;
    step_.pass = 0;
    ++step_.tile;
  }

 private:
  int tiles_;
  Step step_{};
};

// Pass by pass, all tiles of each: for statistics of a head.
class PassesThenTiles {
 public:
  __device__ PassesThenTiles(int tiles, int passes) : tiles_(tiles), passes_(passes) {}
  __device__ bool done() const { return step_.pass == passes_; }
  __device__ Step step() const { return step_; }
  __device__ __forceinline__ void advance(const Shape& shape) {
    if (++step_.chunk < shape.chunks) return;
    step_.chunk = 0;
    if (++step_.tile < tiles_) return;
    step_.tile = 0;
    ++step_.pass;
  }

 private:
  int tiles_;
  int passes_;
  Step step_{};
};

__device__ __forceinline__ int num_tiles(const WorkItem& work) { return (work.key_end - work.key_begin + kKeys - 1) / kKeys; }

}  // namespace comppo::cuda
