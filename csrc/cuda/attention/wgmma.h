// The sm_90a path of op A, from attention_statistics_sm90.cu.
#pragma once

#include "problem.cuh"

namespace comppo::cuda {

constexpr int kWgmmaHeads = 4;

// Does what the kernel of statistics.cuh does, for 16-bit elements, passes of kWgmmaHeads and heads of 1 or 2 chunks.
const char* launch_wgmma_statistics(const Problem& problem, void* stream);

}  // namespace comppo::cuda
