// Op C on the CPU: the recursion as it stands, one response a unit.
#include "comppo/comp_gae.h"

#include <algorithm>

#include "parallel.h"
#include "simd.h"

namespace comppo::cpu::COMPPO_ISA {
namespace {

template <class T>
class Transport {
 public:
  explicit Transport(const CompGae& op)
      : op_(op), rewards_(static_cast<const T*>(op.rewards)), values_(static_cast<const T*>(op.values)),
        kappa_(static_cast<const T*>(op.kappa)), bootstrap_(static_cast<const T*>(op.bootstrap_values)),
        delta_(static_cast<T*>(op.delta)), advantage_(static_cast<T*>(op.advantage)),
        lambda_return_(static_cast<T*>(op.lambda_return)), lam_(static_cast<T>(op.lam)) {}

  void run(int64_t response) const {
    const int64_t begin = op_.cu_seqlens[response], end = op_.cu_seqlens[response + 1];
    const int64_t first_valid = std::find(op_.mask + begin, op_.mask + end, true) - op_.mask;
    const bool compact = op_.gaps == Gaps::kCompact;
    T next_value = bootstrap_ ? bootstrap_[response] : T(0), next_advantage = 0;
    T moved = 0;  // rewards of the gaps after t, on their way to t
    for (int64_t t = end; t-- > first_valid;) {
      if (op_.mask[t]) {
        const T reward = rewards_[t] + moved + (compact && t == first_valid ? sum_rewards(begin, t) : T(0));
        step(t, reward, next_value, next_advantage);
        moved = 0;
      } else {
        clear(t);
        if (compact) moved += rewards_[t];
        if (!compact) next_value = next_advantage = 0;
      }
    }
    for (int64_t t = begin; t < first_valid; ++t) clear(t);
  }

 private:
  void step(int64_t t, T reward, T& next_value, T& next_advantage) const {
    const T value = values_[t], kappa = kappa_[t];
    const T delta = reward + kappa * next_value - value;
    next_advantage = delta + lam_ * kappa * next_advantage;
    next_value = value;
    delta_[t] = delta;
    advantage_[t] = next_advantage;
    lambda_return_[t] = next_advantage + value;
  }

  void clear(int64_t t) const { delta_[t] = advantage_[t] = lambda_return_[t] = 0; }

  T sum_rewards(int64_t begin, int64_t end) const {
    T total = 0;
    for (int64_t t = begin; t < end; ++t) total += rewards_[t];
    return total;
  }

  const CompGae& op_;
  const T *rewards_, *values_, *kappa_, *bootstrap_;
  T *delta_, *advantage_, *lambda_return_;
  const T lam_;
};

template <class T>
void run(const CompGae& op) {
  const Transport<T> transport(op);
  parallel(op.num_responses, [&](Units& units) {
    for (int64_t response; units.take(response);) transport.run(response);
  });
}

}  // namespace

void comp_gae(const CompGae& op) { op.dtype == DType::kFloat64 ? run<double>(op) : run<float>(op); }

}  // namespace comppo::cpu::COMPPO_ISA
