// Cuts the wanted attention rows into blocks and work items (comppo/plan.h).
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "comppo/plan.h"

namespace comppo::host {

struct Plan {
  std::vector<RowRange> rows;
  std::vector<WorkItem> items;
  std::vector<int32_t> blocks;       // offsets into items, and their number
  std::vector<int64_t> num_history;  // n_t, by slot
};

// What I_t leaves out (Eq. 18): I_t = {i : max(skip_first, P if response_only, s − window + 1) ≤ i ≤ s}.
struct History {
  bool response_only;
  int64_t skip_first;
  std::optional<int64_t> window;
};

// rows: packed positions of the wanted rows, in any order. cu_seqlens: packed position of each sequence's first token,
// and their end. prompt_lengths: one per sequence. Throws std::invalid_argument naming what is out of range.
Plan make_plan(std::span<const int64_t> rows, std::span<const int64_t> cu_seqlens,
               std::span<const int64_t> prompt_lengths, int64_t num_keys, const History& history);

}  // namespace comppo::host
