// Causal top-K pooling and its backward (comppo/pool_history.h). A warp owns a row: its lanes spread over features
// while features are read, and over edges while scores are computed. No atomics: every sum has one fixed order.
#include "comppo/pool_history.h"

#include "comppo/cuda.h"
#include "isa.cuh"
#include "launch.cuh"

namespace comppo::cuda {
namespace {

constexpr int kMaxEdges = 64;  // of a row
constexpr int kBatches = kMaxEdges / 32;
constexpr int kRowThreads = 256;
constexpr int kKeyThreads = 128;
constexpr int kColumns = 4;  // features a lane reads at a time: c, c + 32, c + 64, c + 96

// One number per edge: batch b of lane l belongs to edge 32 b + l.
template <class T>
using PerEdge = T[kBatches];

// Adds up 32 numbers per lane over the warp: lane l returns the sum of everyone's partial[l].
template <class T>
__device__ __forceinline__ T reduce_transposed(T (&partial)[32]) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int half = 16; half > 0; half /= 2) {
    const bool upper = lane & half;
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if (i >= half) break;
      const T sent = upper ? partial[i] : partial[i + half];
      const T kept = upper ? partial[i + half] : partial[i];
      partial[i] = kept + __shfl_xor_sync(kAllLanes, sent, half);
    }
  }
  return partial[0];
}

// ⟨x, features + offset⟩ for the 32 edges of a batch; 0 for padding. `offset` is the lane's own edge's, < 0 for padding.
template <class T>
__device__ __forceinline__ T edge_dots(const T* x, const T* features, int64_t offset, int width) {
  const int lane = threadIdx.x % 32;
  T partial[32] = {};
  for (int first = 0; first < width; first += 32 * kColumns) {
    const int column = first + lane;
    T mine[kColumns];
#pragma unroll
    for (int c = 0; c < kColumns; ++c) mine[c] = column + 32 * c < width ? x[column + 32 * c] : T(0);
#pragma unroll
    for (int e = 0; e < 32; ++e) {
      const int64_t at = __shfl_sync(kAllLanes, offset, e);
      if (at < 0) continue;
#pragma unroll
      for (int c = 0; c < kColumns; ++c)
        if (column + 32 * c < width) partial[e] += mine[c] * features[at + column + 32 * c];
    }
  }
  return reduce_transposed(partial);
}

// result[c] = scale · Σ over edges of coefficient · features[offset + c], in the order of the edges.
template <class T>
__device__ __forceinline__ void weighted_sum(const PerEdge<T>& coefficient, const PerEdge<int64_t>& offset,
                                             const T* features, int width, int num_edges, T scale, T* result) {
  const int lane = threadIdx.x % 32;
  for (int first = 0; first < width; first += 32 * kColumns) {
    T sum[kColumns] = {};
#pragma unroll
    for (int b = 0; b < kBatches; ++b) {
      const int in_batch = min(32, num_edges - 32 * b);
#pragma unroll 4
      for (int e = 0; e < in_batch; ++e) {
        const T weight = __shfl_sync(kAllLanes, coefficient[b], e);
        const int64_t at = __shfl_sync(kAllLanes, offset[b], e);
        if (at < 0) continue;
#pragma unroll
        for (int c = 0; c < kColumns; ++c) {
          const int column = first + 32 * c + lane;
          if (column < width) sum[c] += weight * features[at + column];
        }
      }
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c)
      if (first + 32 * c + lane < width) result[first + 32 * c + lane] = sum[c] * scale;
  }
}

template <class T>
__device__ __forceinline__ T warp_sum(T x) {
#pragma unroll
  for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(kAllLanes, x, lanes);
  return x;
}

template <class T>
__device__ __forceinline__ T dot(const T* x, const T* y, int width) {
  T sum = 0;
  for (int c = threadIdx.x % 32; c < width; c += 32) sum += x[c] * y[c];
  return warp_sum(sum);
}

// Everything Eq. 22–25 say about the edges of one row.
template <class T>
struct RowEdges {
  PerEdge<int64_t> offset;  // of the key's features, < 0 for padding
  PerEdge<T> prior;         // a
  PerEdge<T> gate;          // σ(β)
  PerEdge<T> relevance;     // before the ReLU
  PerEdge<T> score;         // s
};

// ReLU that keeps NaN.
template <class T>
__device__ __forceinline__ T relu(T x) {
  return x < T(0) ? T(0) : x;
}

template <class T>
__device__ __forceinline__ RowEdges<T> score_edges(const PoolHistory& op, int row) {
  const int lane = threadIdx.x % 32;
  const T* query_beta = static_cast<const T*>(op.query_beta) + row * op.query_beta_stride;
  const T* query_rel = static_cast<const T*>(op.query_rel) + row * op.query_rel_stride;
  const T* features = static_cast<const T*>(op.key_features);
  const T root = sqrt(static_cast<T>(op.width));
  RowEdges<T> edges;
#pragma unroll
  for (int b = 0; b < kBatches; ++b) {
    const int edge = 32 * b + lane;
    const int64_t number = static_cast<int64_t>(row) * op.top_k + edge;
    const int index = edge < op.top_k ? op.index[number] : -1;
    edges.offset[b] = index < 0 ? -1 : (op.seq_start[row] + index) * op.key_features_stride;
    edges.prior[b] = index < 0 ? T(0) : static_cast<const T*>(op.weight)[number];
    const T beta = edge_dots(query_beta, features, edges.offset[b], op.width) / root;
    edges.gate[b] = T(1) / (T(1) + exp(-beta));
    edges.relevance[b] = edge_dots(query_rel, features + op.width, edges.offset[b], op.width) / root;
    edges.score[b] = edges.prior[b] * edges.gate[b] * relu(edges.relevance[b]);
  }
  return edges;
}

__device__ __forceinline__ int row_of_warp() {
  return static_cast<int>((blockIdx.x * blockDim.x + threadIdx.x) / 32);
}

template <class T>
__global__ void __launch_bounds__(kRowThreads, 2) pool_kernel(const PoolHistory op) {
  const int row = row_of_warp();
  if (row >= op.num_rows) return;
  const RowEdges<T> edges = score_edges<T>(op, row);
  T total = 0;
#pragma unroll
  for (int b = 0; b < kBatches; ++b) total += warp_sum(edges.score[b]);
  weighted_sum(edges.score, edges.offset, static_cast<const T*>(op.key_features) + 2 * op.width, op.out_width, op.top_k,
               T(1) / (total + static_cast<T>(op.epsilon)),
               static_cast<T*>(op.pooled) + static_cast<int64_t>(row) * op.out_width);
  if (threadIdx.x % 32 == 0) static_cast<T*>(op.score_sum)[row] = total;
}

// What an edge passes on to the gradients of its key: d loss / d k^β = beta · q^β, and so on.
template <class T>
struct EdgeGradient {
  T beta;
  T relevance;
  T value;
};

// The gradient of a row's queries, and the factors of its edges for the keys.
template <class T>
__global__ void __launch_bounds__(kRowThreads, 2) pool_backward_rows(const PoolHistoryBackward op, EdgeGradient<T>* factors) {
  const PoolHistory& forward = op.forward;
  const int row = row_of_warp();
  if (row >= forward.num_rows) return;
  const int lane = threadIdx.x % 32;
  const T* features = static_cast<const T*>(forward.key_features);
  const T* grad = static_cast<const T*>(op.grad_pooled) + static_cast<int64_t>(row) * forward.out_width;
  const T* pooled = static_cast<const T*>(forward.pooled) + static_cast<int64_t>(row) * forward.out_width;
  const T root = sqrt(static_cast<T>(forward.width));
  const T inverse = T(1) / (static_cast<const T*>(forward.score_sum)[row] + static_cast<T>(forward.epsilon));
  const T grad_sum = static_cast<const T*>(op.grad_score_sum)[row];
  const T mean = dot(grad, pooled, forward.out_width);

  const RowEdges<T> edges = score_edges<T>(forward, row);
  PerEdge<T> of_beta, of_relevance;
#pragma unroll
  for (int b = 0; b < kBatches; ++b) {
    const T along = edge_dots(grad, features + 2 * forward.width, edges.offset[b], forward.out_width);
    const T grad_score = (along - mean) * inverse + grad_sum;
    of_beta[b] = grad_score * edges.score[b] * (T(1) - edges.gate[b]) / root;
    of_relevance[b] = edges.relevance[b] > T(0) ? grad_score * edges.prior[b] * edges.gate[b] / root : T(0);
    if (edges.offset[b] >= 0)
      factors[static_cast<int64_t>(row) * forward.top_k + 32 * b + lane] = {of_beta[b], of_relevance[b],
                                                                           edges.score[b] * inverse};
  }
  const int64_t at = static_cast<int64_t>(row) * forward.width;
  weighted_sum(of_beta, edges.offset, features, forward.width, forward.top_k, T(1),
               static_cast<T*>(op.grad_query_beta) + at);
  weighted_sum(of_relevance, edges.offset, features + forward.width, forward.width, forward.top_k, T(1),
               static_cast<T*>(op.grad_query_rel) + at);
}

template <class T>
struct ChunkEdges {
  EdgeGradient<T> factor[kEdgesPerChunk];
  int row[kEdgesPerChunk];
};

// The key that owns a chunk: the last one whose chunks begin at or before it.
__device__ __forceinline__ int key_of_chunk(const int32_t* chunk_offsets, int num_keys, int chunk) {
  int low = 0, high = num_keys - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (chunk_offsets[middle] <= chunk)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// First level of the sum over a key's edges: one block a chunk, one thread a column.
template <class T>
__global__ void __launch_bounds__(kKeyThreads)
    pool_backward_chunks(const PoolHistoryBackward op, const EdgeGradient<T>* factors, T* partial) {
  ChunkEdges<T>& edges = dynamic_shared<ChunkEdges<T>>();
  const PoolHistory& forward = op.forward;
  const int chunk = blockIdx.x;
  if (chunk >= op.transposed.chunk_offsets[forward.num_keys]) return;
  const int key = key_of_chunk(op.transposed.chunk_offsets, forward.num_keys, chunk);
  const int first = op.transposed.key_offsets[key] + (chunk - op.transposed.chunk_offsets[key]) * kEdgesPerChunk;
  const int count = min(kEdgesPerChunk, op.transposed.key_offsets[key + 1] - first);
  for (int e = threadIdx.x; e < count; e += kKeyThreads) {
    const int edge = op.transposed.order[first + e];
    edges.factor[e] = factors[edge];
    edges.row[e] = edge / forward.top_k;
  }
  __syncthreads();
  const int columns = 2 * forward.width + forward.out_width;
  for (int column = threadIdx.x; column < columns; column += kKeyThreads) {
    T sum = 0;
    if (column < forward.width) {
      const T* source = static_cast<const T*>(forward.query_beta) + column;
#pragma unroll 8
      for (int e = 0; e < count; ++e) sum += edges.factor[e].beta * source[edges.row[e] * forward.query_beta_stride];
    } else if (column < 2 * forward.width) {
      const T* source = static_cast<const T*>(forward.query_rel) + (column - forward.width);
#pragma unroll 8
      for (int e = 0; e < count; ++e) sum += edges.factor[e].relevance * source[edges.row[e] * forward.query_rel_stride];
    } else {
      const T* source = static_cast<const T*>(op.grad_pooled) + (column - 2 * forward.width);
#pragma unroll 8
      for (int e = 0; e < count; ++e)
        sum += edges.factor[e].value * source[static_cast<int64_t>(edges.row[e]) * forward.out_width];
    }
    partial[static_cast<int64_t>(chunk) * columns + column] = sum;
  }
}

// Second level: one block a key.
template <class T>
__global__ void __launch_bounds__(kKeyThreads) pool_backward_keys(const PoolHistoryBackward op, const T* partial) {
  const int key = blockIdx.x;
  const int columns = 2 * op.forward.width + op.forward.out_width;
  const int begin = op.transposed.chunk_offsets[key], end = op.transposed.chunk_offsets[key + 1];
  T* result = static_cast<T*>(op.grad_key_features) + static_cast<int64_t>(key) * columns;
  for (int column = threadIdx.x; column < columns; column += kKeyThreads) {
    T sum = 0;
    for (int chunk = begin; chunk < end; ++chunk) sum += partial[static_cast<int64_t>(chunk) * columns + column];
    result[column] = sum;
  }
}

// --- host

struct BackwardWorkspace {
  int64_t max_chunks;
  std::size_t partial;  // byte offset; the edges' factors come first
  std::size_t bytes;
};

template <class T>
BackwardWorkspace backward_workspace(const PoolHistory& forward) {
  const int64_t edges = static_cast<int64_t>(forward.num_rows) * forward.top_k;
  const int64_t columns = 2 * static_cast<int64_t>(forward.width) + forward.out_width;
  BackwardWorkspace w;
  w.max_chunks = (edges < forward.num_keys ? edges : forward.num_keys) + edges / kEdgesPerChunk;
  w.partial = ceil_div(edges * sizeof(EdgeGradient<T>), 256) * 256;
  w.bytes = w.partial + w.max_chunks * columns * sizeof(T);
  return w;
}

int64_t row_blocks(const PoolHistory& op) { return ceil_div(op.num_rows, kRowThreads / 32); }

template <class T>
const char* backward(const PoolHistoryBackward& op, void* stream) {
  const BackwardWorkspace w = backward_workspace<T>(op.forward);
  auto* factors = static_cast<EdgeGradient<T>*>(op.workspace);
  auto* partial = reinterpret_cast<T*>(static_cast<char*>(op.workspace) + w.partial);
  if (const char* error = launch(pool_backward_rows<T>, row_blocks(op.forward), kRowThreads, 0, stream, op, factors))
    return error;
  if (const char* error = launch(pool_backward_chunks<T>, w.max_chunks, kKeyThreads, sizeof(ChunkEdges<T>), stream, op,
                                 factors, partial))
    return error;
  return launch(pool_backward_keys<T>, op.forward.num_keys, kKeyThreads, 0, stream, op, partial);
}

const char* unsupported(const PoolHistory& op) {
  if (op.dtype != DType::kFloat32 && op.dtype != DType::kFloat64)
    return "pool_history on CUDA takes float32 or float64";
  if (op.top_k > kMaxEdges) return "pool_history on CUDA takes at most 64 edges a row";
  return nullptr;
}

}  // namespace

const char* pool_history(const PoolHistory& op, void* stream) {
  if (const char* error = unsupported(op)) return error;
  const auto kernel = op.dtype == DType::kFloat64 ? pool_kernel<double> : pool_kernel<float>;
  return launch(kernel, row_blocks(op), kRowThreads, 0, stream, op);
}

std::size_t pool_history_backward_workspace(const PoolHistoryBackward& op) {
  return op.forward.dtype == DType::kFloat64 ? backward_workspace<double>(op.forward).bytes
                                             : backward_workspace<float>(op.forward).bytes;
}

const char* pool_history_backward(const PoolHistoryBackward& op, void* stream) {
  if (const char* error = unsupported(op.forward)) return error;
  return op.forward.dtype == DType::kFloat64 ? backward<double>(op, stream) : backward<float>(op, stream);
}

}  // namespace comppo::cuda
