#include "plan.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <stdexcept>
#include <string>

namespace comppo::host {
namespace {

template <class... Parts>
void require(bool ok, const Parts&... parts) {
  if (ok) return;
  std::string message;
  const auto append = [&message](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>)
      message += std::to_string(part);
    else
      message += part;
  };
  (append(parts), ...);
  throw std::invalid_argument(message);
}

void check(std::span<const int64_t> rows, std::span<const int64_t> cu_seqlens, std::span<const int64_t> prompt_lengths,
           int64_t num_keys, const History& history) {
  require(num_keys < std::numeric_limits<int32_t>::max(), "k has ", num_keys, " keys, more than an int32 can number");
  require(!cu_seqlens.empty() && cu_seqlens[0] == 0, "cu_seqlens must begin with 0");
  for (std::size_t i = 1; i < cu_seqlens.size(); ++i)
    require(cu_seqlens[i] >= cu_seqlens[i - 1], "cu_seqlens decreases from ", cu_seqlens[i - 1], " to ", cu_seqlens[i],
            " at entry ", i);
  require(cu_seqlens.back() <= num_keys, "cu_seqlens ends at ", cu_seqlens.back(), ", but k has ", num_keys, " keys");
  require(prompt_lengths.size() + 1 == cu_seqlens.size(), "prompt_lengths has ", prompt_lengths.size(),
          " entries, but cu_seqlens encloses ", cu_seqlens.size() - 1, " sequences");
  for (std::size_t i = 0; i < prompt_lengths.size(); ++i)
    require(prompt_lengths[i] >= 0, "prompt_lengths[", i, "] is ", prompt_lengths[i], ", a negative number");
  for (std::size_t i = 0; i < rows.size(); ++i)
    require(rows[i] >= 0 && rows[i] < cu_seqlens.back(), "rows[", i, "] is ", rows[i], ", not a packed position from 0 to ",
            cu_seqlens.back() - 1);
  require(history.skip_first >= 0, "skip_first is ", history.skip_first, ", a negative number");
  require(!history.window || *history.window >= 1, "window is ", history.window.value_or(0), ", not at least 1");
}

std::vector<int32_t> by_position(std::span<const int64_t> rows) {
  std::vector<int32_t> slots(rows.size());
  std::iota(slots.begin(), slots.end(), 0);
  std::stable_sort(slots.begin(), slots.end(), [&](int32_t a, int32_t b) { return rows[a] < rows[b]; });
  return slots;
}

RowRange range_of(int32_t slot, int64_t position, int64_t start, int64_t prompt_length, const History& history) {
  const int64_t visible = history.window ? std::max<int64_t>(0, position - *history.window + 1) : 0;
  int64_t from = std::max(visible, history.skip_first);
  if (history.response_only) from = std::max(from, prompt_length);
  from = std::min(from, position + 1);  // I_t is empty
  return {slot, int32_t(start), int32_t(position), int32_t(visible), int32_t(from)};
}

// One block: its items split the keys at multiples of kKeysPerItem.
void add_block(Plan& plan, int32_t row_begin, int32_t num_rows) {
  const int32_t begin = plan.rows[row_begin].visible_from / kKeyTile * kKeyTile;
  const int32_t end = plan.rows[row_begin + num_rows - 1].position + 1;
  for (int32_t key = begin; key < end; key = (key / kKeysPerItem + 1) * kKeysPerItem)
    plan.items.push_back({row_begin, num_rows, key, std::min(end, (key / kKeysPerItem + 1) * kKeysPerItem)});
  plan.blocks.push_back(int32_t(plan.items.size()));
}

}  // namespace

Plan make_plan(std::span<const int64_t> rows, std::span<const int64_t> cu_seqlens,
               std::span<const int64_t> prompt_lengths, int64_t num_keys, const History& history) {
  check(rows, cu_seqlens, prompt_lengths, num_keys, history);
  Plan plan;
  plan.blocks.push_back(0);
  plan.num_history.resize(rows.size());
  std::size_t sequence = 0;
  for (const int32_t slot : by_position(rows)) {
    while (rows[slot] >= cu_seqlens[sequence + 1]) ++sequence;
    const int64_t start = cu_seqlens[sequence];
    const RowRange range = range_of(slot, rows[slot] - start, start, prompt_lengths[sequence], history);
    plan.num_history[slot] = range.position - range.history_from + 1;
    plan.rows.push_back(range);
  }
  const int32_t num_rows = int32_t(rows.size());
  for (int32_t begin = 0, end = 0; begin < num_rows; begin = end) {
    const int32_t limit = std::min(num_rows, begin + kRowsPerBlock);
    for (end = begin; end < limit && plan.rows[end].sequence_start == plan.rows[begin].sequence_start;) ++end;
    add_block(plan, begin, end - begin);
  }
  return plan;
}

}  // namespace comppo::host
