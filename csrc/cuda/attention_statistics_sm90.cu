// The kernel of attention/statistics.cuh with Hopper's instructions: a warpgroup feeds tiles by TMA, two others multiply
// them by wgmma and keep the rows' sums and lists. Compiled for sm_90a alone.
//
// A thread block takes 64 rows × 256 keys at a time; each consumer warpgroup has 32 tokens with the 4 heads of a pass. Its
// 128 rows × 256 keys are eight products of 64 × 64 in two sets of accumulators by turns: while one product runs, the
// weights of the one before are computed. (Products of 64 × 128 read shared memory less often, but two of them beside
// the 64 weights a thread keeps leave too few registers: ptxas then spills in the main loop.)
#include "attention/row_sums.cuh"
#include "attention/wgmma.h"
#include "launch.cuh"

namespace comppo::cuda {
namespace {

constexpr int kHeads = kWgmmaHeads;
constexpr int kWideKeys = 2 * kKeys;  // keys that are in shared memory at a time
constexpr int kSlots = 3;
constexpr int kGroupThreads = 128;
constexpr int kThreads = 3 * kGroupThreads;
constexpr int kProducerRegisters = 40, kConsumerRegisters = 232;  // 128 · (40 + 2 · 232) ≤ 65536
constexpr int kConsumerWarps = 8;
constexpr int kChunk16 = kChunkBytes / 2;  // elements

// One chunk of a pass's queries and of the keys, rows of 128 bytes under the 128-byte swizzle.
struct Slot {
  unsigned char queries[kTokens * kHeads][kChunkBytes];
  unsigned char keys[kWideKeys][kChunkBytes];
};

struct Shared {
  alignas(1024) Slot slots[kSlots];
  RowState rows[kConsumerWarps];
  uint64_t full[kSlots];   // the slot's copies have landed
  uint64_t empty[kSlots];  // every consumer warp is done with the slot
};

// Where producer and consumers are in the ring. Slots are used in turn; every use is a phase of the slot's barriers.
struct Cursor {
  int slot = 0;
  int parity = 0;

  __device__ __forceinline__ void advance() {
    if (++slot < kSlots) return;
    slot = 0;
    parity ^= 1;
  }
};

// One thread: fills the ring in the order in which it is read.
__device__ void produce(const Problem& p, const CUtensorMap& queries, const CUtensorMap& keys, Shared& shared) {
  const WorkItem work = p.op.items[blockIdx.x];
  const int block = p.item_block[blockIdx.x];
  const int start = p.op.rows[work.row_begin].sequence_start;
  Cursor at;
  for (int first_key = work.key_begin; first_key < work.key_end; first_key += kWideKeys)
    for (int pass = 0; pass < p.shape.passes; ++pass)
      for (int chunk = 0; chunk < p.shape.chunks; ++chunk, at.advance()) {
        mbarrier_wait(shared.empty[at.slot], at.parity ^ 1);
        mbarrier_arrive_expect(shared.full[at.slot], sizeof(Slot));
        Slot& slot = shared.slots[at.slot];
        const int query_row = static_cast<int>(pass_at(p.shape, block, pass));
        tma_load_2d(&slot.queries, queries, chunk * kChunk16, query_row, shared.full[at.slot]);
        tma_load_3d(&slot.keys, keys, chunk * kChunk16, start + first_key, pass / p.shape.passes_of_group,
                    shared.full[at.slot]);
      }
}

// wgmma's description of a K-major operand: 8-row groups 1024 bytes apart, 128-byte swizzle. Addresses count in units
// of 16 bytes. Only the lower word varies: the rest stays out of the registers.
struct Operand {
  uint32_t lower;

  __device__ __forceinline__ explicit Operand(const void* shared) : lower(shared_address(shared) >> 4 | 1u << 16) {}

  __device__ __forceinline__ uint64_t at(int byte) const {
    constexpr uint32_t kUpper = 1024 >> 4 | 1u << 30;
    return static_cast<uint64_t>(kUpper) << 32 | (lower + byte / 16);
  }
};

// Starts scores = queries · keysᵀ of 64 rows × 64 keys over all chunks.
template <class T, int chunks>
__device__ __forceinline__ void start_product(const Shared& shared, const Cursor (&at)[chunks], int first_row,
                                              int first_key, float (&scores)[32]) {
  wgmma_fence();
#pragma unroll
  for (int c = 0; c < chunks; ++c) {
    const Operand queries(&shared.slots[at[c].slot].queries[first_row]), keys(&shared.slots[at[c].slot].keys[first_key]);
#pragma unroll
    for (int k = 0; k < kChunkBytes; k += 32)  // 16 elements
      wgmma_m64n64k16(scores, queries.at(k), keys.at(k), c + k > 0, T());
  }
  wgmma_commit();
}

// The two heads of a product into the weights of its 64 keys, which begin at `first` of the lane's.
template <class T, int first>
__device__ __forceinline__ void add_weights(const float (&scores)[32], float scale, const float* denominator,
                                            float (&total)[kWeights]) {
#pragma unroll
  for (int h = 0; h < 2; ++h)
#pragma unroll
    for (int i = 0; i < kWeights / 2; ++i)
      total[first + i] += weight_of_score<T>(scores[i / 2 * 4 + h * 2 + i % 2], scale, denominator[h]);
}

// A consumer warpgroup's share of a pass: waits for its chunks, and lets go of them.
template <class T, int chunks>
__device__ __forceinline__ void consume_pass(float scale, const float* denominators, Shared& shared, Cursor& at,
                                             float (&total)[2][kWeights]) {
  const unsigned thread = thread_now() - kGroupThreads;
  float denominator[kHeads];
  load_denominators(denominators + query_row<kHeads>(thread / 4, 0), denominator);
  Cursor chunk[chunks];
#pragma unroll
  for (int c = 0; c < chunks; ++c, at.advance()) {
    chunk[c] = at;
    mbarrier_wait(shared.full[at.slot], at.parity);
  }
  const unsigned group = __shfl_sync(kAllLanes, thread / kGroupThreads, 0);  // tells the compiler that a warp agrees on it
  const int first_row = group * (kTokens / 2 * kHeads);
  // Product i: heads 2 (i % 2) and 2 (i % 2) + 1, keys 64 (i / 2) … 64 (i / 2) + 63.
  constexpr int kProducts = 8;
  float scores[2][32];
  start_product<T>(shared, chunk, first_row, 0, scores[0]);
#pragma unroll
  for (int i = 0; i < kProducts; ++i) {
    const int next = i + 1;
    if (next < kProducts) {
      start_product<T>(shared, chunk, first_row + next % 2 * 64, next / 2 * 64, scores[next % 2]);
      wgmma_wait<1>();
    } else {
      wgmma_wait<0>();
      if (thread % 32 == 0) {
#pragma unroll
        for (int c = 0; c < chunks; ++c) mbarrier_arrive(shared.empty[chunk[c].slot]);
      }
    }
    wgmma_results(scores[i % 2]);
    if (i / 2 % 2 == 0)
      add_weights<T, 0>(scores[i % 2], scale, denominator + i % 2 * 2, total[i / 4]);
    else
      add_weights<T, kWeights / 2>(scores[i % 2], scale, denominator + i % 2 * 2, total[i / 4]);
  }
}

template <class T, int chunks>
__device__ void consume(const Problem& p, Shared& shared) {
  const WorkItem work = p.op.items[blockIdx.x];
  const float* denominators = p.denominators + pass_at(p.shape, p.item_block[blockIdx.x], 0);
  RowSums<kGroupThreads> rows(p, shared.rows);
  Cursor at;
#pragma unroll 1
  for (int first_key = work.key_begin; first_key < work.key_end; first_key += kWideKeys) {
    float total[2][kWeights] = {};
#pragma unroll 1
    for (int pass = 0; pass < p.shape.passes; ++pass)
      consume_pass<T, chunks>(p.scale, denominators + pass * (kTokens * kHeads), shared, at, total);
    rows.add(total[0], first_key);
    if (first_key + kKeys < work.key_end) rows.add(total[1], first_key + kKeys);  // else it is the next item's
  }
  rows.finish();
}

template <class T, int chunks>
__global__ void __launch_bounds__(kThreads, 1)
    statistics_wgmma(const __grid_constant__ Problem p, const __grid_constant__ CUtensorMap queries,
                     const __grid_constant__ CUtensorMap keys) {
  Shared& shared = dynamic_shared<Shared>();
  if (threadIdx.x == 0) {
    for (int s = 0; s < kSlots; ++s) {
      mbarrier_init(shared.full[s], 1);
      mbarrier_init(shared.empty[s], kConsumerWarps);
    }
    mbarrier_init_fence();
  }
  __syncthreads();
  if (threadIdx.x < kGroupThreads) {
    give_up_registers<kProducerRegisters>();
    if (threadIdx.x == 0) produce(p, queries, keys, shared);
  } else {
    claim_registers<kConsumerRegisters>();
    consume<T, chunks>(p, shared);
  }
}

// --- host

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function, without linking to the driver.
Encode find_encoder() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
  return error == cudaSuccess && found == cudaDriverEntryPointSuccess ? reinterpret_cast<Encode>(function) : nullptr;
}

// A packed array [heads, rows, padded_dim] of which boxes of one chunk × `box_rows` are copied.
const char* encode(CUtensorMap* map, const Problem& p, void* base, int rank, int64_t rows, int64_t heads, int box_rows) {
  static const Encode encoder = find_encoder();
  if (encoder == nullptr) return "the CUDA driver has no cuTensorMapEncodeTiled";
  const auto type =
      p.op.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_FLOAT16;
  const cuuint64_t row_bytes = 2 * static_cast<cuuint64_t>(p.shape.padded_dim);
  const cuuint64_t size[3] = {static_cast<cuuint64_t>(p.shape.padded_dim), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(heads)};
  const cuuint64_t strides[2] = {row_bytes, row_bytes * static_cast<cuuint64_t>(rows)};
  const cuuint32_t box[3] = {kChunk16, static_cast<cuuint32_t>(box_rows), 1};
  const cuuint32_t element_strides[3] = {1, 1, 1};
  const CUresult result =
      encoder(map, type, static_cast<cuuint32_t>(rank), base, size, strides, box, element_strides,
              CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
              CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? nullptr : "cuTensorMapEncodeTiled refused a tensor map";
}

template <class T>
const char* launch_for(const Problem& p, const CUtensorMap& queries, const CUtensorMap& keys, void* stream) {
  const auto kernel = p.shape.chunks == 1 ? statistics_wgmma<T, 1> : statistics_wgmma<T, 2>;
  return launch(kernel, p.op.num_items, kThreads, sizeof(Shared), stream, p, queries, keys);
}

}  // namespace

const char* launch_wgmma_statistics(const Problem& p, void* stream) {
  CUtensorMap queries, keys;
  const int64_t query_rows = static_cast<int64_t>(p.op.num_blocks) * p.shape.passes * p.shape.query_rows();
  if (const char* error = encode(&queries, p, p.queries, 2, query_rows, 1, p.shape.query_rows())) return error;
  if (const char* error = encode(&keys, p, p.keys, 3, p.op.num_keys, p.op.num_kv_heads, kWideKeys)) return error;
  return p.op.dtype == DType::kBFloat16 ? launch_for<BFloat16>(p, queries, keys, stream)
                                        : launch_for<Float16>(p, queries, keys, stream);
}

}  // namespace comppo::cuda
