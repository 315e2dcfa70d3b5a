// Weights of all heads added up, tile by tile, with the main loop of scores.cuh.
#pragma once

#include "../isa.cuh"
#include "problem.cuh"
#include "row_sums.cuh"
#include "scores.cuh"

namespace comppo::cuda {

template <int heads>
struct StatisticsShared {
  Stage<heads> stages[kStages];
  RowState rows[kScoreThreads / 32];
};

template <class T, int heads>
__global__ void __launch_bounds__(kScoreThreads, 1) statistics(const __grid_constant__ Problem p) {
  auto& shared = dynamic_shared<StatisticsShared<heads>>();
  const int item = blockIdx.x, token = threadIdx.x / 4;
  const WorkItem work = p.op.items[item];
  const int block = p.item_block[item], tiles = num_tiles(work);
  const float* denominators = p.denominators + pass_at(p.shape, block, 0) + query_row<heads>(token, 0);
  ScorePipeline<T, heads, TilesThenPasses> pipeline(p, work, block, shared.stages, TilesThenPasses(tiles));
  RowSums<0> rows(p, shared.rows);
#pragma unroll 1
  for (int tile = 0; tile < tiles; ++tile) {
    float total[kWeights] = {};
#pragma unroll 1
    for (int pass = 0; pass < p.shape.passes; ++pass) {
      float denominator[heads];
      load_denominators(denominators + pass * p.shape.query_rows(), denominator);
      Scores<heads> scores;
      pipeline.next(scores);
#pragma unroll
      for (int h = 0; h < heads; ++h)
#pragma unroll
        for (int i = 0; i < kWeights; ++i)
          total[i] += weight_of_score<T>(scores[h / 2][i / 2][h % 2 * 2 + i % 2], p.scale, denominator[h]);
    }
    rows.add(total, work.key_begin + tile * kKeys);
  }
  rows.finish();
}

}  // namespace comppo::cuda
