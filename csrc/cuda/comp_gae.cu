// Comp-GAE (comppo/comp_gae.h): one thread block per packed response, walked from its end in chunks of one token a
// thread. Two scans a chunk: who comes next, which gives δ, and the affine recursion of A.
#include "comppo/comp_gae.h"

#include "comppo/cuda.h"
#include "isa.cuh"
#include "launch.cuh"

namespace comppo::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

// What a token sees to its right. A stretch of gaps alone (`present` false) passes on what lies beyond it.
struct Next {
  int present;
  int index;     // of the next valid token in the response, −1 if there is none
  float value;   // V of the next token of the chain
  float reward;  // of the gaps up to it
};

// x ↦ offset + factor · x, the advantage of a stretch's first token given the one that follows the stretch.
struct Affine {
  float offset;
  float factor;
};

// combine(earlier, later) describes the two stretches joined.
__device__ __forceinline__ Next combine(const Next& earlier, const Next& later) {
  if (earlier.present) return earlier;
  return {later.present, later.index, later.value, earlier.reward + later.reward};
}

__device__ __forceinline__ Affine combine(const Affine& earlier, const Affine& later) {
  return {earlier.offset + earlier.factor * later.offset, earlier.factor * later.factor};
}

__device__ __forceinline__ Next shift(const Next& x, int lanes) {
  return {__shfl_up_sync(kAllLanes, x.present, lanes), __shfl_up_sync(kAllLanes, x.index, lanes),
          __shfl_up_sync(kAllLanes, x.value, lanes), __shfl_up_sync(kAllLanes, x.reward, lanes)};
}

__device__ __forceinline__ Affine shift(const Affine& x, int lanes) {
  return {__shfl_up_sync(kAllLanes, x.offset, lanes), __shfl_up_sync(kAllLanes, x.factor, lanes)};
}

template <class T>
struct Scanned {
  T before;   // the tokens to the right of this one
  T through;  // and this one
};

// Thread i holds the i-th token from the right. A second call needs other totals; behind the barrier of that one, the
// first ones are free again. `carry` describes what lies to the right of the chunk on entry, and
// the chunk too on return.
template <class T>
__device__ Scanned<T> scan_from_right(T x, T& carry, T (&warp_total)[kWarps]) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
  for (int lanes = 1; lanes < 32; lanes *= 2) {
    const T right = shift(x, lanes);
    if (lane >= lanes) x = combine(x, right);
  }
  if (lane == 31) warp_total[warp] = x;
  __syncthreads();
  T before_warp = carry;
  for (int w = 0; w < kWarps; ++w) {
    if (w == warp) before_warp = carry;
    carry = combine(warp_total[w], carry);
  }
  const T right = shift(x, 1);
  return {lane == 0 ? before_warp : combine(right, before_warp), combine(x, before_warp)};
}

struct Shared {
  Next next[kWarps];
  Affine affine[kWarps];
};

struct Response {
  const float* rewards;
  const float* values;
  const float* kappa;
  const bool* mask;
  float* delta;
  float* advantage;
  float* lambda_return;
};

__device__ __forceinline__ Response response_at(const CompGae& op, int64_t token) {
  return {static_cast<const float*>(op.rewards) + token, static_cast<const float*>(op.values) + token,
          static_cast<const float*>(op.kappa) + token,   op.mask + token,
          static_cast<float*>(op.delta) + token,         static_cast<float*>(op.advantage) + token,
          static_cast<float*>(op.lambda_return) + token};
}

// Token `index` as a stretch of one. Under kCut a gap ends the chain as the response's end does: V = 0 follows.
__device__ __forceinline__ Next next_of(const Response& r, int index, bool inside, bool valid, Gaps gaps) {
  if (!inside) return {0, -1, 0.0f, 0.0f};
  if (valid) return {1, index, r.values[index], 0.0f};
  if (gaps == Gaps::kCut) return {1, -1, 0.0f, 0.0f};
  return {0, -1, 0.0f, r.rewards[index]};
}

__global__ void __launch_bounds__(kThreads) comp_gae_kernel(const CompGae op) {
  Shared& shared = dynamic_shared<Shared>();
  const int64_t begin = op.cu_seqlens[blockIdx.x];
  const int length = static_cast<int>(op.cu_seqlens[blockIdx.x + 1] - begin);
  const Response r = response_at(op, begin);
  const float lam = static_cast<float>(op.lam);
  const float* bootstrap = static_cast<const float*>(op.bootstrap_values);
  Next next_carry = {0, -1, bootstrap ? bootstrap[blockIdx.x] : 0.0f, 0.0f};
  Affine affine_carry = {0.0f, 0.0f};

  for (int right = length; right > 0; right -= kThreads) {
    const int index = right - 1 - static_cast<int>(threadIdx.x);
    const bool inside = index >= 0;
    const bool valid = inside && r.mask[index];
    const float value = valid ? r.values[index] : 0.0f;
    const float kappa = valid ? r.kappa[index] : 0.0f;
    const float reward = valid ? r.rewards[index] : 0.0f;

    const Next next = scan_from_right(next_of(r, index, inside, valid, op.gaps), next_carry, shared.next).before;
    const float delta = valid ? (reward + next.reward) + kappa * next.value - value : 0.0f;
    const float factor = valid ? lam * kappa : op.gaps == Gaps::kCut ? 0.0f : 1.0f;
    const float advantage = scan_from_right(Affine{delta, factor}, affine_carry, shared.affine).through.offset;
    if (inside) {
      r.delta[index] = delta;
      r.advantage[index] = valid ? advantage : 0.0f;
      r.lambda_return[index] = valid ? advantage + value : 0.0f;
    }
  }
  __syncthreads();
  // Rewards of gaps that precede the first valid token are its own, and no earlier token's δ or A contains them.
  if (threadIdx.x == 0 && next_carry.index >= 0 && next_carry.reward != 0.0f) {
    r.delta[next_carry.index] += next_carry.reward;
    r.advantage[next_carry.index] += next_carry.reward;
    r.lambda_return[next_carry.index] += next_carry.reward;
  }
}

}  // namespace

const char* comp_gae(const CompGae& op, void* stream) {
  if (op.dtype != DType::kFloat32) return "comp_gae on CUDA takes float32";
  return launch(comp_gae_kernel, op.num_responses, kThreads, sizeof(Shared), stream, op);
}

}  // namespace comppo::cuda
