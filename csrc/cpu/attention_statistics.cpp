// Op A on the CPU. Keys are packed once into panels; then, for a block of rows and a span of keys, the head-summed
// weights stay in the L2 cache while all heads pass over them, so that no T × T buffer exists.
#include "comppo/attention_statistics.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "parallel.h"
#include "simd.h"

namespace comppo::cpu::COMPPO_ISA {
namespace {

using Floats = Vec<float>;
constexpr int kLane = kLanes<float>;
constexpr int kPanelVectors = kLane == 16 ? 4 : 2;
constexpr int kPanel = kPanelVectors * kLane;        // keys of a packed panel
constexpr int kQueryTile = kLane == 4 ? 4 : 6;       // query heads that share the loads of a panel
constexpr int kPanelsPerItem = kKeysPerItem / kPanel;
constexpr int kStretch = 32;                           // of an inner product, summed by itself
constexpr std::size_t kOwnLseBytes = 4 << 20;        // exponentials kept by a worker where no LSE is given
constexpr float kReferenceSlack = 60.0f;             // e^60 is far from overflow, as is its sum over any context
constexpr float kLeastReference = -1e30f;            // finite, so that scores of −inf do not make it NaN
static_assert(kKeyTile % kPanel == 0);

// ---------------------------------------------------------------- packing

float to_float(float x) { return x; }

struct BFloat16 {
  uint16_t bits;
};
float to_float(BFloat16 x) {
  const uint32_t bits = uint32_t{x.bits} << 16;
  float out;
  std::memcpy(&out, &bits, sizeof out);
  return out;
}

struct Float16 {
  uint16_t bits;
};
float to_float(Float16 x) {
  const int exponent = x.bits >> 10 & 31, fraction = x.bits & 1023;
  const float magnitude = exponent == 0    ? std::ldexp(static_cast<float>(fraction), -24)
                          : exponent == 31 ? (fraction ? std::numeric_limits<float>::quiet_NaN()
                                                       : std::numeric_limits<float>::infinity())
                                           : std::ldexp(static_cast<float>(fraction + 1024), exponent - 25);
  return x.bits >> 15 ? -magnitude : magnitude;
}

template <class T>
void widen_as(const void* source, int64_t offset, int count, float* out) {
  const T* p = static_cast<const T*>(source) + offset;
  for (int i = 0; i < count; ++i) out[i] = to_float(p[i]);
}

// `count` adjacent numbers of any input type as float32.
void widen(DType dtype, const void* source, int64_t offset, int count, float* out) {
  switch (dtype) {
    case DType::kBFloat16:
      return widen_as<BFloat16>(source, offset, count, out);
    case DType::kFloat16:
      return widen_as<Float16>(source, offset, count, out);
    default:
      return widen_as<float>(source, offset, count, out);
  }
}

// Where a block finds the packed keys of its sequence.
struct Sequence {
  int32_t start;        // packed position of its first token
  int32_t first_panel;  // panels before it are not visible to any row
  int32_t num_panels;   // panels first_panel … num_panels − 1 are packed
  int64_t offset;       // of panel first_panel among all panels of one head
};

// All visible keys as [num_kv_heads, panels, head_dim, kPanel] float32, 0 past a sequence's last visible key.
class PackedKeys {
 public:
  explicit PackedKeys(const AttentionStatistics& op)
      : op_(op), of_block_(op.num_blocks), sequences_(op.num_blocks), num_panels_(find_sequences()),
        panels_(num_panels_ * op.num_kv_heads * op.head_dim * kPanel) {
    parallel(num_panels_, [this](Units& units) {
      Buffer<float> keys(kPanel * op_.head_dim);
      for (int64_t panel; units.take(panel);) pack(panel, keys.data());
    });
  }

  const float* panel(int32_t block, int32_t kv_head, int32_t panel) const {
    const Sequence& s = sequences_[of_block_[block]];
    return address(kv_head, s.offset + panel - s.first_panel);
  }

 private:
  float* address(int64_t kv_head, int64_t panel) const {
    return panels_.data() + (kv_head * num_panels_ + panel) * op_.head_dim * kPanel;
  }

  // Blocks of one sequence are adjacent. Returns the number of panels.
  int64_t find_sequences() {
    int64_t total = 0;
    num_sequences_ = 0;
    for (int32_t b = 0; b < op_.num_blocks; ++b) {
      const WorkItem& first = op_.items[op_.blocks[b]];
      const WorkItem& last = op_.items[op_.blocks[b + 1] - 1];
      const int32_t start = op_.rows[first.row_begin].sequence_start;
      const int32_t end = (last.key_end + kPanel - 1) / kPanel;
      if (num_sequences_ == 0 || sequences_[num_sequences_ - 1].start != start)
        sequences_[num_sequences_++] = {start, first.key_begin / kPanel, first.key_begin / kPanel, total};
      Sequence& s = sequences_[num_sequences_ - 1];
      total += std::max(0, end - s.num_panels);
      s.num_panels = std::max(end, s.num_panels);
      of_block_[b] = num_sequences_ - 1;
    }
    return total;
  }

  // keys: scratch, [kPanel, head_dim].
  void pack(int64_t panel, float* keys) const {
    int32_t i = 0;
    while (i + 1 < num_sequences_ && sequences_[i + 1].offset <= panel) ++i;
    const Sequence& s = sequences_[i];
    const int64_t first = s.start + (panel - s.offset + s.first_panel) * kPanel;
    const int64_t end = i + 1 < num_sequences_ ? sequences_[i + 1].start : op_.num_keys;
    const int filled = std::min<int64_t>(kPanel, end - first), head_dim = op_.head_dim;
    std::memset(keys, 0, sizeof(float) * kPanel * head_dim);
    for (int32_t head = 0; head < op_.num_kv_heads; ++head) {
      for (int lane = 0; lane < filled; ++lane)
        widen(op_.dtype, op_.k, (first + lane) * op_.k_row_stride + head * op_.k_head_stride, head_dim,
              keys + lane * head_dim);
      transpose(keys, head_dim, address(head, panel));
    }
  }

  // [kPanel, head_dim] → [head_dim, kPanel], a few lanes at a time.
  static void transpose(const float* keys, int head_dim, float* out) {
    constexpr int kStep = 8;
    static_assert(kPanel % kStep == 0);
    for (int lane = 0; lane < kPanel; lane += kStep)
      for (int d = 0; d < head_dim; ++d)
        for (int i = 0; i < kStep; ++i) out[d * kPanel + lane + i] = keys[(lane + i) * head_dim + d];
  }

  const AttentionStatistics& op_;
  Buffer<int32_t> of_block_;
  Buffer<Sequence> sequences_;
  int32_t num_sequences_;
  int64_t num_panels_;
  Buffer<float> panels_;
};

// ---------------------------------------------------------------- scores

// Inner products of M query heads with a panel: [M, head_dim] × [head_dim, kPanel]. Summed in stretches, because a
// single running sum over head_dim would cost accuracy.
template <int M>
inline __attribute__((always_inline)) void inner_products(const float* q, const float* panel, int head_dim,
                                                          Floats (&out)[M][kPanelVectors]) {
  for (int m = 0; m < M; ++m)
    for (int v = 0; v < kPanelVectors; ++v) out[m][v] = Floats{};
  for (int begin = 0; begin < head_dim; begin += kStretch) {
    Floats sum[M][kPanelVectors] = {};
    const int end = std::min(head_dim, begin + kStretch);
    for (int d = begin; d < end; ++d, panel += kPanel) {
      Floats key[kPanelVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) key[v] = load(panel + v * kLane);
#pragma GCC unroll 6
      for (int m = 0; m < M; ++m) {
        const Floats query = splat(q[m * head_dim + d]);
#pragma GCC unroll 4
        for (int v = 0; v < kPanelVectors; ++v) sum[m][v] += query * key[v];
      }
    }
#pragma GCC unroll 6
    for (int m = 0; m < M; ++m)
#pragma GCC unroll 4
      for (int v = 0; v < kPanelVectors; ++v) out[m][v] += sum[m][v];
  }
}

// Calls f(first, integral_constant<M>) over [begin, end) in tiles of kQueryTile heads and one smaller.
template <int M = kQueryTile, class F>
inline void for_query_tiles(int begin, int end, const F& f) {
  for (; begin + M <= end; begin += M) f(begin, std::integral_constant<int, M>{});
  if constexpr (M > 1) for_query_tiles<M - 1>(begin, end, f);
}

// ---------------------------------------------------------------- selection

// Orders by weight, then by the smaller position: the bits of a non-negative float sort like the float.
using Candidate = int64_t;
Candidate candidate(float weight, int32_t position) {
  uint32_t bits;
  std::memcpy(&bits, &weight, sizeof bits);
  return int64_t{bits} << 32 | uint32_t(~position);
}
float weight_of(Candidate c) {
  const uint32_t bits = c >> 32;
  float weight;
  std::memcpy(&weight, &bits, sizeof weight);
  return weight;
}
int32_t position_of(Candidate c) { return ~uint32_t(c); }

// The heaviest weights so far of one row, among at most kRoom candidates. Of all that comes after a shrinking, what only
// equals the threshold has lost already, because positions arrive in ascending order.
struct Heaviest {
  static constexpr int kRoom = 2 * kMaxTopK;  // shrinking costs some passes; room makes it rare
  static constexpr int kSlack = 8;
  int count;
  float threshold;
  Candidate candidates[kRoom];

  void clear(int wanted) {
    count = 0;
    threshold = wanted > 0 ? -1.0f : std::numeric_limits<float>::infinity();
  }
  void add(float weight, int32_t position, int wanted) {
    candidates[count++] = candidate(weight, position);
    if (count == kRoom) shrink(wanted);
  }
  // Leaves the heaviest `wanted` and at most kSlack more: those from a bound on, found by bisection. No branch depends
  // on a single weight, which makes it several times as fast as an exact selection.
  void shrink(int wanted) {
    Candidate bound = 0, above = *std::max_element(candidates, candidates + kRoom) + 1;
    for (int left = kRoom; left > wanted + kSlack;) {
      const Candidate middle = bound + (above - bound) / 2;
      const int heavier = num_from(middle);
      (heavier < wanted ? above : bound) = middle;
      if (heavier >= wanted) left = heavier;
    }
    count = 0;
    for (int i = 0; i < kRoom; ++i) {
      const Candidate c = candidates[i];
      candidates[count] = c;
      count += c >= bound;
    }
    threshold = weight_of(bound);
  }
  int num_from(Candidate bound) const {
    int64_t total = 0;
    for (int i = 0; i < kRoom; ++i) total += candidates[i] >= bound;
    return total;
  }
  // The heaviest `wanted` in descending order, each put at the number of those before it.
  void sort(int wanted) {
    Candidate sorted[kRoom];
    for (int i = 0; i < count; ++i) {
      int64_t before = 0;
      for (int j = 0; j < count; ++j) before += candidates[j] > candidates[i];
      sorted[before] = candidates[i];
    }
    count = std::min(count, wanted);
    std::copy_n(sorted, count, candidates);
  }
};

// The denominator of one query head while its keys pass by, as Σ e^(s − reference) by lane.
struct Softmax {
  float reference = kLeastReference;
  float limit = kLeastReference;  // a score beyond it moves the reference
  Floats total{};
};

// Accumulators of one row.
struct RowSums {
  double mass, sum_squares, entropy_sum, power_sum;
  float max_weight;
};

// ---------------------------------------------------------------- one worker

// Rows of a block × panels of keys, small enough for the cache.
struct Tile {
  int32_t block;
  int32_t row_begin, num_rows;
  int32_t panel_begin, panel_end;
  int32_t num_panels() const { return panel_end - panel_begin; }
};

class RowWorker {
 public:
  // max_panels: of the longest block where no LSE is given.
  RowWorker(const AttentionStatistics& op, const PackedKeys& keys, int32_t max_panels)
      : op_(op), keys_(keys), group_(op.num_heads / op.num_kv_heads), num_heads_(op.num_heads),
        num_heaviest_(std::max(op.top_k, op.topk_mass ? op.mass_top_k : 0)),
        rows_per_tile_(op.lse ? kRowsPerBlock : rows_without_lse(max_panels)),
        queries_(std::size_t(rows_per_tile_) * group_ * op.head_dim),
        row_of_(std::size_t(rows_per_tile_) * group_), lse_(std::size_t(rows_per_tile_) * group_),
        weights_(std::size_t(op.lse ? kPanelsPerItem : max_panels) * rows_per_tile_ * kPanel),
        exponentials_(op.lse ? 0 : std::size_t(max_panels) * rows_per_tile_ * group_ * kPanel),
        softmax_(op.lse ? 0 : std::size_t(rows_per_tile_) * group_),
        sums_(kRowsPerBlock), heaviest_(kRowsPerBlock) {
    for (int32_t at = 0; at < rows_per_tile_ * group_; ++at) row_of_[at] = at / group_;
  }

  void process(int32_t block) {
    const WorkItem* items = op_.items + op_.blocks[block];
    const int32_t num_items = op_.blocks[block + 1] - op_.blocks[block];
    if (op_.lse)
      process_items(block, items, num_items);
    else
      process_strips(block, items[0], items[num_items - 1].key_end);
  }

 private:
  // Rows whose exponentials over all keys fit into kOwnLseBytes.
  int32_t rows_without_lse(int64_t max_panels) const {
    const int64_t row_bytes = std::max<int64_t>(1, max_panels * kPanel * group_ * sizeof(float));
    return std::clamp<int64_t>(kOwnLseBytes / row_bytes, 4, kRowsPerBlock);
  }

  const RowRange& row(const Tile& tile, int32_t r) const { return op_.rows[tile.row_begin + r]; }

  // With the LSE given, all rows of a block pass over one item's keys after another.
  void process_items(int32_t block, const WorkItem* items, int32_t num_items) {
    clear_rows(items[0].num_rows);
    for (int32_t i = 0; i < num_items; ++i) {
      const Tile tile{block, items[i].row_begin, items[i].num_rows, items[i].key_begin / kPanel,
                      (items[i].key_end + kPanel - 1) / kPanel};
      clear_weights(tile);
      for (int32_t g = 0; g < op_.num_kv_heads; ++g) add_group(tile, g);
      for (int32_t r = 0; r < tile.num_rows; ++r) scan(tile, r, tile.panel_begin, tile.panel_end);
    }
    for (int32_t r = 0; r < items[0].num_rows; ++r) finish(op_.rows[items[0].row_begin + r], r);
  }

  // Without it, a few rows at a time see all their keys before any weight is known.
  void process_strips(int32_t block, const WorkItem& first, int32_t key_end) {
    for (int32_t begin = 0; begin < first.num_rows; begin += rows_per_tile_) {
      const Tile tile{block, first.row_begin + begin, std::min(rows_per_tile_, first.num_rows - begin),
                      first.key_begin / kPanel, (key_end + kPanel - 1) / kPanel};
      clear_rows(tile.num_rows);
      clear_weights(tile);
      for (int32_t g = 0; g < op_.num_kv_heads; ++g) add_group_without_lse(tile, g);
      for (int32_t r = 0; r < tile.num_rows; ++r) {
        for (int32_t p = tile.panel_begin; p < tile.panel_end; p = (p / kPanelsPerItem + 1) * kPanelsPerItem)
          scan(tile, r, p, std::min(tile.panel_end, (p / kPanelsPerItem + 1) * kPanelsPerItem));
        finish(row(tile, r), r);
      }
    }
  }

  void clear_rows(int32_t num_rows) {
    for (int32_t r = 0; r < num_rows; ++r) {
      sums_[r] = {};
      heaviest_[r].clear(num_heaviest_);
    }
  }

  void clear_weights(const Tile& tile) {
    std::memset(weights_.data(), 0, sizeof(float) * tile.num_panels() * tile.num_rows * kPanel);
  }

  // Head-summed weights of one row and panel: [kPanel].
  float* weights(const Tile& tile, int32_t panel, int32_t r) const {
    return weights_.data() + (std::size_t(panel - tile.panel_begin) * tile.num_rows + r) * kPanel;
  }

  // Queries of one KV head's group, [rows · group, head_dim], and their LSE.
  void load_queries(const Tile& tile, int32_t kv_head) {
    for (int32_t r = 0; r < tile.num_rows; ++r)
      for (int32_t j = 0; j < group_; ++j) {
        const int64_t slot = row(tile, r).slot, head = kv_head * group_ + j, at = r * group_ + j;
        widen(op_.dtype, op_.q, slot * op_.q_row_stride + head * op_.q_head_stride, op_.head_dim,
              queries_.data() + at * op_.head_dim);
        if (op_.lse) lse_[at] = op_.lse[head * op_.lse_head_stride + slot * op_.lse_row_stride];
      }
  }

  // The rows that see a panel, [first, last): both ends of a row's visible keys ascend.
  std::pair<int32_t, int32_t> rows_that_see(const Tile& tile, int32_t panel) const {
    int32_t first = 0, last = tile.num_rows;
    while (first < last && row(tile, first).position < panel * kPanel) ++first;
    while (last > first && row(tile, last - 1).visible_from >= (panel + 1) * kPanel) --last;
    return {first, last};
  }

  // weights += exp(scale · ⟨q, k⟩ − lse), head by head.
  void add_group(const Tile& tile, int32_t kv_head) {
    load_queries(tile, kv_head);
    for (int32_t panel = tile.panel_begin; panel < tile.panel_end; ++panel) {
      const auto [first, last] = rows_that_see(tile, panel);
      const float* keys = keys_.panel(tile.block, kv_head, panel);
      float* out = weights(tile, panel, 0);
      for_query_tiles(first * group_, last * group_, [&](int at, auto size) {
        Floats score[size][kPanelVectors];
        inner_products<size>(queries_.data() + at * op_.head_dim, keys, op_.head_dim, score);
        for (int m = 0; m < size; ++m) {
          float* weight = out + row_of_[at + m] * kPanel;
          for (int v = 0; v < kPanelVectors; ++v)
            store(weight + v * kLane, load(weight + v * kLane) + exp(score[m][v] * op_.scale - lse_[at + m]));
        }
      });
    }
  }

  // One pass stores e^(s − reference); once the denominators are known, a second one adds the weights up.
  void add_group_without_lse(const Tile& tile, int32_t kv_head) {
    load_queries(tile, kv_head);
    for (int32_t at = 0; at < tile.num_rows * group_; ++at) softmax_[at] = {};
    for (int32_t panel = tile.panel_begin; panel < tile.panel_end; ++panel) {
      const auto [first, last] = rows_that_see(tile, panel);
      const float* keys = keys_.panel(tile.block, kv_head, panel);
      const bool edge = !all_visible(tile, panel);
      for_query_tiles(first * group_, last * group_, [&](int at, auto size) {
        Floats score[size][kPanelVectors];
        inner_products<size>(queries_.data() + at * op_.head_dim, keys, op_.head_dim, score);
        for (int m = 0; m < size; ++m) {
          for (int v = 0; v < kPanelVectors; ++v) score[m][v] *= op_.scale;
          if (edge) hide_invisible(row(tile, row_of_[at + m]), panel, score[m]);
          exponentiate(tile, at + m, panel, score[m]);
        }
      });
    }
    add_weights(tile);
  }

  static bool all_visible(const RowRange& range, int32_t panel) {
    return range.visible_from <= panel * kPanel && (panel + 1) * kPanel - 1 <= range.position;
  }
  bool all_visible(const Tile& tile, int32_t panel) const {
    return all_visible(row(tile, 0), panel) && all_visible(row(tile, tile.num_rows - 1), panel);
  }

  static void hide_invisible(const RowRange& range, int32_t panel, Floats (&score)[kPanelVectors]) {
    const int32_t key = panel * kPanel;
    for (int v = 0; v < kPanelVectors; ++v) {
      const auto position = lane_numbers() + (key + v * kLane);
      const auto visible = (position >= range.visible_from) & (position <= range.position);
      score[v] = visible ? score[v] : splat(-std::numeric_limits<float>::infinity());
    }
  }

  // Stored exponentials, [tile panels, rows · group, kPanel].
  float* exponentials(const Tile& tile, int32_t panel, int32_t at) const {
    return exponentials_.data() + (std::size_t(panel - tile.panel_begin) * tile.num_rows * group_ + at) * kPanel;
  }

  // The reference is the maximum of the first panel a head sees. It moves only when a later score exceeds it so far
  // that exponentials could overflow; the exponentials stored until then are brought to the new one.
  void exponentiate(const Tile& tile, int32_t at, int32_t panel, const Floats (&score)[kPanelVectors]) {
    Softmax& softmax = softmax_[at];
    Floats largest = score[0];
    for (int v = 1; v < kPanelVectors; ++v) largest = greater_of(largest, score[v]);
    if (lane_bits(largest > softmax.limit)) move_reference(tile, at, panel, max_lanes(largest));
    Floats total{};
    float* out = exponentials(tile, panel, at);
    for (int v = 0; v < kPanelVectors; ++v) {
      const Floats e = exp(score[v] - softmax.reference);
      store(out + v * kLane, e);
      total += e;
    }
    softmax.total += total;
  }

  void move_reference(const Tile& tile, int32_t at, int32_t panel, float reference) {
    Softmax& softmax = softmax_[at];
    const float factor = std::exp(softmax.reference - reference);
    for (int32_t p = row(tile, row_of_[at]).visible_from / kPanel; p < panel; ++p) {
      float* stored = exponentials(tile, p, at);
      for (int v = 0; v < kPanelVectors; ++v) store(stored + v * kLane, load(stored + v * kLane) * factor);
    }
    softmax.total *= factor;
    softmax.reference = reference;
    softmax.limit = reference + kReferenceSlack;
  }

  // weights += exponentials / their sum, head by head.
  void add_weights(const Tile& tile) {
    float* inverse = lse_.data();
    for (int32_t at = 0; at < tile.num_rows * group_; ++at) inverse[at] = 1.0f / sum_lanes(softmax_[at].total);
    for (int32_t panel = tile.panel_begin; panel < tile.panel_end; ++panel) {
      const auto [first, last] = rows_that_see(tile, panel);
      for (int32_t at = first * group_; at < last * group_; ++at) {
        const float* e = exponentials(tile, panel, at);
        float* weight = weights(tile, panel, row_of_[at]);
        for (int v = 0; v < kPanelVectors; ++v)
          store(weight + v * kLane, load(weight + v * kLane) + load(e + v * kLane) * inverse[at]);
      }
    }
  }

  // Sums and heaviest weights of one row over the panels [begin, end). Lanes and order of the additions depend on the
  // keys' positions alone.
  void scan(const Tile& tile, int32_t r, int32_t begin, int32_t end) {
    const RowRange& range = row(tile, r);
    begin = std::max(begin, range.history_from / kPanel);
    end = std::min(end, range.position / kPanel + 1);
    Floats mass{}, squares{};
    for (int32_t panel = begin; panel < end; ++panel) {
      float* a = weights(tile, panel, r);
      const bool inside = panel * kPanel >= range.history_from && (panel + 1) * kPanel - 1 <= range.position;
      Floats m{}, s{};
      for (int v = 0; v < kPanelVectors; ++v, a += kLane) {
        const Floats x = average_heads(range, panel * kPanel + v * kLane, inside, a, heaviest_[r]);
        m += x;
        s += x * x;
      }
      mass += m;
      squares += s;
      add_optional(range, panel, a - kPanel, sums_[r]);
    }
    sums_[r].mass += sum_lanes(mass);
    sums_[r].sum_squares += sum_lanes(squares);
  }

  // Sum over heads → mean over heads, 0 outside I_t by selection; in place, and noted where among the heaviest.
  Floats average_heads(const RowRange& range, int32_t key, bool inside, float* a, Heaviest& heaviest) const {
    Floats mean = load(a) / num_heads_;
    uint32_t heavier = lane_bits(mean > heaviest.threshold);
    if (!inside) {
      const auto position = lane_numbers() + key;
      const auto in_history = (position >= range.history_from) & (position <= range.position);
      mean = in_history ? mean : Floats{};
      heavier &= lane_bits(in_history);
    }
    store(a, mean);
    for (; heavier; heavier &= heavier - 1) {
      const int lane = __builtin_ctz(heavier);
      heaviest.add(a[lane], key + lane, num_heaviest_);
    }
    return mean;
  }

  void add_optional(const RowRange& range, int32_t panel, const float* a, RowSums& sums) const {
    if (!op_.entropy_sum && !op_.max_weight && !op_.power_sum) return;
    const int begin = std::max(0, range.history_from - panel * kPanel);
    const int end = std::min(kPanel, range.position + 1 - panel * kPanel);
    for (int i = begin; i < end; ++i) {
      if (op_.entropy_sum && a[i] != 0.0f) sums.entropy_sum += double(a[i]) * std::log(a[i]);
      if (op_.max_weight) sums.max_weight = a[i] > sums.max_weight || a[i] != a[i] ? a[i] : sums.max_weight;
      if (op_.power_sum) sums.power_sum += std::pow(a[i], op_.renyi_alpha);
    }
  }

  // ---- epilogue

  void finish(const RowRange& range, int32_t r) {
    const RowSums& sums = sums_[r];
    const int32_t slot = range.slot;
    op_.mass[slot] = sums.mass;
    op_.sum_squares[slot] = sums.sum_squares;
    if (op_.entropy_sum) op_.entropy_sum[slot] = sums.entropy_sum;
    if (op_.max_weight) op_.max_weight[slot] = sums.max_weight;
    if (op_.power_sum) op_.power_sum[slot] = sums.power_sum;
    if (op_.kappa) op_.kappa[slot] = kappa(range, sums);
    Heaviest& heaviest = heaviest_[r];
    heaviest.sort(num_heaviest_);
    if (op_.topk_mass) {
      double total = 0;
      for (int i = 0; i < std::min(heaviest.count, op_.mass_top_k); ++i) total += weight_of(heaviest.candidates[i]);
      // The weights that could not be compared are in the mass.
      op_.topk_mass[slot] = std::isfinite(sums.mass) ? total : sums.mass;
    }
    store_top_k(slot, op_.mass[slot], heaviest);
  }

  static bool has_mass(float mass) { return mass >= kMinMass && std::isfinite(mass); }

  void store_top_k(int64_t slot, float mass, const Heaviest& heaviest) const {
    const int count = has_mass(mass) ? std::min(heaviest.count, op_.top_k) : 0;
    for (int i = 0; i < op_.top_k; ++i) {
      op_.index[slot * op_.top_k + i] = i < count ? position_of(heaviest.candidates[i]) : -1;
      op_.weight[slot * op_.top_k + i] = i < count ? weight_of(heaviest.candidates[i]) / mass : 0.0f;
    }
  }

  // κ of Eq. 18–20: H = Σ a² / (Σ a)², c = log(n H) / log n.
  float kappa(const RowRange& range, const RowSums& sums) const {
    const double n = range.position - range.history_from + 1;
    double c = 0.5;
    if (n > 1 && has_mass(sums.mass))
      c = std::clamp(1 + std::log(sums.sum_squares / (sums.mass * sums.mass)) / std::log(n), 0.0, 1.0);
    return op_.kappa_lo + (op_.kappa_hi - op_.kappa_lo) / (1 + std::exp(-op_.tau * (c - 0.5)));
  }

  const AttentionStatistics& op_;
  const PackedKeys& keys_;
  const int32_t group_;
  const float num_heads_;
  const int num_heaviest_;
  const int32_t rows_per_tile_;
  Buffer<float> queries_;
  Buffer<int32_t> row_of_;  // the row of a tile that a query head belongs to
  Buffer<float> lse_, weights_, exponentials_;
  Buffer<Softmax> softmax_;
  Buffer<RowSums> sums_;
  Buffer<Heaviest> heaviest_;
};

int32_t longest_block(const AttentionStatistics& op) {
  int32_t longest = 0;
  for (int32_t b = 0; b < op.num_blocks; ++b) {
    const int32_t begin = op.items[op.blocks[b]].key_begin, end = op.items[op.blocks[b + 1] - 1].key_end;
    longest = std::max(longest, (end + kPanel - 1) / kPanel - begin / kPanel);
  }
  return longest;
}

}  // namespace

void attention_statistics(const AttentionStatistics& op) {
  if (op.num_blocks == 0) return;
  const PackedKeys keys(op);
  const int32_t max_panels = longest_block(op);
  parallel(op.num_blocks, [&](Units& units) {
    RowWorker worker(op, keys, max_panels);
    // Later blocks of a sequence have more keys: they go first, so that the last ones to finish are short.
    for (int64_t unit; units.take(unit);) worker.process(op.num_blocks - 1 - unit);
  });
}

}  // namespace comppo::cpu::COMPPO_ISA
