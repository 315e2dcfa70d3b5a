// The instructions that CUDA C++ has no name for, one function each. Nothing else here contains assembly.
//
// A guard instead of #pragma once: tests/emulator/isa.cuh defines the same names for the CPU and claims this
// guard first, which lets the tests run every other file of this folder unchanged.
#ifndef COMPPO_CUDA_ISA_CUH
#define COMPPO_CUDA_ISA_CUH

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "scalar.cuh"

namespace comppo::cuda {

constexpr unsigned kAllLanes = 0xffffffffu;
using SharedAddress = uint32_t;

// The block's dynamic shared memory as one struct. Kernels have no other shared memory: it begins at address 0 of
// the window up to the system's reserve, which is a multiple of 1024 bytes, as the 128-byte swizzle needs it.
template <class Storage>
__device__ __forceinline__ Storage& dynamic_shared() {
  extern __shared__ __align__(1024) unsigned char dynamic_shared_bytes[];
  asm volatile("// dynamic shared memory: %0 bytes" ::"n"(static_cast<int>(sizeof(Storage))));  // for cuda_report.py
  return *reinterpret_cast<Storage*>(dynamic_shared_bytes);
}

__device__ __forceinline__ SharedAddress shared_address(const void* pointer) {
  return static_cast<SharedAddress>(__cvta_generic_to_shared(pointer));
}

// threadIdx.x, read anew each time: nothing that depends on it can be computed ahead and held in registers meanwhile.
__device__ __forceinline__ int thread_now() {
  int thread;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
  return thread;
}

// 2^x to 2 ulp, denormal results flushed to 0.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- sm_80: cp.async, ldmatrix, mma.sync

// Copies 16 bytes, or writes 16 zero bytes where `valid` is false (then nothing is read).
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared_address(shared)), "l"(global),
               "r"(valid ? 16 : 0)
               : "memory");
}

__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most `pending` groups of this thread are under way.
template <int pending>
__device__ __forceinline__ void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory");
}

// Four 8 × 8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void ldmatrix_x4(uint32_t (&matrix)[4], SharedAddress row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrix[0]), "=r"(matrix[1]), "=r"(matrix[2]), "=r"(matrix[3])
               : "r"(row)
               : "memory");
}

// c [16, 8] += a [16, 16] · b [16, 8] over a warp, float32 accumulators.
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1, Float16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// --- sm_90: mbarrier, TMA, wgmma; usable only in files compiled for sm_90a

__device__ __forceinline__ void mbarrier_init(uint64_t& barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(&barrier)), "r"(arrivals) : "memory");
}

// Makes initialised barriers known to the TMA unit.
__device__ __forceinline__ void mbarrier_init_fence() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint64_t& barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(&barrier)) : "memory");
}

// Arrives, and holds the phase open until `bytes` more have been copied.
__device__ __forceinline__ void mbarrier_arrive_expect(uint64_t& barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(&barrier)), "r"(bytes)
               : "memory");
}

// Until the phase of this parity is complete. Of a new barrier, the phase before the first (parity 1) is.
__device__ __forceinline__ void mbarrier_wait(uint64_t& barrier, int parity) {
  uint32_t done;
  do {
    asm volatile(
        "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(done)
        : "r"(shared_address(&barrier)), "r"(parity)
        : "memory");
  } while (!done);
}

__device__ __forceinline__ void tma_load_2d(void* shared, const CUtensorMap& map, int x, int y, uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];" ::"r"(
          shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(shared_address(&barrier))
      : "memory");
}

__device__ __forceinline__ void tma_load_3d(void* shared, const CUtensorMap& map, int x, int y, int z,
                                            uint64_t& barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], "
      "[%5];" ::"r"(shared_address(shared)),
      "l"(&map), "r"(x), "r"(y), "r"(z), "r"(shared_address(&barrier))
      : "memory");
}

// Orders a warpgroup's register accesses before its next wgmma.
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Until at most `pending` groups are under way. Name every accumulator of a finished group in wgmma_results next.
template <int pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(pending) : "memory");
}

// Keeps the compiler from moving accesses to these registers across this point.
__device__ __forceinline__ void wgmma_results(float (&c)[32]) {
#pragma unroll
  for (int i = 0; i < 32; ++i) asm volatile("" : "+f"(c[i])::"memory");
}

#define COMPPO_WGMMA_M64N64K16(TYPE)                                                                                  \
  asm volatile(                                                                                                       \
      "{ .reg .pred p; setp.ne.b32 p, %34, 0;\n"                                                                      \
      "wgmma.mma_async.sync.aligned.m64n64k16.f32." TYPE "." TYPE                                                     \
      " {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "                                 \
      "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "                                  \
      "%32, %33, p, 1, 1, 0, 0; }"                                                                                    \
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]),                           \
        "+f"(c[7]), "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]),                       \
        "+f"(c[14]), "+f"(c[15]), "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]),                    \
        "+f"(c[21]), "+f"(c[22]), "+f"(c[23]), "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]),                    \
        "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])                                                            \
      : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)))

// Starts c [64, 64] = a [64, 16] · b [16, 64] (+ c where `accumulate`) over a warpgroup. a and b are shared-memory
// descriptors of K-major operands; c must not be touched before the group is waited for.
__device__ __forceinline__ void wgmma_m64n64k16(float (&c)[32], uint64_t a, uint64_t b, bool accumulate, BFloat16) {
  COMPPO_WGMMA_M64N64K16("bf16");
}

__device__ __forceinline__ void wgmma_m64n64k16(float (&c)[32], uint64_t a, uint64_t b, bool accumulate, Float16) {
  COMPPO_WGMMA_M64N64K16("f16");
}

#undef COMPPO_WGMMA_M64N64K16

// Moves registers between warpgroups; every thread of the warpgroup executes it.
template <int registers>
__device__ __forceinline__ void give_up_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(registers));
}

template <int registers>
__device__ __forceinline__ void claim_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(registers));
}

}  // namespace comppo::cuda

#endif
