// torch.ops.comppo: schemas, argument checks, and kernels for CPU and, where compiled in, CUDA. Fake kernels and
// autograd are in comppo_mcore/kernels/extension.py.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/Exception.h>

#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "cpu/kernels.h"

#ifdef COMPPO_CUDA
#include <dlfcn.h>

#include "comppo/cuda.h"
#endif

namespace {

using comppo::DType;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// ---------------------------------------------------------------- arguments

enum class Layout { kContiguous, kRows, kStrided };  // kRows: any strides, but 1 in the last dimension
constexpr int64_t kAny = -1;               // of a size

template <class Sizes>
std::string format(const Sizes& sizes) {
  std::string out = "[";
  for (const int64_t size : sizes) out += (out.size() > 1 ? ", " : "") + (size == kAny ? "any" : std::to_string(size));
  return out + "]";
}

bool has_shape(const Tensor& x, std::initializer_list<int64_t> shape) {
  if (x.dim() != int64_t(shape.size())) return false;
  int64_t dim = 0;
  for (const int64_t size : shape)
    if (const int64_t actual = x.size(dim++); size != kAny && size != actual) return false;
  return true;
}

bool has_layout(const Tensor& x, Layout layout) {
  if (layout == Layout::kContiguous) return x.is_contiguous();
  const int64_t last = x.dim() - 1;
  return layout == Layout::kStrided || last < 0 || x.numel() == 0 || x.size(last) == 1 || x.stride(last) == 1;
}

// The checks every tensor argument gets. `first` is an argument on the device that all must be on.
void expect(const Tensor& x, const char* name, const Tensor& first, ScalarType dtype,
            std::initializer_list<int64_t> shape, Layout layout = Layout::kContiguous) {
  STD_TORCH_CHECK(has_shape(x, shape), name, " has shape ", format(x.sizes()), ", not ", format(shape));
  STD_TORCH_CHECK(x.scalar_type() == dtype, name, " is ", torch::headeronly::toString(x.scalar_type()), ", not ",
                  torch::headeronly::toString(dtype));
  STD_TORCH_CHECK(x.device() == first.device(), name, " is on another device than the first argument");
  STD_TORCH_CHECK(has_layout(x, layout), name, " has strides ", format(x.strides()), "; it must ",
                  layout == Layout::kContiguous ? "be contiguous" : "have stride 1 in its last dimension");
}

DType dtype_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return DType::kFloat32;
    case ScalarType::Double:
      return DType::kFloat64;
    case ScalarType::BFloat16:
      return DType::kBFloat16;
    case ScalarType::Half:
      return DType::kFloat16;
    default:
      STD_TORCH_CHECK(false, name, " is ", torch::headeronly::toString(x.scalar_type()), ", not floating");
  }
}

void check_range(int64_t value, int64_t least, int64_t most, const char* name) {
  STD_TORCH_CHECK(value >= least && value <= most, name, " is ", value, ", not within ", least, " to ", most);
}

int32_t int32(int64_t value, const char* name) {
  check_range(value, 0, std::numeric_limits<int32_t>::max(), name);
  return int32_t(value);
}

// ---------------------------------------------------------------- devices

#ifdef COMPPO_CUDA
// The stream torch works on. Looked up at run time, so that this library also loads beside a torch without CUDA.
void* current_stream(const Tensor& x) {
  using GetStream = int32_t (*)(int32_t, void**);
  static const auto get_stream = [] {
    void* library = dlopen("libtorch_cuda.so", RTLD_NOLOAD | RTLD_LAZY);
    return library ? reinterpret_cast<GetStream>(dlsym(library, "aoti_torch_get_current_cuda_stream")) : nullptr;
  }();
  void* stream = nullptr;
  STD_TORCH_CHECK(get_stream && get_stream(x.get_device_index(), &stream) == 0, "torch gives no current CUDA stream");
  return stream;
}

Tensor scratch(const Tensor& like, std::size_t bytes) {
  return torch::stable::new_empty(like, {int64_t(bytes)}, ScalarType::Byte);
}

template <class Op>
void launch(const char* (*launcher)(const Op&, void*), const Op& op, const Tensor& like) {
  const torch::stable::accelerator::DeviceGuard guard(like.get_device_index());
  const char* error = launcher(op, current_stream(like));
  STD_TORCH_CHECK(!error, error);
}
#endif

// ---------------------------------------------------------------- op A

// Rows of `sums`, in this order, as far as they are wanted; mass and sum_squares always are. Bits of `statistics`.
enum Statistic { kEntropySum, kMaxWeight, kPowerSum, kTopkMass, kKappa, kNumStatistics };

// A wrong table must not make a kernel read outside its tensors. Rows ascend by packed position.
void check_rows(const comppo::AttentionStatistics& op) {
  for (int32_t i = 0; i < op.num_rows; ++i) {
    const comppo::RowRange& r = op.rows[i];
    STD_TORCH_CHECK(r.slot >= 0 && r.slot < op.num_rows && r.sequence_start >= 0 && r.position >= 0 &&
                        int64_t{r.sequence_start} + r.position < op.num_keys && r.visible_from >= 0 &&
                        r.visible_from <= r.history_from && r.visible_from <= r.position,
                    "rows[", i, "] describes no row of this op");
    if (i == 0) continue;
    const comppo::RowRange& before = op.rows[i - 1];
    STD_TORCH_CHECK(before.sequence_start == r.sequence_start
                        ? before.position <= r.position && before.visible_from <= r.visible_from
                        : before.sequence_start + before.position < r.sequence_start,
                    "rows[", i, "] does not follow rows[", i - 1, "]");
  }
}

// The items of one block, items[begin] … items[end − 1]; it holds the rows from row_begin on.
void check_block(const comppo::AttentionStatistics& op, int32_t begin, int32_t end, int32_t row_begin) {
  const comppo::WorkItem& first = op.items[begin];
  STD_TORCH_CHECK(first.row_begin == row_begin && first.num_rows >= 1 && first.num_rows <= comppo::kRowsPerBlock &&
                      first.num_rows <= op.num_rows - row_begin && first.key_begin >= 0,
                  "items[", begin, "] does not begin a block at rows[", row_begin, "]");
  for (int32_t i = begin, key = first.key_begin; i < end; key = op.items[i++].key_end) {
    const comppo::WorkItem& item = op.items[i];
    STD_TORCH_CHECK(item.row_begin == row_begin && item.num_rows == first.num_rows && item.key_begin == key &&
                        key % comppo::kKeyTile == 0 && item.key_end > key &&
                        item.key_end <= (int64_t{key} / comppo::kKeysPerItem + 1) * comppo::kKeysPerItem,
                    "items[", i, "] does not continue its block");
  }
  const comppo::RowRange &low = op.rows[row_begin], &high = op.rows[row_begin + first.num_rows - 1];
  const int32_t key_end = op.items[end - 1].key_end;
  STD_TORCH_CHECK(low.sequence_start == high.sequence_start && low.visible_from >= first.key_begin &&
                      high.position < key_end && int64_t{low.sequence_start} + key_end <= op.num_keys,
                  "items[", begin, "] to items[", end - 1, "] do not hold what their rows see");
}

void check_plan(const comppo::AttentionStatistics& op) {
  check_rows(op);
  STD_TORCH_CHECK(op.blocks[0] == 0 && op.blocks[op.num_blocks] == op.num_items, "blocks do not enclose items");
  int32_t row = 0;
  for (int32_t b = 0; b < op.num_blocks; ++b) {
    STD_TORCH_CHECK(op.blocks[b] < op.blocks[b + 1] && op.blocks[b + 1] <= op.num_items, "blocks[", b,
                    "] is not ascending");
    check_block(op, op.blocks[b], op.blocks[b + 1], row);
    const comppo::WorkItem& first = op.items[op.blocks[b]];
    STD_TORCH_CHECK(row == 0 || op.rows[row - 1].sequence_start != op.rows[row].sequence_start ||
                        op.items[op.blocks[b - 1]].key_begin <= first.key_begin,
                    "items[", op.blocks[b], "] begins before the block before it");
    row += first.num_rows;
  }
  STD_TORCH_CHECK(row == op.num_rows, "blocks hold ", row, " of ", op.num_rows, " rows");
}

void set_inputs(comppo::AttentionStatistics& op, const Tensor& q, const Tensor& k, const std::optional<Tensor>& lse) {
  expect(q, "q", q, q.scalar_type(), {kAny, kAny, kAny}, Layout::kRows);
  expect(k, "k", q, q.scalar_type(), {kAny, kAny, q.size(2)}, Layout::kRows);
  if (lse) expect(*lse, "lse", q, ScalarType::Float, {q.size(1), q.size(0)}, Layout::kStrided);
  STD_TORCH_CHECK(q.size(2) > 0, "q has head_dim 0");
  STD_TORCH_CHECK(q.size(1) > 0 && k.size(1) > 0 && q.size(1) % k.size(1) == 0, "q has ", q.size(1),
                  " heads, not a multiple of the ", k.size(1), " of k");
  op.dtype = dtype_of(q, "q");
  STD_TORCH_CHECK(op.dtype != DType::kFloat64, "q is Double, not Float, BFloat16 or Half");
  op.q = q.const_data_ptr();
  op.q_row_stride = q.stride(0);
  op.q_head_stride = q.stride(1);
  op.k = k.const_data_ptr();
  op.k_row_stride = k.stride(0);
  op.k_head_stride = k.stride(1);
  if (lse) {
    op.lse = lse->const_data_ptr<float>();
    op.lse_head_stride = lse->stride(0);
    op.lse_row_stride = lse->stride(1);
  }
  op.num_rows = int32(q.size(0), "the number of rows");
  op.num_keys = int32(k.size(0), "the number of keys");
  op.num_heads = int32(q.size(1), "the number of heads");
  op.num_kv_heads = int32(k.size(1), "the number of key heads");
  op.head_dim = int32(q.size(2), "head_dim");
}

void set_plan(comppo::AttentionStatistics& op, const Tensor& q, const Tensor& rows, const Tensor& items,
              const Tensor& blocks) {
  expect(rows, "rows", q, ScalarType::Int, {op.num_rows, sizeof(comppo::RowRange) / sizeof(int32_t)});
  expect(items, "items", q, ScalarType::Int, {kAny, sizeof(comppo::WorkItem) / sizeof(int32_t)});
  expect(blocks, "blocks", q, ScalarType::Int, {kAny});
  STD_TORCH_CHECK(blocks.size(0) > 0, "blocks is empty");
  op.rows = static_cast<const comppo::RowRange*>(rows.const_data_ptr());
  op.items = static_cast<const comppo::WorkItem*>(items.const_data_ptr());
  op.blocks = blocks.const_data_ptr<int32_t>();
  op.num_items = int32(items.size(0), "the number of items");
  op.num_blocks = int32(blocks.size(0) - 1, "the number of blocks");
}

// Room for the results: sums, index, weight.
std::tuple<Tensor, Tensor, Tensor> set_results(comppo::AttentionStatistics& op, const Tensor& q, int64_t statistics) {
  const int64_t num_rows = op.num_rows, top_k = op.top_k;
  const Tensor sums = torch::stable::new_empty(q, {2 + __builtin_popcountll(statistics), num_rows}, ScalarType::Float);
  const Tensor index = torch::stable::new_empty(q, {num_rows, top_k}, ScalarType::Int);
  const Tensor weight = torch::stable::new_empty(q, {num_rows, top_k}, ScalarType::Float);
  float* next = sums.mutable_data_ptr<float>();
  const auto take = [&](bool wanted) { return wanted ? std::exchange(next, next + num_rows) : nullptr; };
  const auto wanted = [&](Statistic s) { return take(statistics >> s & 1); };
  op.mass = take(true);
  op.sum_squares = take(true);
  op.entropy_sum = wanted(kEntropySum);
  op.max_weight = wanted(kMaxWeight);
  op.power_sum = wanted(kPowerSum);
  op.topk_mass = wanted(kTopkMass);
  op.kappa = wanted(kKappa);
  op.index = index.mutable_data_ptr<int32_t>();
  op.weight = weight.mutable_data_ptr<float>();
  return {sums, index, weight};
}

std::tuple<Tensor, Tensor, Tensor> attention_statistics(
    const Tensor& q, const Tensor& k, const std::optional<Tensor>& lse, const Tensor& rows, const Tensor& items,
    const Tensor& blocks, double scale, int64_t top_k, int64_t statistics, double renyi_alpha, int64_t mass_top_k,
    double kappa_lo, double kappa_hi, double tau) {
  check_range(top_k, 0, comppo::kMaxTopK, "top_k");
  check_range(mass_top_k, 1, comppo::kMaxTopK, "mass_top_k");
  check_range(statistics, 0, (1 << kNumStatistics) - 1, "statistics");
  comppo::AttentionStatistics op{};
  set_inputs(op, q, k, lse);
  set_plan(op, q, rows, items, blocks);
  op.scale = float(scale);
  op.top_k = int32_t(top_k);
  op.mass_top_k = int32_t(mass_top_k);
  op.renyi_alpha = float(renyi_alpha);
  op.kappa_lo = float(kappa_lo);
  op.kappa_hi = float(kappa_hi);
  op.tau = float(tau);
  const auto results = set_results(op, q, statistics);
#ifdef COMPPO_CUDA
  if (q.is_cuda()) {
    const Tensor workspace = scratch(q, comppo::cuda::attention_statistics_workspace(op));
    op.workspace = workspace.mutable_data_ptr();
    launch(comppo::cuda::attention_statistics, op, q);
    return results;
  }
#endif
  check_plan(op);
  comppo::cpu::attention_statistics(op);
  return results;
}

// ---------------------------------------------------------------- op B

// Common arguments of the forward and the backward.
comppo::PoolHistory pooling(const Tensor& query_beta, const Tensor& query_rel, const Tensor& key_features,
                            const Tensor& index, const Tensor& weight, const Tensor& seq_start, double epsilon) {
  const ScalarType dtype = query_beta.scalar_type();
  expect(query_beta, "query_beta", query_beta, dtype, {kAny, kAny}, Layout::kRows);
  const int64_t num_rows = query_beta.size(0), width = query_beta.size(1);
  expect(query_rel, "query_rel", query_beta, dtype, {num_rows, width}, Layout::kRows);
  expect(key_features, "key_features", query_beta, dtype, {kAny, kAny}, Layout::kRows);
  STD_TORCH_CHECK(width > 0 && key_features.size(1) > 2 * width, "key_features has ", key_features.size(1),
                  " columns, not more than twice the ", width, " of query_beta");
  expect(index, "topk_index", query_beta, ScalarType::Int, {num_rows, kAny});
  expect(weight, "topk_weight", query_beta, dtype, {num_rows, index.size(1)});
  expect(seq_start, "seq_start", query_beta, ScalarType::Long, {num_rows});
  int32(num_rows * index.size(1), "the number of edges");
  comppo::PoolHistory op{};
  op.dtype = dtype_of(query_beta, "query_beta");
  STD_TORCH_CHECK(op.dtype == DType::kFloat32 || op.dtype == DType::kFloat64, "query_beta is ",
                  torch::headeronly::toString(dtype), ", not Float or Double");
  op.query_beta = query_beta.const_data_ptr();
  op.query_beta_stride = query_beta.stride(0);
  op.query_rel = query_rel.const_data_ptr();
  op.query_rel_stride = query_rel.stride(0);
  op.key_features = key_features.const_data_ptr();
  op.key_features_stride = key_features.stride(0);
  op.index = index.const_data_ptr<int32_t>();
  op.weight = weight.const_data_ptr();
  op.seq_start = seq_start.const_data_ptr<int64_t>();
  op.num_rows = int32(num_rows, "the number of rows");
  op.num_keys = int32(key_features.size(0), "the number of keys");
  op.top_k = int32(index.size(1), "top_k");
  op.width = int32(width, "width");
  op.out_width = int32(key_features.size(1) - 2 * width, "the width of the pooled features");
  op.epsilon = epsilon;
  return op;
}

void check_edges(const int32_t* index, const int64_t* seq_start, int64_t num_rows, int64_t top_k, int64_t num_keys) {
  for (int64_t t = 0; t < num_rows; ++t) {
    STD_TORCH_CHECK(seq_start[t] >= 0 && seq_start[t] <= num_keys, "seq_start[", t, "] is ", seq_start[t],
                    ", not a packed position of ", num_keys, " keys");
    for (int64_t j = 0; j < top_k; ++j) {
      const int64_t i = index[t * top_k + j];
      STD_TORCH_CHECK(i >= -1 && seq_start[t] + i < num_keys, "topk_index[", t, ", ", j, "] is ", i,
                      ", which is neither -1 nor one of ", num_keys, " keys after seq_start ", seq_start[t]);
    }
  }
}

std::tuple<Tensor, Tensor> pool_history(const Tensor& query_beta, const Tensor& query_rel, const Tensor& key_features,
                                        const Tensor& index, const Tensor& weight, const Tensor& seq_start,
                                        double epsilon) {
  comppo::PoolHistory op = pooling(query_beta, query_rel, key_features, index, weight, seq_start, epsilon);
  const Tensor pooled = torch::stable::new_empty(query_beta, {op.num_rows, op.out_width});
  const Tensor score_sum = torch::stable::new_empty(query_beta, {op.num_rows});
  op.pooled = pooled.mutable_data_ptr();
  op.score_sum = score_sum.mutable_data_ptr();
#ifdef COMPPO_CUDA
  if (query_beta.is_cuda()) {
    launch(comppo::cuda::pool_history, op, query_beta);
    return {pooled, score_sum};
  }
#endif
  check_edges(op.index, op.seq_start, op.num_rows, op.top_k, op.num_keys);
  comppo::cpu::pool_history(op);
  return {pooled, score_sum};
}

// A counting sort, stable by construction. CUDA tensors get the stable sort of kernels/extension.py.
std::tuple<Tensor, Tensor, Tensor> transpose_edges(const Tensor& index, const Tensor& seq_start, int64_t num_keys) {
  expect(index, "topk_index", index, ScalarType::Int, {kAny, kAny});
  expect(seq_start, "seq_start", index, ScalarType::Long, {index.size(0)});
  int32(num_keys, "num_keys");
  const int64_t top_k = index.size(1), num_edges = int32(index.numel(), "the number of edges");
  const int32_t* position = index.const_data_ptr<int32_t>();
  const int64_t* start = seq_start.const_data_ptr<int64_t>();
  check_edges(position, start, index.size(0), top_k, num_keys);
  const Tensor order = torch::stable::new_zeros(index, {num_edges});
  const Tensor key_offsets = torch::stable::new_zeros(index, {num_keys + 1});
  const Tensor chunk_offsets = torch::stable::new_zeros(index, {num_keys + 1});
  int32_t *offsets = key_offsets.mutable_data_ptr<int32_t>(), *chunks = chunk_offsets.mutable_data_ptr<int32_t>(),
          *edges = order.mutable_data_ptr<int32_t>();
  for (int64_t e = 0; e < num_edges; ++e)
    if (position[e] >= 0) ++offsets[start[e / top_k] + position[e] + 1];
  for (int64_t i = 0; i < num_keys; ++i) {
    chunks[i + 1] = chunks[i] + (offsets[i + 1] + comppo::kEdgesPerChunk - 1) / comppo::kEdgesPerChunk;
    offsets[i + 1] += offsets[i];
  }
  const int32_t used = offsets[num_keys];
  // Filling from the back turns offsets[i + 1], where key i ends, into where it begins.
  for (int64_t e = num_edges; e-- > 0;)
    if (position[e] >= 0) edges[--offsets[start[e / top_k] + position[e] + 1]] = int32_t(e);
  for (int64_t i = 0; i < num_keys; ++i) offsets[i] = offsets[i + 1];
  offsets[num_keys] = used;
  return {order, key_offsets, chunk_offsets};
}

void check_transposed(const comppo::Transposed& edges, int64_t num_edges, int64_t num_keys) {
  const int32_t *offsets = edges.key_offsets, *chunks = edges.chunk_offsets;
  STD_TORCH_CHECK(offsets[0] == 0 && chunks[0] == 0, "key_offsets or chunk_offsets does not begin with 0");
  for (int64_t i = 0; i < num_keys; ++i) {
    const int32_t count = offsets[i + 1] - offsets[i];
    STD_TORCH_CHECK(count >= 0 && offsets[i + 1] <= num_edges, "key_offsets[", i + 1, "] is ", offsets[i + 1]);
    STD_TORCH_CHECK(chunks[i + 1] - chunks[i] == (count + comppo::kEdgesPerChunk - 1) / comppo::kEdgesPerChunk,
                    "chunk_offsets[", i + 1, "] is ", chunks[i + 1]);
  }
  for (int32_t e = 0; e < offsets[num_keys]; ++e)
    STD_TORCH_CHECK(edges.order[e] >= 0 && edges.order[e] < num_edges, "order[", e, "] is ", edges.order[e]);
}

std::tuple<Tensor, Tensor, Tensor> pool_history_backward(
    const Tensor& grad_pooled, const Tensor& grad_score_sum, const Tensor& query_beta, const Tensor& query_rel,
    const Tensor& key_features, const Tensor& index, const Tensor& weight, const Tensor& seq_start,
    const Tensor& pooled, const Tensor& score_sum, const Tensor& order, const Tensor& key_offsets,
    const Tensor& chunk_offsets, double epsilon) {
  comppo::PoolHistoryBackward op{};
  op.forward = pooling(query_beta, query_rel, key_features, index, weight, seq_start, epsilon);
  const ScalarType dtype = query_beta.scalar_type();
  const int64_t num_rows = op.forward.num_rows, num_keys = op.forward.num_keys, num_edges = index.numel();
  expect(grad_pooled, "grad_pooled", query_beta, dtype, {num_rows, op.forward.out_width});
  expect(grad_score_sum, "grad_score_sum", query_beta, dtype, {num_rows});
  expect(pooled, "pooled", query_beta, dtype, {num_rows, op.forward.out_width});
  expect(score_sum, "score_sum", query_beta, dtype, {num_rows});
  expect(order, "order", query_beta, ScalarType::Int, {num_edges});
  expect(key_offsets, "key_offsets", query_beta, ScalarType::Int, {num_keys + 1});
  expect(chunk_offsets, "chunk_offsets", query_beta, ScalarType::Int, {num_keys + 1});
  const Tensor grad_beta = torch::stable::new_empty(query_beta, {num_rows, op.forward.width});
  const Tensor grad_rel = torch::stable::new_empty(query_beta, {num_rows, op.forward.width});
  const Tensor grad_features = torch::stable::new_empty(query_beta, {num_keys, key_features.size(1)});
  op.forward.pooled = const_cast<void*>(pooled.const_data_ptr());
  op.forward.score_sum = const_cast<void*>(score_sum.const_data_ptr());
  op.transposed = {order.const_data_ptr<int32_t>(), key_offsets.const_data_ptr<int32_t>(),
                   chunk_offsets.const_data_ptr<int32_t>()};
  op.grad_pooled = grad_pooled.const_data_ptr();
  op.grad_score_sum = grad_score_sum.const_data_ptr();
  op.grad_query_beta = grad_beta.mutable_data_ptr();
  op.grad_query_rel = grad_rel.mutable_data_ptr();
  op.grad_key_features = grad_features.mutable_data_ptr();
#ifdef COMPPO_CUDA
  if (query_beta.is_cuda()) {
    const Tensor workspace = scratch(query_beta, comppo::cuda::pool_history_backward_workspace(op));
    op.workspace = workspace.mutable_data_ptr();
    launch(comppo::cuda::pool_history_backward, op, query_beta);
    return {grad_beta, grad_rel, grad_features};
  }
#endif
  check_edges(op.forward.index, op.forward.seq_start, num_rows, op.forward.top_k, num_keys);
  check_transposed(op.transposed, num_edges, num_keys);
  comppo::cpu::pool_history_backward(op);
  return {grad_beta, grad_rel, grad_features};
}

// ---------------------------------------------------------------- op C

std::tuple<Tensor, Tensor, Tensor> comp_gae(const Tensor& rewards, const Tensor& values, const Tensor& kappa,
                                            const Tensor& cu_seqlens, const Tensor& mask,
                                            const std::optional<Tensor>& bootstrap_values, double lam, bool cut) {
  const ScalarType dtype = rewards.scalar_type();
  expect(rewards, "rewards", rewards, dtype, {kAny});
  const int64_t num_tokens = rewards.size(0);
  expect(values, "values", rewards, dtype, {num_tokens});
  expect(kappa, "kappa", rewards, dtype, {num_tokens});
  expect(mask, "mask", rewards, ScalarType::Bool, {num_tokens});
  expect(cu_seqlens, "cu_seqlens", rewards, ScalarType::Long, {kAny});
  STD_TORCH_CHECK(cu_seqlens.size(0) > 0, "cu_seqlens is empty");
  if (bootstrap_values) expect(*bootstrap_values, "bootstrap_values", rewards, dtype, {cu_seqlens.size(0) - 1});
  const Tensor delta = torch::stable::empty_like(rewards), advantage = torch::stable::empty_like(rewards),
               lambda_return = torch::stable::empty_like(rewards);
  comppo::CompGae op{};
  op.dtype = dtype_of(rewards, "rewards");
  STD_TORCH_CHECK(op.dtype == DType::kFloat32 || op.dtype == DType::kFloat64, "rewards is ",
                  torch::headeronly::toString(dtype), ", not Float or Double");
  op.rewards = rewards.const_data_ptr();
  op.values = values.const_data_ptr();
  op.kappa = kappa.const_data_ptr();
  op.mask = mask.const_data_ptr<bool>();
  op.cu_seqlens = cu_seqlens.const_data_ptr<int64_t>();
  op.bootstrap_values = bootstrap_values ? bootstrap_values->const_data_ptr() : nullptr;
  op.num_tokens = num_tokens;
  op.num_responses = int32(cu_seqlens.size(0) - 1, "the number of responses");
  op.gaps = cut ? comppo::Gaps::kCut : comppo::Gaps::kCompact;
  op.lam = lam;
  op.delta = delta.mutable_data_ptr();
  op.advantage = advantage.mutable_data_ptr();
  op.lambda_return = lambda_return.mutable_data_ptr();
#ifdef COMPPO_CUDA
  if (rewards.is_cuda()) {
    launch(comppo::cuda::comp_gae, op, rewards);
    return {delta, advantage, lambda_return};
  }
#endif
  STD_TORCH_CHECK(op.cu_seqlens[0] == 0 && op.cu_seqlens[op.num_responses] == num_tokens,
                  "cu_seqlens does not lead from 0 to ", num_tokens);
  for (int32_t b = 0; b < op.num_responses; ++b)
    STD_TORCH_CHECK(op.cu_seqlens[b] <= op.cu_seqlens[b + 1], "cu_seqlens decreases from ", op.cu_seqlens[b], " to ",
                    op.cu_seqlens[b + 1], " at entry ", b + 1);
  comppo::cpu::comp_gae(op);
  return {delta, advantage, lambda_return};
}

// ---------------------------------------------------------------- what was built

std::string build_info() {
  std::string info = std::string("cpu ") + comppo::cpu::instruction_set();
#ifdef COMPPO_CUDA
  info += ", cuda";
#endif
  return info;
}

}  // namespace

STABLE_TORCH_LIBRARY(comppo, m) {
  m.def(
      "attention_statistics(Tensor q, Tensor k, Tensor? lse, Tensor rows, Tensor items, Tensor blocks, float scale, "
      "int top_k, int statistics, float renyi_alpha, int mass_top_k, float kappa_lo, float kappa_hi, float tau) "
      "-> (Tensor sums, Tensor index, Tensor weight)");
  m.def(
      "pool_history(Tensor query_beta, Tensor query_rel, Tensor key_features, Tensor topk_index, Tensor topk_weight, "
      "Tensor seq_start, float epsilon) -> (Tensor pooled, Tensor score_sum)");
  m.def(
      "transpose_edges(Tensor topk_index, Tensor seq_start, int num_keys) "
      "-> (Tensor order, Tensor key_offsets, Tensor chunk_offsets)");
  m.def(
      "pool_history_backward(Tensor grad_pooled, Tensor grad_score_sum, Tensor query_beta, Tensor query_rel, "
      "Tensor key_features, Tensor topk_index, Tensor topk_weight, Tensor seq_start, Tensor pooled, Tensor score_sum, "
      "Tensor order, Tensor key_offsets, Tensor chunk_offsets, float epsilon) "
      "-> (Tensor grad_query_beta, Tensor grad_query_rel, Tensor grad_key_features)");
  m.def(
      "comp_gae(Tensor rewards, Tensor values, Tensor kappa, Tensor cu_seqlens, Tensor mask, Tensor? bootstrap_values, "
      "float lam, bool cut) -> (Tensor delta, Tensor advantage, Tensor lambda_return)");
  m.def("build_info() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(comppo, CPU, m) {
  m.impl("attention_statistics", TORCH_BOX(&attention_statistics));
  m.impl("pool_history", TORCH_BOX(&pool_history));
  m.impl("transpose_edges", TORCH_BOX(&transpose_edges));
  m.impl("pool_history_backward", TORCH_BOX(&pool_history_backward));
  m.impl("comp_gae", TORCH_BOX(&comp_gae));
}

#ifdef COMPPO_CUDA
STABLE_TORCH_LIBRARY_IMPL(comppo, CUDA, m) {
  m.impl("attention_statistics", TORCH_BOX(&attention_statistics));
  m.impl("pool_history", TORCH_BOX(&pool_history));
  m.impl("pool_history_backward", TORCH_BOX(&pool_history_backward));
  m.impl("comp_gae", TORCH_BOX(&comp_gae));
}
#endif

STABLE_TORCH_LIBRARY_IMPL(comppo, CompositeExplicitAutograd, m) { m.impl("build_info", TORCH_BOX(&build_info)); }
