// Runs CUDA thread blocks on the CPU: one fiber per thread, one block at a time.
//
// It models what a kernel may rely on, and punishes what it may not: the order of warps (and of blocks) is drawn from
// a seed, asynchronous operations poison their destination until they are waited for, memory starts as NaN,
// lanes of a warp that meet in different collectives are an error, and so is a block in which nobody can
// go on. It does not model the hardware: no timing, no banks, no caches, no weak memory order, and floating-point sums
// inside a matrix instruction are taken one after another.
#pragma once

#include <setjmp.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <numeric>
#include <random>
#include <unordered_map>
#include <vector>

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};

inline dim3 blockIdx, blockDim, gridDim;

namespace emulator {

constexpr unsigned kLanes = 32;
constexpr unsigned kWarpsPerGroup = 4;
constexpr uint32_t kSharedOrigin = 1024;  // as on sm_90, where the system keeps the first KiB
constexpr std::size_t kStackBytes = 128 << 10;
constexpr unsigned kTimeLimitSeconds = 60;

// --- settings of the next launch, and what came of the last one

inline uint64_t seed = 0;
inline int compute_capability = 90;
inline int shared_limit = 227 << 10;
inline char fault[512];

// --- memory that faults when it is left

struct Region {
  char* pages = nullptr;
  std::size_t page_bytes = 0;  // without the guards
  char* begin = nullptr;       // the bytes asked for end at the upper guard, short of the alignment
  std::size_t bytes = 0;
};

inline std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

inline Region map_region(std::size_t bytes, std::size_t alignment) {
  const std::size_t page = page_size(), room = (bytes + alignment - 1) / alignment * alignment;
  Region r;
  r.page_bytes = std::max(page, (room + page - 1) / page * page);
  r.pages = static_cast<char*>(
      mmap(nullptr, r.page_bytes + 2 * page, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  if (r.pages == MAP_FAILED) std::abort();
  r.pages += page;
  mprotect(r.pages, r.page_bytes, PROT_READ | PROT_WRITE);
  r.begin = r.pages + r.page_bytes - room;
  r.bytes = bytes;
  return r;
}

inline void unmap_region(const Region& r) {
  if (r.pages) munmap(r.pages - page_size(), r.page_bytes + 2 * page_size());
}

inline void poison(void* to, std::size_t bytes) { std::memset(to, 0xff, bytes); }  // NaN in every format

// Bytes around a region that must stay as they are.
inline bool slack_is_untouched(const Region& r) {
  const auto untouched = [](const char* from, const char* to) {
    return std::all_of(from, to, [](char c) { return c == char(0xff); });
  };
  return untouched(r.pages, r.begin) && untouched(r.begin + r.bytes, r.pages + r.page_bytes);
}

// --- threads

struct CopyAsync {
  char* to;
  const void* from;  // null: zeros
};

// An accumulator that wgmma instructions under way will write.
struct Accumulating {
  float* registers;
  float value[32];
  int group;
};

// What a wgmma instruction reads until it is waited for.
struct Operands {
  uint64_t a, b;
  uint64_t checksum;
  int group;
};

struct Thread {
  jmp_buf context;
  Region stack;
  dim3 index;
  unsigned number = 0;
  bool finished = false;
  const uint64_t* waits_on = nullptr;  // runnable as soon as this word differs from `waits_for`
  uint64_t waits_for = 0;
  const char* waits_at = "";

  std::vector<CopyAsync> open_copies;
  std::deque<std::vector<CopyAsync>> copy_groups;

  std::vector<Accumulating> accumulating;
  std::vector<Operands> operands;
  int wgmma_groups = 0;  // committed so far
  bool wgmma_fenced = false;

  bool runnable() const { return !finished && (!waits_on || *waits_on != waits_for); }
};

// Where the threads of a warp or warpgroup leave arguments and find results. Two sets of slots: nobody can be two
// meetings ahead of a thread that has not read its result yet.
template <unsigned members>
struct Meeting {
  struct Slots {
    alignas(16) unsigned char in[members][48];
    alignas(16) unsigned char out[members][48];
  } slots[2];
  const char* name = "";
  unsigned arrived = 0;
  uint64_t generation = 0;
};

struct Mbarrier {
  int expected = 0;
  int pending = 0;
  int64_t bytes = 0;
  uint64_t phase = 0;
};

struct BulkCopy {
  std::function<void()> land;
};

struct Block {
  Region shared;
  std::vector<Thread> threads;
  std::vector<Meeting<kLanes>> warps;
  std::vector<Meeting<kLanes * kWarpsPerGroup>> groups;
  unsigned at_barrier = 0;
  uint64_t barrier_generation = 0;
  std::unordered_map<const void*, Mbarrier> mbarriers;
  std::vector<BulkCopy> bulk_copies;
};

inline Block* block;
inline Thread* current;
inline jmp_buf scheduler;
inline sigjmp_buf escape;
inline std::function<void()> body;
inline std::mt19937_64 draw;
inline bool preempted;  // the running warp gave up its turn

// Ends the launch. Leaves whatever fiber it is called on.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
  char text[384];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  if (current)
    snprintf(fault, sizeof fault, "block %u thread %u: %s", blockIdx.x, current->number, text);
  else
    snprintf(fault, sizeof fault, "%s", text);
  siglongjmp(escape, 1);
}

inline void on_signal(int number, siginfo_t* info, void*) {
  if (number == SIGALRM) fail("still running after %u s", kTimeLimitSeconds);
  if (number == SIGSEGV || number == SIGBUS) {
    const char* at = static_cast<const char*>(info->si_addr);
    const Region& shared = block->shared;
    const bool near = at >= shared.pages - page_size() && at < shared.pages + shared.page_bytes + page_size();
    fail("%s memory: access outside it, or a write to an input, at %p", near ? "shared" : "global", info->si_addr);
  }
  fail("index out of an array's bounds (signal %d)", number);  // -fsanitize=bounds traps
}

// --- switching

inline void yield() {
  if (_setjmp(current->context) == 0) _longjmp(scheduler, 1);
}

inline void wait(const uint64_t* word, uint64_t value, const char* at) {
  current->waits_on = word;
  current->waits_for = value;
  current->waits_at = at;
  while (*word == value) yield();
  current->waits_on = nullptr;
}

inline void thread_main() {
  body();
  if (!current->accumulating.empty()) fail("a thread ended with wgmma instructions under way");
  if (!current->open_copies.empty() || !current->copy_groups.empty()) {
    for (const auto& group : current->copy_groups)
      if (!group.empty()) fail("a thread ended with cp.async copies under way");
  }
  current->finished = true;
  yield();
}

inline void start(Thread& t) {
  static thread_local ucontext_t origin, fresh;
  getcontext(&fresh);
  fresh.uc_stack.ss_sp = t.stack.begin;
  fresh.uc_stack.ss_size = t.stack.bytes;
  fresh.uc_link = nullptr;
  makecontext(&fresh, reinterpret_cast<void (*)()>(+[] {
                if (_setjmp(current->context) == 0) swapcontext(&fresh, &origin);
                thread_main();
              }),
              0);
  current = &t;
  swapcontext(&origin, &fresh);
  current = nullptr;
}

inline void resume(Thread& t) {
  current = &t;
  if (_setjmp(scheduler) == 0) _longjmp(t.context, 1);
  current = nullptr;
}

// --- meetings

inline unsigned lane() { return current->number % kLanes; }

// Every thread of the warp or warpgroup leaves `in`; the last one runs compute(in, out) for all of them.
template <class Out, unsigned members, class In, class Compute>
Out meet(Meeting<members>& meeting, const char* name, const In& in, const Compute& compute) {
  static_assert(sizeof(In) <= 48 && sizeof(Out) <= 48);
  const unsigned member = current->number % members;
  auto& slots = meeting.slots[meeting.generation % 2];
  if (meeting.arrived == 0) meeting.name = name;
  if (std::strcmp(meeting.name, name) != 0) fail("threads diverged: %s meets %s", name, meeting.name);
  auto* ins = reinterpret_cast<In*>(slots.in);
  auto* outs = reinterpret_cast<Out*>(slots.out);
  std::memcpy(static_cast<void*>(ins + member), &in, sizeof in);
  if (++meeting.arrived == members) {
    compute(ins, outs);
    meeting.arrived = 0;
    ++meeting.generation;
  } else {
    wait(&meeting.generation, meeting.generation, name);
  }
  return outs[member];
}

inline Meeting<kLanes>& warp() { return block->warps[current->number / kLanes]; }

inline Meeting<kLanes * kWarpsPerGroup>& warpgroup() {
  if (block->groups.size() * kLanes * kWarpsPerGroup != block->threads.size()) fail("the block is no whole warpgroups");
  return block->groups[current->number / (kLanes * kWarpsPerGroup)];
}

inline void sync_block() {
  if (++block->at_barrier == block->threads.size()) {
    block->at_barrier = 0;
    ++block->barrier_generation;
  } else {
    wait(&block->barrier_generation, block->barrier_generation, "__syncthreads");
  }
}

// --- scheduling

inline bool chance(unsigned one_in) { return draw() % one_in == 0; }

inline void land_bulk_copy(std::size_t which) {
  BulkCopy copy = std::move(block->bulk_copies[which]);
  block->bulk_copies.erase(block->bulk_copies.begin() + static_cast<std::ptrdiff_t>(which));
  copy.land();
}

// Now and then lets other warps go first, at points where that is most telling.
inline void maybe_preempt() {
  if (!chance(4)) return;
  preempted = true;
  yield();
}

// Lets a warp run through up to `turns` of its waits; whether any lane ran.
inline bool run_warp(unsigned warp, unsigned turns) {
  preempted = false;
  const std::size_t first = warp * kLanes, last = std::min<std::size_t>(first + kLanes, block->threads.size());
  bool ran = false;
  for (bool again = true; again && !preempted && turns > 0; --turns) {
    again = false;
    for (std::size_t i = first; i < last; ++i) {
      if (!block->threads[i].runnable()) continue;
      resume(block->threads[i]);
      again = ran = true;
      if (preempted) break;
    }
  }
  return ran;
}

inline void report_deadlock() {
  for (const Thread& t : block->threads)
    if (!t.finished)
      fail("deadlock: block %u, thread %u waits for ever at %s", blockIdx.x, t.number, t.waits_at);
}

inline void run_block() {
  std::vector<unsigned> order((block->threads.size() + kLanes - 1) / kLanes);
  std::iota(order.begin(), order.end(), 0u);
  const auto finished = [](const Thread& t) { return t.finished; };
  while (!std::all_of(block->threads.begin(), block->threads.end(), finished)) {
    std::shuffle(order.begin(), order.end(), draw);
    bool ran = false;
    for (const unsigned warp : order)
      if (!chance(4)) ran |= run_warp(warp, 1u << draw() % 8);
    if (!block->bulk_copies.empty() && (!ran || chance(3))) {
      land_bulk_copy(draw() % block->bulk_copies.size());
      ran = true;
    }
    if (ran) continue;
    for (const unsigned warp : order) ran |= run_warp(warp, 1);
    if (!ran) report_deadlock();
  }
  if (!block->bulk_copies.empty()) fail("block %u ended with TMA copies under way", blockIdx.x);
  if (!slack_is_untouched(block->shared)) fail("block %u wrote past the end of its shared memory", blockIdx.x);
}

inline void reset_block(unsigned number) {
  Block& b = *block;
  blockIdx = dim3(number);
  b.at_barrier = 0;
  b.mbarriers.clear();
  b.bulk_copies.clear();
  for (auto& w : b.warps) w.arrived = 0;
  for (auto& g : b.groups) g.arrived = 0;
  poison(b.shared.pages, b.shared.page_bytes);
  for (Thread& t : b.threads) {
    t.finished = false;
    t.waits_on = nullptr;
    t.open_copies.clear();
    t.copy_groups.clear();
    t.accumulating.clear();
    t.operands.clear();
    t.wgmma_groups = 0;
    t.wgmma_fenced = false;
    start(t);
  }
}

inline Block make_block(dim3 size, std::size_t shared_bytes) {
  Block b;
  b.shared = map_region(shared_bytes, 1024);
  b.threads = std::vector<Thread>(size.x);
  b.warps.resize((size.x + kLanes - 1) / kLanes);
  b.groups.resize(size.x / (kLanes * kWarpsPerGroup));
  for (unsigned i = 0; i < size.x; ++i) {
    b.threads[i].number = i;
    b.threads[i].index = dim3(i);
    b.threads[i].stack = map_region(kStackBytes, 64);
  }
  return b;
}

// Catches stray accesses, trapped index checks and endless loops while a launch runs.
class SignalGuard {
 public:
  SignalGuard() {
    static char alternate[64 << 10];
    stack_t stack{};
    stack.ss_sp = alternate;
    stack.ss_size = sizeof alternate;
    sigaltstack(&stack, &old_stack_);
    struct sigaction action{};
    action.sa_sigaction = on_signal;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < kSignals; ++i) sigaction(numbers_[i], &action, &old_[i]);
    alarm(kTimeLimitSeconds);
  }
  ~SignalGuard() {
    alarm(0);
    for (int i = 0; i < kSignals; ++i) sigaction(numbers_[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  static constexpr int kSignals = 5;
  static constexpr int numbers_[kSignals] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGALRM};
  struct sigaction old_[kSignals];
  stack_t old_stack_;
};

// Runs a grid; whether it went well. Otherwise `fault` says what happened.
inline bool run_grid(dim3 grid, dim3 size, std::size_t shared_bytes, std::function<void()> kernel) {
  Block b = make_block(size, shared_bytes);
  gridDim = grid;
  blockDim = size;
  block = &b;
  body = std::move(kernel);
  draw.seed(seed);
  std::vector<unsigned> order(grid.x);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), draw);
  volatile bool ok = false;
  {
    SignalGuard guard;
    if (sigsetjmp(escape, 1) == 0) {
      for (const unsigned number : order) {
        reset_block(number);
        run_block();
      }
      ok = true;
    }
  }
  current = nullptr;
  block = nullptr;
  for (const Thread& t : b.threads) unmap_region(t.stack);
  unmap_region(b.shared);
  return ok;
}

}  // namespace emulator
