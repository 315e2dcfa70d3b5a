// Tensor maps of the CUDA driver, as far as csrc/cuda uses them.
#pragma once

#include <cstdint>
#include <cstring>

#include "cuda_runtime.h"

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;

enum CUresult { CUDA_SUCCESS, CUDA_ERROR_INVALID_VALUE };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_FLOAT16, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE, CU_TENSOR_MAP_SWIZZLE_128B };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE, CU_TENSOR_MAP_L2_PROMOTION_L2_256B };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };

struct alignas(64) CUtensorMap {
  const char* base;
  uint32_t rank;
  bool swizzle;
  uint64_t size[3];
  uint64_t stride[3];  // bytes; that of the first dimension is an element
  uint32_t box[3];
};

// What the driver's encoder would refuse, this one refuses.
inline CUresult cuTensorMapEncodeTiled(CUtensorMap* map, CUtensorMapDataType, cuuint32_t rank, void* base,
                                       const cuuint64_t* size, const cuuint64_t* strides, const cuuint32_t* box,
                                       const cuuint32_t* element_strides, CUtensorMapInterleave,
                                       CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  constexpr uint64_t element = 2;
  if (rank < 1 || rank > 3 || reinterpret_cast<uintptr_t>(base) % 16) return CUDA_ERROR_INVALID_VALUE;
  *map = {static_cast<const char*>(base), rank, swizzle == CU_TENSOR_MAP_SWIZZLE_128B, {1, 1, 1}, {}, {1, 1, 1}};
  for (cuuint32_t i = 0; i < rank; ++i) {
    map->size[i] = size[i];
    map->box[i] = box[i];
    map->stride[i] = i == 0 ? element : strides[i - 1];
    if (size[i] == 0 || box[i] == 0 || box[i] > 256 || element_strides[i] != 1) return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && (map->stride[i] % 16 || map->stride[i] >= 1ull << 40)) return CUDA_ERROR_INVALID_VALUE;
  }
  const uint64_t inner = box[0] * element;
  if (inner % 16 || (map->swizzle && inner > 128)) return CUDA_ERROR_INVALID_VALUE;
  return CUDA_SUCCESS;
}

enum cudaDriverEntryPointQueryResult { cudaDriverEntryPointSuccess, cudaDriverEntryPointSymbolNotFound };
constexpr unsigned long long cudaEnableDefault = 0;

inline cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int,
                                                    unsigned long long, cudaDriverEntryPointQueryResult* result) {
  const bool known = std::strcmp(symbol, "cuTensorMapEncodeTiled") == 0;
  *function = known ? reinterpret_cast<void*>(&cuTensorMapEncodeTiled) : nullptr;
  *result = known ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
  return cudaSuccess;
}
