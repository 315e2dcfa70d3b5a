// The CPU kernels, in the best instruction set of this machine (or the one named in COMPPO_CPU_ISA).
#pragma once

#include "comppo/attention_statistics.h"
#include "comppo/comp_gae.h"
#include "comppo/pool_history.h"

namespace comppo::cpu {

void attention_statistics(const AttentionStatistics& op);
void pool_history(const PoolHistory& op);
void pool_history_backward(const PoolHistoryBackward& op);
void comp_gae(const CompGae& op);

const char* instruction_set();  // "avx512", "avx2" or "portable"

}  // namespace comppo::cpu
