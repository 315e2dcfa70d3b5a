// Host side of a kernel launch.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <utility>

namespace comppo::cuda {

// Enqueues a kernel: null, or what the runtime says is wrong. An empty grid is no launch.
template <class... Parameters, class... Arguments>
const char* launch(void (*kernel)(Parameters...), int64_t blocks, int threads, std::size_t shared_bytes, void* stream,
                   Arguments&&... arguments) {
  if (blocks == 0) return nullptr;
  if (blocks > 0x7fffffff) return "a CUDA kernel would need more than 2^31 - 1 thread blocks";
  cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, static_cast<int>(shared_bytes));
  if (error != cudaSuccess) return cudaGetErrorString(error);
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(threads);
  config.dynamicSmemBytes = shared_bytes;
  config.stream = static_cast<cudaStream_t>(stream);
  error = cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...);
  return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}

constexpr int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

}  // namespace comppo::cuda
