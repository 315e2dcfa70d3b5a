// Op B on the CPU. Edges whose relevance is not positive carry no score and no gradient: their values are not read.
#include "comppo/pool_history.h"

#include <algorithm>
#include <cmath>

#include "parallel.h"
#include "simd.h"

namespace comppo::cpu::COMPPO_ISA {
namespace {

// ---------------------------------------------------------------- rows of numbers

template <class T>
inline T dot(const T* a, const T* b, int n) {
  constexpr int kLane = kLanes<T>, kChains = 4;
  Vec<T> sum[kChains] = {};
  int i = 0;
  for (; i + kChains * kLane <= n; i += kChains * kLane)
#pragma GCC unroll 4
    for (int c = 0; c < kChains; ++c) sum[c] += load(a + i + c * kLane) * load(b + i + c * kLane);
  for (; i + kLane <= n; i += kLane) sum[0] += load(a + i) * load(b + i);
  T total = sum_lanes((sum[0] + sum[1]) + (sum[2] + sum[3]));
  for (; i < n; ++i) total += a[i] * b[i];
  return total;
}

// out += factor · x
template <class T>
inline void add_scaled(T* out, T factor, const T* x, int n) {
  constexpr int kLane = kLanes<T>;
  int i = 0;
  for (; i + kLane <= n; i += kLane) store(out + i, load(out + i) + load(x + i) * factor);
  for (; i < n; ++i) out[i] += factor * x[i];
}

template <class T>
inline void prefetch(const T* p, int n) {
  for (int i = 0; i < n; i += 64 / int(sizeof(T))) __builtin_prefetch(p + i);
}

// ---------------------------------------------------------------- one edge

// Typed view of the inputs.
template <class T>
struct Inputs {
  explicit Inputs(const PoolHistory& op) : op(op), root(1 / std::sqrt(T(op.width))) {}

  const PoolHistory& op;
  const T root;  // 1/√d

  const T* query_beta(int64_t t) const { return static_cast<const T*>(op.query_beta) + t * op.query_beta_stride; }
  const T* query_rel(int64_t t) const { return static_cast<const T*>(op.query_rel) + t * op.query_rel_stride; }
  const T* features(int64_t i) const { return static_cast<const T*>(op.key_features) + i * op.key_features_stride; }
  T weight(int64_t edge) const { return static_cast<const T*>(op.weight)[edge]; }
  int num_features() const { return 2 * op.width + op.out_width; }
  // Packed position of an edge's key; −1: padding.
  int64_t key(int64_t edge) const {
    const int32_t index = op.index[edge];
    return index < 0 ? -1 : op.seq_start[edge / op.top_k] + index;
  }
  void prefetch_key(int64_t edge, int64_t end) const {
    if (edge < end && op.index[edge] >= 0) prefetch(features(key(edge)), num_features());
  }
};

template <class T>
struct Edge {
  T gate;       // σ(β)
  T relevance;  // m, NaN included
  T score;      // s = a σ(β) m
};

template <class T>
Edge<T> evaluate(const Inputs<T>& in, int64_t t, int64_t edge, const T* key) {
  const int width = in.op.width;
  const T relevance = dot(in.query_rel(t), key + width, width) * in.root;
  if (relevance <= 0) return {0, 0, 0};
  const T gate = 1 / (1 + std::exp(-dot(in.query_beta(t), key, width) * in.root));
  return {gate, relevance, in.weight(edge) * gate * relevance};
}

// ---------------------------------------------------------------- forward

template <class T>
void pool_row(const Inputs<T>& in, int64_t t) {
  const PoolHistory& op = in.op;
  T* pooled = static_cast<T*>(op.pooled) + t * op.out_width;
  std::memset(pooled, 0, op.out_width * sizeof(T));
  T total = 0;
  const int64_t end = (t + 1) * op.top_k;
  for (int64_t edge = t * op.top_k; edge < end; ++edge) {
    in.prefetch_key(edge + 1, end);
    const int64_t i = in.key(edge);
    if (i < 0) continue;
    const T* key = in.features(i);
    const Edge<T> e = evaluate(in, t, edge, key);
    if (e.score == 0) continue;
    total += e.score;
    add_scaled(pooled, e.score, key + 2 * op.width, op.out_width);
  }
  const T scale = 1 / (total + T(op.epsilon));
  for (int i = 0; i < op.out_width; ++i) pooled[i] *= scale;
  static_cast<T*>(op.score_sum)[t] = total;
}

// ---------------------------------------------------------------- backward

// What an edge passes on to its key: gradient of β/√d, of the relevance/√d, and its share of the pool.
template <class T>
struct EdgeGradient {
  T beta, rel, share;
};

template <class T>
class Backward {
 public:
  explicit Backward(const PoolHistoryBackward& op)
      : op_(op), in_(op.forward), edges_(int64_t{op.forward.num_rows} * op.forward.top_k) {}

  void run() {
    parallel(in_.op.num_rows, [this](Units& units) {
      for (int64_t t; units.take(t);) row(t);
    });
    sum_over_keys();
  }

 private:
  const T* grad_pooled(int64_t t) const { return static_cast<const T*>(op_.grad_pooled) + t * in_.op.out_width; }

  // Gradients of a row's queries, and of its edges.
  //
  // pooled = Σ s v / B with B = Σ s + ε:  ∂s_j = (⟨∂pooled, v_j⟩ − ⟨∂pooled, pooled⟩) / B + ∂Σs
  void row(int64_t t) {
    const PoolHistory& op = in_.op;
    const int width = op.width;
    T* grad_beta = static_cast<T*>(op_.grad_query_beta) + t * width;
    T* grad_rel = static_cast<T*>(op_.grad_query_rel) + t * width;
    std::memset(grad_beta, 0, width * sizeof(T));
    std::memset(grad_rel, 0, width * sizeof(T));
    const T* grad = grad_pooled(t);
    const T inverse = 1 / (static_cast<const T*>(op.score_sum)[t] + T(op.epsilon));
    const T level = dot(grad, static_cast<const T*>(op.pooled) + t * op.out_width, op.out_width);
    const T grad_sum = static_cast<const T*>(op_.grad_score_sum)[t];
    const int64_t end = (t + 1) * op.top_k;
    for (int64_t edge = t * op.top_k; edge < end; ++edge) {
      in_.prefetch_key(edge + 1, end);
      edges_[edge] = {0, 0, 0};
      const int64_t i = in_.key(edge);
      if (i < 0) continue;
      const T* key = in_.features(i);
      const Edge<T> e = evaluate(in_, t, edge, key);
      if (e.relevance == 0) continue;
      const T grad_score = (dot(grad, key + 2 * width, op.out_width) - level) * inverse + grad_sum;
      const T grad_gate = grad_score * in_.weight(edge) * e.gate * in_.root;
      edges_[edge] = {grad_gate * e.relevance * (1 - e.gate), grad_gate, e.score * inverse};
      add_scaled(grad_beta, edges_[edge].beta, key, width);
      add_scaled(grad_rel, edges_[edge].rel, key + width, width);
    }
  }

  // Gradients of the key features in two levels: the edges of each chunk, then the chunks of each key. Chunks are the
  // units, so that a key that every row attends to is shared out. A key's only chunk is its result already.
  void sum_over_keys() {
    const int64_t num_keys = in_.op.num_keys, num_features = in_.num_features();
    const int32_t* chunks = op_.transposed.chunk_offsets;
    const Buffer<T> partial(int64_t{chunks[num_keys]} * num_features);  // touched where a key has several chunks
    T* result = static_cast<T*>(op_.grad_key_features);
    parallel(chunks[num_keys], [&](Units& units) {
      for (int64_t chunk; units.take(chunk);) {
        const int64_t key = std::upper_bound(chunks, chunks + num_keys + 1, int32_t(chunk)) - chunks - 1;
        const bool only = chunks[key + 1] - chunks[key] == 1;
        sum_chunk(key, chunk - chunks[key], only ? result + key * num_features : &partial[chunk * num_features]);
      }
    });
    parallel(num_keys, [&](Units& units) {
      for (int64_t key; units.take(key);) {
        if (chunks[key + 1] - chunks[key] == 1) continue;
        T* out = result + key * num_features;
        std::memset(out, 0, num_features * sizeof(T));
        for (int32_t c = chunks[key]; c < chunks[key + 1]; ++c)
          add_scaled(out, T(1), &partial[c * num_features], num_features);
      }
    });
  }

  void sum_chunk(int64_t key, int64_t chunk, T* out) {
    const PoolHistory& op = in_.op;
    const int32_t begin = op_.transposed.key_offsets[key] + chunk * kEdgesPerChunk;
    const int32_t end = std::min(op_.transposed.key_offsets[key + 1], begin + kEdgesPerChunk);
    std::memset(out, 0, in_.num_features() * sizeof(T));
    for (int32_t i = begin; i < end; ++i) {
      const int32_t edge = op_.transposed.order[i];
      const EdgeGradient<T>& e = edges_[edge];
      if (e.beta == 0 && e.rel == 0 && e.share == 0) continue;
      const int64_t t = edge / op.top_k;
      add_scaled(out, e.beta, in_.query_beta(t), op.width);
      add_scaled(out + op.width, e.rel, in_.query_rel(t), op.width);
      add_scaled(out + 2 * op.width, e.share, grad_pooled(t), op.out_width);
    }
  }

  const PoolHistoryBackward& op_;
  const Inputs<T> in_;
  const Buffer<EdgeGradient<T>> edges_;
};

template <class T>
void pool(const PoolHistory& op) {
  const Inputs<T> inputs(op);
  parallel(op.num_rows, [&](Units& units) {
    for (int64_t t; units.take(t);) pool_row(inputs, t);
  });
}

}  // namespace

void pool_history(const PoolHistory& op) { op.dtype == DType::kFloat64 ? pool<double>(op) : pool<float>(op); }

void pool_history_backward(const PoolHistoryBackward& op) {
  op.forward.dtype == DType::kFloat64 ? Backward<double>(op).run() : Backward<float>(op).run();
}

}  // namespace comppo::cpu::COMPPO_ISA
