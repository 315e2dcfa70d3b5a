// The part of the CUDA runtime and of CUDA C++ that csrc/cuda uses, on top of the emulator.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <tuple>
#include <utility>

#include "../simt.hpp"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define threadIdx (emulator::current->index)

using std::exp;
using std::exp2;
using std::log;
using std::log2;
using std::max;
using std::min;
using std::sqrt;

struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

// --- intrinsics

inline void __syncthreads() { emulator::sync_block(); }

inline void emulator_require_all_lanes(unsigned mask) {
  if (mask != 0xffffffffu) emulator::fail("a warp collective names lanes %08x, not all of them", mask);
}

inline void __syncwarp(unsigned mask = 0xffffffffu) {
  emulator_require_all_lanes(mask);
  emulator::meet<char>(emulator::warp(), "__syncwarp", 0, [](const int*, char*) {});
}

// shfl: lane l receives the value of source(l, its own argument).
template <class T, class Source>
T emulator_shuffle(const char* name, unsigned mask, T value, int argument, Source source) {
  struct In {
    T value;
    int argument;
  };
  emulator_require_all_lanes(mask);
  return emulator::meet<T>(emulator::warp(), name, In{value, argument}, [source](const In* in, T* out) {
    for (int l = 0; l < 32; ++l) out[l] = in[source(l, in[l].argument)].value;
  });
}

template <class T>
T __shfl_sync(unsigned mask, T value, int from) {
  return emulator_shuffle("__shfl_sync", mask, value, from, [](int, int from) { return from & 31; });
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, int by) {
  return emulator_shuffle("__shfl_up_sync", mask, value, by, [](int l, int by) { return l >= by ? l - by : l; });
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int with) {
  return emulator_shuffle("__shfl_xor_sync", mask, value, with, [](int l, int with) { return l ^ with; });
}

inline unsigned __ballot_sync(unsigned mask, bool predicate) {
  emulator_require_all_lanes(mask);
  return emulator::meet<unsigned>(emulator::warp(), "__ballot_sync", predicate, [](const bool* in, unsigned* out) {
    unsigned ballot = 0;
    for (int l = 0; l < 32; ++l) ballot |= unsigned(in[l]) << l;
    for (int l = 0; l < 32; ++l) out[l] = ballot;
  });
}

inline int __popc(unsigned x) { return __builtin_popcount(x); }

inline unsigned __float_as_uint(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, 4);
  return bits;
}

inline float __uint_as_float(unsigned bits) {
  float x;
  std::memcpy(&x, &bits, 4);
  return x;
}

template <class T>
T __ldg(const T* pointer) {
  return *pointer;
}

// --- runtime

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorLaunchFailure };
using cudaStream_t = struct CUstream_st*;

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  std::size_t dynamicSmemBytes;
  cudaStream_t stream;
};

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr {
  cudaDevAttrComputeCapabilityMajor,
  cudaDevAttrComputeCapabilityMinor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
};

inline const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchFailure ? emulator::fault : error == cudaSuccess ? "no error" : "invalid argument";
}

inline std::size_t emulator_allowed_shared = 48 << 10;

template <class Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int bytes) {
  if (bytes > emulator::shared_limit) return cudaErrorInvalidValue;
  emulator_allowed_shared = static_cast<std::size_t>(bytes);
  return cudaSuccess;
}

inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor   ? emulator::compute_capability / 10
           : attribute == cudaDevAttrComputeCapabilityMinor ? emulator::compute_capability % 10
                                                            : emulator::shared_limit;
  return cudaSuccess;
}

template <class... Parameters, class... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...), Arguments&&... arguments) {
  if (config->gridDim.x == 0 || config->blockDim.x == 0 || config->blockDim.x > 1024 ||
      config->dynamicSmemBytes > emulator_allowed_shared)
    return cudaErrorInvalidValue;
  const std::tuple<std::decay_t<Parameters>...> parameters(std::forward<Arguments>(arguments)...);
  const bool ok = emulator::run_grid(config->gridDim, config->blockDim, config->dynamicSmemBytes,
                                     [kernel, &parameters] { std::apply(kernel, parameters); });
  return ok ? cudaSuccess : cudaErrorLaunchFailure;
}
