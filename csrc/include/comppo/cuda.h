// What csrc/cuda/*.cu define and csrc/ops.cpp calls where COMPPO_BUILD is cuda. Free of torch and of CUDA headers.
//
// A launcher enqueues its kernels on `stream` (a cudaStream_t) of the current device and returns without
// synchronising: null, or a static sentence saying what failed. All tensors are on that device; fields that are
// not pointers are read on the host. A launcher is also called with zero rows, keys or tokens.
#pragma once

#include <cstddef>

#include "comppo/attention_statistics.h"
#include "comppo/comp_gae.h"
#include "comppo/pool_history.h"

namespace comppo::cuda {

std::size_t attention_statistics_workspace(const AttentionStatistics& op);  // bytes; reads no device pointer
const char* attention_statistics(const AttentionStatistics& op, void* stream);

const char* pool_history(const PoolHistory& op, void* stream);
std::size_t pool_history_backward_workspace(const PoolHistoryBackward& op);  // bytes; reads no device pointer
const char* pool_history_backward(const PoolHistoryBackward& op, void* stream);

const char* comp_gae(const CompGae& op, void* stream);

}  // namespace comppo::cuda
