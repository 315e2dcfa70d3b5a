// Packs queries, keys and log-denominators into the layouts of problem.cuh.
#pragma once

#include <cstdint>

#include "../isa.cuh"
#include "problem.cuh"

namespace comppo::cuda {

constexpr int kPackThreads = 256;

// Sixteen bytes of a packed row from `column` on, zeros beyond the head dimension. A null row is zeros.
template <class T>
__device__ __forceinline__ uint4 read_piece(const T* row, int column, int head_dim, bool aligned) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  uint4 piece = {0, 0, 0, 0};
  if (row == nullptr || column >= head_dim) return piece;
  if (aligned) return *reinterpret_cast<const uint4*>(row + column);
  T elements[kPiece] = {};
#pragma unroll
  for (int i = 0; i < kPiece; ++i)
    if (column + i < head_dim) elements[i] = row[column + i];
  memcpy(&piece, elements, sizeof piece);
  return piece;
}

// One thread block per block of rows and pass.
template <class T, int heads>
__global__ void __launch_bounds__(kPackThreads) pack_queries(const __grid_constant__ Problem p) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  const int block = blockIdx.x / p.shape.passes, pass = blockIdx.x % p.shape.passes;
  const int first_item = p.op.blocks[block], last_item = p.op.blocks[block + 1];
  const WorkItem work = p.op.items[first_item];
  const int kv_head = pass / p.shape.passes_of_group;
  const int first_head = pass % p.shape.passes_of_group * heads;  // in its group
  const int64_t at = pass_at(p.shape, block, pass);
  const int pieces = p.shape.padded_dim / kPiece;
  for (int i = threadIdx.x; i < kTokens * heads * pieces; i += kPackThreads) {
    const int piece = i % pieces, head = i / pieces % heads, token = i / pieces / heads;
    const bool real = token < work.num_rows && first_head + head < p.shape.group;
    const T* row = nullptr;
    if (real)
      row = static_cast<const T*>(p.op.q) + p.op.rows[work.row_begin + token].slot * p.op.q_row_stride +
            static_cast<int64_t>(kv_head * p.shape.group + first_head + head) * p.op.q_head_stride;
    T* packed = static_cast<T*>(p.queries) + (at + query_row<heads>(token, head)) * p.shape.padded_dim;
    reinterpret_cast<uint4*>(packed)[piece] = read_piece(row, piece * kPiece, p.op.head_dim, p.queries_aligned);
  }
  for (int i = threadIdx.x; p.op.lse != nullptr && i < kTokens * heads; i += kPackThreads) {
    const int head = i % heads, token = i / heads;
    const bool real = token < work.num_rows && first_head + head < p.shape.group;
    float denominator = __uint_as_float(0x7f800000u);  // +inf: no weight
    if (real)
      denominator = kUnitsPerNat<T> * p.op.lse[(kv_head * p.shape.group + first_head + head) * p.op.lse_head_stride +
                                      p.op.rows[work.row_begin + token].slot * p.op.lse_row_stride];
    p.denominators[at + query_row<heads>(token, head)] = denominator;
  }
  if (pass == 0)
    for (int item = first_item + threadIdx.x; item < last_item; item += kPackThreads) p.item_block[item] = block;
}

// One thread per 16 bytes.
template <class T>
__global__ void __launch_bounds__(kPackThreads) pack_keys(const __grid_constant__ Problem p) {
  constexpr int kPiece = 16 / static_cast<int>(sizeof(T));
  const int pieces = p.shape.padded_dim / kPiece;
  const int64_t number = static_cast<int64_t>(blockIdx.x) * kPackThreads + threadIdx.x;
  const int piece = static_cast<int>(number % pieces);
  const int64_t row = number / pieces;  // [kv head, key]
  if (row >= static_cast<int64_t>(p.op.num_kv_heads) * p.op.num_keys) return;
  const T* from = static_cast<const T*>(p.op.k) + row % p.op.num_keys * p.op.k_row_stride +
                  row / p.op.num_keys * p.op.k_head_stride;
  static_cast<uint4*>(p.keys)[number] = read_piece(from, piece * kPiece, p.op.head_dim, p.keys_aligned);
}

}  // namespace comppo::cuda
