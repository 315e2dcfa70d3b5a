// What the Python side of the emulator calls. Linked with one .cu file at a time, so not every op is always there.
#include <map>

#include "comppo/cuda.h"
#include "simt.hpp"

namespace {

std::map<void*, emulator::Region> regions;

}  // namespace

extern "C" {

void emulator_configure(uint64_t seed, int compute_capability, int shared_limit) {
  emulator::seed = seed;
  emulator::compute_capability = compute_capability;
  emulator::shared_limit = shared_limit;
}

// Poisoned memory between guard pages; its end is at the upper one, short of the alignment.
void* emulator_allocate(uint64_t bytes, uint64_t alignment) {
  const emulator::Region r = emulator::map_region(bytes, alignment);
  emulator::poison(r.pages, r.page_bytes);
  regions[r.begin] = r;
  return r.begin;
}

void emulator_make_read_only(void* memory) {
  const emulator::Region& r = regions.at(memory);
  mprotect(r.pages, r.page_bytes, PROT_READ);
}

// Frees the memory; whether nothing was written beside it.
bool emulator_release(void* memory) {
  const emulator::Region r = regions.at(memory);
  const bool untouched = emulator::slack_is_untouched(r);
  emulator::unmap_region(r);
  regions.erase(memory);
  return untouched;
}

uint64_t size_of_attention_statistics() { return sizeof(comppo::AttentionStatistics); }
uint64_t size_of_pool_history_backward() { return sizeof(comppo::PoolHistoryBackward); }
uint64_t size_of_comp_gae() { return sizeof(comppo::CompGae); }

uint64_t attention_statistics_workspace(const comppo::AttentionStatistics& op) {
  return comppo::cuda::attention_statistics_workspace(op);
}
const char* attention_statistics(const comppo::AttentionStatistics& op) {
  return comppo::cuda::attention_statistics(op, nullptr);
}
const char* pool_history(const comppo::PoolHistory& op) { return comppo::cuda::pool_history(op, nullptr); }
uint64_t pool_history_backward_workspace(const comppo::PoolHistoryBackward& op) {
  return comppo::cuda::pool_history_backward_workspace(op);
}
const char* pool_history_backward(const comppo::PoolHistoryBackward& op) {
  return comppo::cuda::pool_history_backward(op, nullptr);
}
const char* comp_gae(const comppo::CompGae& op) { return comppo::cuda::comp_gae(op, nullptr); }

}  // extern "C"
