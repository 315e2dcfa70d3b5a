#include "parallel.h"

#include <torch/csrc/stable/ops.h>

#include <algorithm>

namespace comppo::cpu {

void run_workers(int64_t num_units, Worker worker, void* context) {
  if (num_units <= 0) return;
  Units units(num_units);
  const int64_t num_workers = std::min<int64_t>(num_units, torch::stable::get_num_threads());
  torch::stable::parallel_for(0, num_workers, 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) worker(units, context);
  });
}

}  // namespace comppo::cpu
