// Row statistics and top-K of head-averaged attention (comppo/attention_statistics.h): workspace, choice of kernels,
// launches. One thread block per work item; items of a row are joined in a fixed order, without atomics.
#include "comppo/attention_statistics.h"

#include <cstdlib>

#include "attention/combine.cuh"
#include "attention/lse.cuh"
#include "attention/pack.cuh"
#include "attention/problem.cuh"
#include "attention/statistics.cuh"
#include "attention/wgmma.h"
#include "comppo/cuda.h"
#include "launch.cuh"

namespace comppo::cuda {
namespace {

using Kernel = void (*)(const Problem);

// The kernels of one element type and number of heads in a pass.
struct Instance {
  DType dtype;
  int heads;
  int element_bytes;
  float units_per_nat;
  Kernel pack_queries;
  Kernel pack_keys;
  Kernel lse_parts;
  Kernel combine_lse;
  Kernel statistics;
  std::size_t lse_shared;
  std::size_t statistics_shared;
};

template <class T, int heads>
Instance instance(DType dtype) {
  return {dtype,
          heads,
          static_cast<int>(sizeof(T)),
          kUnitsPerNat<T>,
          pack_queries<T, heads>,
          pack_keys<T>,
          lse_parts<T, heads>,
          combine_lse<T, heads>,
          statistics<T, heads>,
          sizeof(LseShared<heads>),
          sizeof(StatisticsShared<heads>)};
}

// Everything that is compiled, but for the sm_90a kernels (attention_statistics_sm90.cu). The head dimension is no
// parameter: it is streamed in chunks of 128 bytes, and padded to a multiple of that.
const Instance kInstances[] = {
    instance<BFloat16, 4>(DType::kBFloat16), instance<BFloat16, 2>(DType::kBFloat16),
    instance<Float16, 4>(DType::kFloat16),   instance<Float16, 2>(DType::kFloat16),
    instance<float, 4>(DType::kFloat32),     instance<float, 2>(DType::kFloat32),
};

int device_attribute(cudaDeviceAttr attribute) {
  int device = 0, value = 0;
  if (cudaGetDevice(&device) != cudaSuccess || cudaDeviceGetAttribute(&value, attribute, device) != cudaSuccess) return 0;
  return value;
}

// Passes of four heads, unless the group has fewer or the device too little shared memory; null for other dtypes.
const Instance* choose_instance(const AttentionStatistics& op) {
  const auto available = static_cast<std::size_t>(device_attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
  const int group = op.num_heads / op.num_kv_heads;
  for (const Instance& i : kInstances)
    if (i.dtype == op.dtype && (i.heads == 2 || (group > 2 && i.statistics_shared <= available))) return &i;
  return nullptr;
}

Shape shape_of(const AttentionStatistics& op, const Instance& i) {
  Shape s;
  s.heads = i.heads;
  s.group = op.num_heads / op.num_kv_heads;
  s.passes_of_group = static_cast<int>(ceil_div(s.group, i.heads));
  s.passes = op.num_kv_heads * s.passes_of_group;
  s.chunk = kChunkBytes / i.element_bytes;
  s.chunks = static_cast<int>(ceil_div(op.head_dim, s.chunk));
  s.padded_dim = s.chunk * s.chunks;
  return s;
}

Workspace workspace_of(const AttentionStatistics& op, const Instance& i) {
  const Shape s = shape_of(op, i);
  Workspace w;
  w.bytes = 0;
  const auto reserve = [&w](int64_t bytes) {
    const int64_t offset = w.bytes;
    w.bytes += ceil_div(bytes, 256) * 256;
    return offset;
  };
  const int64_t rows_of_block = static_cast<int64_t>(s.passes) * s.query_rows();
  w.queries = reserve(op.num_blocks * rows_of_block * s.padded_dim * i.element_bytes);
  w.keys = reserve(static_cast<int64_t>(op.num_kv_heads) * op.num_keys * s.padded_dim * i.element_bytes);
  w.denominators = reserve(op.num_blocks * rows_of_block * sizeof(float));
  w.partial_lse = reserve(op.lse ? 0 : op.num_items * rows_of_block * sizeof(LsePart));
  w.sums = reserve(static_cast<int64_t>(op.num_items) * kNumSums * kTokens * sizeof(float));
  w.lists = reserve(static_cast<int64_t>(op.num_items) * kTokens * kTopCapacity * sizeof(uint64_t));
  w.item_block = reserve(op.num_items * sizeof(int32_t));
  return w;
}

// Whether rows of x can be read 16 bytes at a time.
bool is_aligned(const void* x, int64_t row_stride, int64_t head_stride, int head_dim, int element_bytes) {
  return (reinterpret_cast<uintptr_t>(x) | row_stride * element_bytes | head_stride * element_bytes |
          head_dim * element_bytes) % 16 == 0;
}

Problem problem_of(const AttentionStatistics& op, const Instance& i) {
  const Workspace w = workspace_of(op, i);
  char* base = static_cast<char*>(op.workspace);
  Problem p;
  p.op = op;
  p.shape = shape_of(op, i);
  p.queries = base + w.queries;
  p.keys = base + w.keys;
  p.denominators = reinterpret_cast<float*>(base + w.denominators);
  p.partial_lse = reinterpret_cast<LsePart*>(base + w.partial_lse);
  p.sums = reinterpret_cast<float*>(base + w.sums);
  p.lists = reinterpret_cast<uint64_t*>(base + w.lists);
  p.item_block = reinterpret_cast<int32_t*>(base + w.item_block);
  p.scale = op.scale * i.units_per_nat;
  p.selects = op.top_k > 0 || op.topk_mass || op.max_weight;
  p.queries_aligned = is_aligned(op.q, op.q_row_stride, op.q_head_stride, op.head_dim, i.element_bytes);
  p.keys_aligned = is_aligned(op.k, op.k_row_stride, op.k_head_stride, op.head_dim, i.element_bytes);
  return p;
}

// COMPPO_NO_WGMMA in the environment forces the mma.sync kernels, to compare the two.
bool uses_wgmma(const Problem& p) {
  return p.op.dtype != DType::kFloat32 && p.shape.heads == kWgmmaHeads && p.shape.chunks <= 2 &&
         device_attribute(cudaDevAttrComputeCapabilityMajor) == 9 && std::getenv("COMPPO_NO_WGMMA") == nullptr;
}

const char* pack(const Problem& p, const Instance& i, void* stream) {
  const int64_t pieces = static_cast<int64_t>(p.op.num_kv_heads) * p.op.num_keys * p.shape.padded_dim * i.element_bytes / 16;
  if (const char* error = launch(i.pack_keys, ceil_div(pieces, kPackThreads), kPackThreads, 0, stream, p)) return error;
  return launch(i.pack_queries, static_cast<int64_t>(p.op.num_blocks) * p.shape.passes, kPackThreads, 0, stream, p);
}

const char* compute_lse(const Problem& p, const Instance& i, void* stream) {
  if (const char* error = launch(i.lse_parts, p.op.num_items, kScoreThreads, i.lse_shared, stream, p)) return error;
  return launch(i.combine_lse, static_cast<int64_t>(p.op.num_blocks) * p.shape.passes, p.shape.query_rows(), 0, stream, p);
}

}  // namespace

std::size_t attention_statistics_workspace(const AttentionStatistics& op) {
  const Instance* i = choose_instance(op);
  return i ? static_cast<std::size_t>(workspace_of(op, *i).bytes) : 0;
}

const char* attention_statistics(const AttentionStatistics& op, void* stream) {
  const Instance* i = choose_instance(op);
  if (i == nullptr) return "attention_statistics on CUDA takes float32, bfloat16 or float16";
  if (op.num_rows == 0) return nullptr;
  const Problem p = problem_of(op, *i);
  if (const char* error = pack(p, *i, stream)) return error;
  if (op.lse == nullptr)
    if (const char* error = compute_lse(p, *i, stream)) return error;
  const char* error = uses_wgmma(p) ? launch_wgmma_statistics(p, stream)
                                    : launch(i->statistics, op.num_items, kScoreThreads, i->statistics_shared, stream, p);
  if (error) return error;
  return launch(combine_items, static_cast<int64_t>(op.num_blocks) * (kTokens * 32 / kCombineThreads), kCombineThreads, 0,
                stream, p);
}

}  // namespace comppo::cuda
