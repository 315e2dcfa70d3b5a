// Work shared out to torch's threads. Which thread takes a unit is left open, so a unit must write only its own results.
#pragma once

#include <atomic>
#include <cstdint>

namespace comppo::cpu {

// The units not taken yet, shared by all workers.
class Units {
 public:
  explicit Units(int64_t count) : count_(count) {}
  // True, and the unit's number, while there are any; in ascending order.
  bool take(int64_t& unit) { return (unit = next_.fetch_add(1, std::memory_order_relaxed)) < count_; }

 private:
  std::atomic<int64_t> next_{0};
  int64_t count_;
};

using Worker = void (*)(Units& units, void* context);

// Calls worker once per thread that has something to do, and waits.
void run_workers(int64_t num_units, Worker worker, void* context);

// worker(Units&) allocates its scratch once and then takes units until none is left.
template <class F>
void parallel(int64_t num_units, F worker) {
  run_workers(num_units, [](Units& units, void* context) { (*static_cast<F*>(context))(units); }, &worker);
}

}  // namespace comppo::cpu
