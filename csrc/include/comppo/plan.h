// How the wanted attention rows are cut into uniform work. Made on the host by csrc/host/plan.cpp.
//
// Positions and keys count inside the row's own sequence, from 0. Tiles of keys begin at multiples of kKeyTile
// and items at multiples of kKeysPerItem, whatever rows share a block: a kernel that treats its rows
// independently then gives a row the same bits alone, in any packing and on any tensor-parallel rank.
#pragma once

#include <cstdint>

namespace comppo {

constexpr int32_t kRowsPerBlock = 64;    // wanted rows of a block, at most
constexpr int32_t kKeysPerItem = 2048;   // keys of a work item, at most
constexpr int32_t kKeyTile = 128;        // alignment of WorkItem::key_begin; divides kKeysPerItem

// One wanted row. The table is ordered by packed position; `slot` leads back to the caller's order.
struct RowRange {
  int32_t slot;            // row of q, lse and of every result, 0 … num_rows − 1
  int32_t sequence_start;  // packed position of the sequence's first token
  int32_t position;        // s: the row's own position and its last key
  int32_t visible_from;    // first key under the softmax (causal, sliding window), ≤ position
  int32_t history_from;    // first key of I_t, ≥ visible_from; > position where I_t is empty
};

// Up to kRowsPerBlock rows of one sequence × up to kKeysPerItem keys. The items of a block are adjacent and ascend
// by key; together they cover every visible key of its rows. Masking is the kernel's: an item also holds keys
// beyond a row's position or before its visible_from.
struct WorkItem {
  int32_t row_begin;  // first row, in the table of RowRange
  int32_t num_rows;   // 1 … kRowsPerBlock, by ascending position
  int32_t key_begin;  // first key; a multiple of kKeyTile, and of kKeysPerItem except in a block's first item
  int32_t key_end;    // one past the last key: the next multiple of kKeysPerItem, or the last row's position + 1
};

}  // namespace comppo
