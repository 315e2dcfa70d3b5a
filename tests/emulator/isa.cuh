// The functions of csrc/cuda/isa.cuh on the CPU. Put in front of every .cu file, it takes that header's place.
//
// Each checks what its instruction demands: alignment, descriptors, swizzle, fences, the order of waits.
#ifndef COMPPO_CUDA_ISA_CUH
#define COMPPO_CUDA_ISA_CUH

#include <cuda.h>
#include <cuda_runtime.h>

#include "../../csrc/cuda/scalar.cuh"

namespace comppo::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
using SharedAddress = uint32_t;

template <class Storage>
Storage& dynamic_shared() {
  if (sizeof(Storage) > emulator::block->shared.bytes) emulator::fail("too little dynamic shared memory");
  return *reinterpret_cast<Storage*>(emulator::block->shared.begin);
}

inline SharedAddress shared_address(const void* pointer) {
  const emulator::Region& shared = emulator::block->shared;
  const char* at = static_cast<const char*>(pointer);
  if (at < shared.begin || at >= shared.begin + shared.bytes) emulator::fail("%p is not in shared memory", pointer);
  return static_cast<SharedAddress>(at - shared.begin) + emulator::kSharedOrigin;
}

inline char* shared_pointer(SharedAddress address, std::size_t bytes) {
  const emulator::Region& shared = emulator::block->shared;
  if (address < emulator::kSharedOrigin || address - emulator::kSharedOrigin + bytes > shared.bytes)
    emulator::fail("shared address %u is outside the block's %zu bytes", address, shared.bytes);
  return shared.begin + (address - emulator::kSharedOrigin);
}

inline void require_aligned(const void* pointer, std::size_t alignment, const char* what) {
  if (reinterpret_cast<uintptr_t>(pointer) % alignment) emulator::fail("%s: %p is not aligned to %zu", what, pointer, alignment);
}

inline int thread_now() { return static_cast<int>(threadIdx.x); }

inline float exp2_approx(float x) { return exp2f(x); }

inline float to_float(uint16_t bits, BFloat16) { return __uint_as_float(uint32_t(bits) << 16); }

inline float to_float(uint16_t bits, Float16) {
  _Float16 x;
  std::memcpy(&x, &bits, 2);
  return static_cast<float>(x);
}

// --- cp.async: lands when it is waited for and not before; until then the destination is poison

inline void cp_async_16(void* shared, const void* global, bool valid) {
  require_aligned(shared, 16, "cp.async");
  if (valid) require_aligned(global, 16, "cp.async");
  char* to = shared_pointer(shared_address(shared), 16);
  emulator::poison(to, 16);
  emulator::current->open_copies.push_back({to, valid ? global : nullptr});
}

inline void cp_async_commit() {
  emulator::current->copy_groups.push_back(std::move(emulator::current->open_copies));
  emulator::current->open_copies.clear();
}

template <int pending>
void cp_async_wait() {
  auto& groups = emulator::current->copy_groups;
  for (; groups.size() > static_cast<std::size_t>(pending); groups.pop_front())
    for (const emulator::CopyAsync& copy : groups.front()) {
      if (copy.from)
        std::memcpy(copy.to, copy.from, 16);
      else
        std::memset(copy.to, 0, 16);
    }
}

// --- ldmatrix, mma.sync

inline void ldmatrix_x4(uint32_t (&matrix)[4], SharedAddress row) {
  struct Out {
    uint32_t matrix[4];
  };
  if (row % 16) emulator::fail("ldmatrix: row address %u is not aligned to 16", row);
  const Out out = emulator::meet<Out>(emulator::warp(), "ldmatrix", row, [](const SharedAddress* rows, Out* out) {
    for (int m = 0; m < 4; ++m)
      for (int r = 0; r < 8; ++r) {
        const char* data = shared_pointer(rows[m * 8 + r], 16);
        for (int i = 0; i < 4; ++i) std::memcpy(&out[r * 4 + i].matrix[m], data + 4 * i, 4);
      }
  });
  std::memcpy(matrix, out.matrix, sizeof matrix);
}

template <class T>
void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, T type) {
  struct In {
    uint32_t a[4], b[2];
    float c[4];
  };
  struct Out {
    float c[4];
  };
  In in{{a[0], a[1], a[2], a[3]}, {b0, b1}, {c[0], c[1], c[2], c[3]}};
  const Out out = emulator::meet<Out>(emulator::warp(), "mma", in, [type](const In* in, Out* out) {
    float left[16][16], right[16][8];
    for (int l = 0; l < 32; ++l) {
      for (int i = 0; i < 4; ++i)
        for (int half = 0; half < 2; ++half)
          left[l / 4 + i % 2 * 8][l % 4 * 2 + i / 2 * 8 + half] = to_float(uint16_t(in[l].a[i] >> 16 * half), type);
      for (int i = 0; i < 2; ++i)
        for (int half = 0; half < 2; ++half)
          right[l % 4 * 2 + i * 8 + half][l / 4] = to_float(uint16_t(in[l].b[i] >> 16 * half), type);
    }
    for (int row = 0; row < 16; ++row) {
      float sum[8] = {};
      for (int k = 0; k < 16; ++k)
        for (int n = 0; n < 8; ++n) sum[n] += left[row][k] * right[k][n];
      for (int n = 0; n < 8; ++n) {
        const int l = row % 8 * 4 + n / 2, i = row / 8 * 2 + n % 2;
        out[l].c[i] = in[l].c[i] + sum[n];
      }
    }
  });
  std::memcpy(c, out.c, sizeof c);
}

// --- mbarrier

inline emulator::Mbarrier& mbarrier_at(uint64_t& barrier) {
  const auto found = emulator::block->mbarriers.find(&barrier);
  if (found == emulator::block->mbarriers.end()) emulator::fail("mbarrier used before it was initialised");
  return found->second;
}

inline void mbarrier_end_phase(emulator::Mbarrier& b) {
  if (b.pending || b.bytes) return;
  b.pending = b.expected;
  ++b.phase;
}

inline void mbarrier_init(uint64_t& barrier, int arrivals) {
  shared_address(&barrier);
  require_aligned(&barrier, 8, "mbarrier");
  emulator::block->mbarriers[&barrier] = {arrivals, arrivals, 0, 0};
}

inline void mbarrier_init_fence() {}

inline void mbarrier_arrive_expect(uint64_t& barrier, int bytes) {
  emulator::Mbarrier& b = mbarrier_at(barrier);
  if (b.pending == 0) emulator::fail("more arrivals at an mbarrier than its phase expects");
  b.bytes += bytes;
  --b.pending;
  mbarrier_end_phase(b);
  emulator::maybe_preempt();
}

inline void mbarrier_arrive(uint64_t& barrier) { mbarrier_arrive_expect(barrier, 0); }

inline void mbarrier_wait(uint64_t& barrier, int parity) {
  const emulator::Mbarrier& b = mbarrier_at(barrier);
  if (parity != 0 && parity != 1) emulator::fail("mbarrier parity %d", parity);
  while (static_cast<int>(b.phase % 2) == parity) emulator::wait(&b.phase, b.phase, "mbarrier wait");
}

// --- TMA: lands at a time drawn from the seed; until then the destination is poison

inline SharedAddress swizzle_128(SharedAddress address) { return address ^ (address >> 7 & 7) << 4; }

inline void land_tile(SharedAddress to, const CUtensorMap& map, const int64_t (&at)[3]) {
  const uint32_t row_bytes = map.box[0] * 2;
  for (uint32_t z = 0; z < map.box[2]; ++z)
    for (uint32_t y = 0; y < map.box[1]; ++y)
      for (uint32_t x = 0; x < map.box[0]; ++x) {
        const SharedAddress plain = to + (z * map.box[1] + y) * row_bytes + 2 * x;
        char* element = shared_pointer(map.swizzle ? swizzle_128(plain) : plain, 2);
        const int64_t from[3] = {at[0] + x, at[1] + y, at[2] + z};
        bool inside = true;
        int64_t offset = 0;
        for (int i = 0; i < 3; ++i) {
          inside &= from[i] >= 0 && from[i] < static_cast<int64_t>(map.size[i]);
          offset += from[i] * static_cast<int64_t>(map.stride[i]);
        }
        if (inside)
          std::memcpy(element, map.base + offset, 2);
        else
          std::memset(element, 0, 2);
      }
}

inline void tma_load(void* shared, const CUtensorMap& map, const int64_t (&at)[3], uint32_t rank, uint64_t& barrier) {
  const SharedAddress to = shared_address(shared);
  if (map.rank != rank) emulator::fail("TMA: %u coordinates for a map of rank %u", rank, map.rank);
  if (to % (map.swizzle ? 1024 : 128)) emulator::fail("TMA: shared address %u is not aligned to the swizzle", to);
  const int bytes = static_cast<int>(2 * map.box[0] * map.box[1] * map.box[2]);
  emulator::poison(shared_pointer(to, static_cast<std::size_t>(bytes)), static_cast<std::size_t>(bytes));
  emulator::Mbarrier& b = mbarrier_at(barrier);
  const int64_t x = at[0], y = at[1], z = at[2];
  emulator::block->bulk_copies.push_back({[&b, &map, to, bytes, x, y, z] {
    land_tile(to, map, {x, y, z});
    if (b.bytes < bytes) emulator::fail("TMA: more bytes arrive than the mbarrier expects");
    b.bytes -= bytes;
    mbarrier_end_phase(b);
  }});
}

inline void tma_load_2d(void* shared, const CUtensorMap& map, int x, int y, uint64_t& barrier) {
  tma_load(shared, map, {x, y, 0}, 2, barrier);
}

inline void tma_load_3d(void* shared, const CUtensorMap& map, int x, int y, int z, uint64_t& barrier) {
  tma_load(shared, map, {x, y, z}, 3, barrier);
}

// --- wgmma: results appear when the group is waited for; until then the accumulators are poison, and the operands must
// stay as they are

// A K-major operand under the 128-byte swizzle: 8-row groups `stride` bytes apart, rows of 128 bytes.
struct Operand {
  SharedAddress start;
  uint32_t stride;
};

inline Operand decode_operand(uint64_t descriptor) {
  const Operand o{uint32_t(descriptor & 0x3fff) << 4, uint32_t(descriptor >> 32 & 0x3fff) << 4};
  if (descriptor >> 62 != 1) emulator::fail("wgmma: the descriptor does not ask for the 128-byte swizzle");
  if (descriptor >> 49 & 7) emulator::fail("wgmma: base offsets are not emulated");
  if (o.start >> 7 & 7) emulator::fail("wgmma: operand at %u is not aligned to the swizzle's 1024 bytes", o.start);
  return o;
}

inline const char* operand_at(const Operand& o, int row, int k) {
  const SharedAddress plain = o.start + uint32_t(row / 8) * o.stride + uint32_t(row % 8) * 128 + uint32_t(k) * 2;
  return shared_pointer(swizzle_128(plain), 2);
}

inline uint64_t operand_checksum(uint64_t a, uint64_t b) {
  uint64_t sum = 14695981039346656037ull;
  const auto add = [&sum](const Operand& o, int rows) {
    for (int row = 0; row < rows; ++row)
      for (int k = 0; k < 16; k += 8) {
        uint64_t words[2];
        std::memcpy(words, operand_at(o, row, k), 16);
        sum = ((sum ^ words[0]) * 1099511628211ull ^ words[1]) * 1099511628211ull;
      }
  };
  add(decode_operand(a), 64);
  add(decode_operand(b), 64);
  return sum;
}

inline emulator::Accumulating& accumulating(float (&c)[32], bool accumulate) {
  auto& all = emulator::current->accumulating;
  auto found = std::find_if(all.begin(), all.end(), [&](const auto& x) { return x.registers == c; });
  if (found == all.end()) {
    all.push_back({c, {}, -1});
    found = all.end() - 1;
    std::memcpy(found->value, c, sizeof c);
    emulator::poison(c, sizeof c);
  }
  if (!accumulate) std::fill(found->value, found->value + 32, 0.0f);
  found->group = -1;
  return *found;
}

template <class T>
void wgmma_compute(float* const* registers, uint64_t a, uint64_t b, T type) {
  static float right[16][64];
  const Operand left_at = decode_operand(a), right_at = decode_operand(b);
  const auto element = [type](const Operand& o, int row, int k) {
    uint16_t bits;
    std::memcpy(&bits, operand_at(o, row, k), 2);
    return to_float(bits, type);
  };
  for (int n = 0; n < 64; ++n)
    for (int k = 0; k < 16; ++k) right[k][n] = element(right_at, n, k);
  for (int row = 0; row < 64; ++row) {
    float sum[64] = {};
    for (int k = 0; k < 16; ++k) {
      const float x = element(left_at, row, k);
      for (int n = 0; n < 64; ++n) sum[n] += x * right[k][n];
    }
    for (int n = 0; n < 64; ++n)
      registers[row / 16 * 32 + row % 8 * 4 + n % 8 / 2][n / 8 * 4 + row % 16 / 8 * 2 + n % 2] += sum[n];
  }
}

template <class T>
void wgmma_m64n64k16(float (&c)[32], uint64_t a, uint64_t b, bool accumulate, T type) {
  struct In {
    float* registers;
    uint64_t a, b;
  };
  if (!emulator::current->wgmma_fenced) emulator::fail("wgmma without wgmma.fence after registers were touched");
  In in{accumulating(c, accumulate).value, a, b};
  emulator::meet<char>(emulator::warpgroup(), "wgmma", in, [type](const In* in, char*) {
    float* registers[128];
    for (int i = 0; i < 128; ++i) {
      if (in[i].a != in[0].a || in[i].b != in[0].b) emulator::fail("wgmma: descriptors differ within the warpgroup");
      registers[i] = in[i].registers;
    }
    wgmma_compute(registers, in[0].a, in[0].b, type);
  });
  if (emulator::lane() == 0) emulator::current->operands.push_back({a, b, operand_checksum(a, b), -1});
}

inline void wgmma_fence() { emulator::current->wgmma_fenced = true; }

inline void wgmma_commit() {
  const int group = emulator::current->wgmma_groups++;
  for (auto& x : emulator::current->accumulating)
    if (x.group < 0) x.group = group;
  for (auto& x : emulator::current->operands)
    if (x.group < 0) x.group = group;
}

template <int pending>
void wgmma_wait() {
  emulator::Thread& t = *emulator::current;
  const auto done = [&](int group) { return group >= 0 && group < t.wgmma_groups - pending; };
  for (const auto& x : t.operands)
    if (done(x.group) && operand_checksum(x.a, x.b) != x.checksum)
      emulator::fail("wgmma: an operand changed while the instruction was under way");
  for (const auto& x : t.accumulating)
    if (done(x.group)) std::memcpy(x.registers, x.value, sizeof x.value);
  std::erase_if(t.operands, [&](const auto& x) { return done(x.group); });
  std::erase_if(t.accumulating, [&](const auto& x) { return done(x.group); });
  t.wgmma_fenced = false;
}

inline void wgmma_results(float (&c)[32]) {
  const auto& all = emulator::current->accumulating;
  if (std::any_of(all.begin(), all.end(), [&](const auto& x) { return x.registers == c; }))
    emulator::fail("wgmma: results used before their group was waited for");
}

// --- setmaxnreg

inline void require_register_count(int registers) {
  if (registers % 8 || registers < 24 || registers > 256) emulator::fail("setmaxnreg %d", registers);
}

template <int registers>
void give_up_registers() {
  require_register_count(registers);
}

template <int registers>
void claim_registers() {
  require_register_count(registers);
}

}  // namespace comppo::cuda

#endif
