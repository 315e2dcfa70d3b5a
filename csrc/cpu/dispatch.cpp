#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace comppo::cpu {

// The kernels of one instruction set, compiled from the same sources.
#define COMPPO_DECLARE(isa)                                 \
  namespace isa {                                           \
  void attention_statistics(const AttentionStatistics& op); \
  void pool_history(const PoolHistory& op);                 \
  void pool_history_backward(const PoolHistoryBackward& op); \
  void comp_gae(const CompGae& op);                         \
  }
#define COMPPO_TABLE(isa) \
  Kernels { #isa, isa::attention_statistics, isa::pool_history, isa::pool_history_backward, isa::comp_gae }

COMPPO_DECLARE(portable)
#ifdef COMPPO_X86
COMPPO_DECLARE(avx2)
COMPPO_DECLARE(avx512)
#endif

namespace {

struct Kernels {
  const char* name;
  void (*attention_statistics)(const AttentionStatistics&);
  void (*pool_history)(const PoolHistory&);
  void (*pool_history_backward)(const PoolHistoryBackward&);
  void (*comp_gae)(const CompGae&);
};

Kernels choose() {
  const char* wanted = std::getenv("COMPPO_CPU_ISA");
  const auto allowed = [wanted](const char* name) { return !wanted || !std::strcmp(wanted, name); };
#ifdef COMPPO_X86
  const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool has_avx512 = has_avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                          __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
  if (has_avx512 && allowed("avx512")) return COMPPO_TABLE(avx512);
  if (has_avx2 && allowed("avx2")) return COMPPO_TABLE(avx2);
#endif
  if (allowed("portable")) return COMPPO_TABLE(portable);
  throw std::runtime_error("COMPPO_CPU_ISA is '" + std::string(wanted) +
                           "', not an instruction set that this machine and this build have");
}

const Kernels& kernels() {
  static const Kernels chosen = choose();
  return chosen;
}

}  // namespace

void attention_statistics(const AttentionStatistics& op) { kernels().attention_statistics(op); }
void pool_history(const PoolHistory& op) { kernels().pool_history(op); }
void pool_history_backward(const PoolHistoryBackward& op) { kernels().pool_history_backward(op); }
void comp_gae(const CompGae& op) { kernels().comp_gae(op); }
const char* instruction_set() { return kernels().name; }

}  // namespace comppo::cpu
