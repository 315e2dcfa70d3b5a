// Vectors of the instruction set this file is compiled for (COMPPO_ISA, COMPPO_VECTOR_BYTES), by the compiler's
// vector extension: the same source serves AVX-512, AVX2, SSE2 and other machines.
//
// Everything here lives in a namespace of the instruction set. Templates of the standard library that are not
// inlined must be given a type from it as well, or the linker may keep one instruction set's copy for all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <utility>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace comppo::cpu::COMPPO_ISA {

template <class T>
struct VectorOf {
  typedef T type __attribute__((vector_size(COMPPO_VECTOR_BYTES)));
};
template <class T>
using Vec = typename VectorOf<T>::type;
template <class T>
constexpr int kLanes = COMPPO_VECTOR_BYTES / sizeof(T);

template <class T>
inline Vec<T> load(const T* p) {
  Vec<T> v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

template <class T>
inline void store(T* p, Vec<T> v) {
  std::memcpy(p, &v, sizeof v);
}

template <class T>
inline Vec<T> splat(T x) {
  return x - Vec<T>{};
}

// 0, 1, 2 …
inline Vec<int32_t> lane_numbers() {
  Vec<int32_t> v;
  for (int i = 0; i < kLanes<int32_t>; ++i) v[i] = i;
  return v;
}

template <int kShift, class V, std::size_t... kLane>
inline V rotate(V v, std::index_sequence<kLane...>) {
  return __builtin_shufflevector(v, v, ((kLane + kShift) % sizeof...(kLane))...);
}

// Folds the lanes in a fixed order, halves onto each other.
template <class V, class F, int kWidth = sizeof(V) / sizeof(V{}[0]) / 2>
inline auto fold_lanes(V v, F combine) {
  if constexpr (kWidth == 0)
    return v[0];
  else
    return fold_lanes<V, F, kWidth / 2>(
        combine(v, rotate<kWidth>(v, std::make_index_sequence<sizeof(V) / sizeof(V{}[0])>())), combine);
}

template <class V>
inline auto sum_lanes(V v) {
  return fold_lanes(v, [](V a, V b) { return a + b; });
}

template <class V>
inline auto max_lanes(V v) {
  return fold_lanes(v, [](V a, V b) { return a > b ? a : b; });
}

// Bit i: a comparison holds in lane i.
inline uint32_t lane_bits(Vec<int32_t> mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask);
#elif defined(__AVX2__)
  return uint32_t(_mm256_movemask_ps((__m256)mask));
#else
  uint32_t bits = 0;
  for (int i = 0; i < kLanes<int32_t>; ++i) bits |= uint32_t(mask[i] & 1) << i;
  return bits;
#endif
}

// a > b ? a : b, that is b where either is NaN; and its mirror image.
inline Vec<float> greater_of(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_max_ps((__m256)a, (__m256)b);
#else
  return a > b ? a : b;
#endif
}
inline Vec<float> lesser_of(Vec<float> a, Vec<float> b) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(__AVX2__)
  return (Vec<float>)_mm256_min_ps((__m256)a, (__m256)b);
#else
  return a < b ? a : b;
#endif
}

// x · 2^n for a whole n from −126 to 128, held as the bits of n + kRound.
constexpr float kRound = 12582912.0f;  // 1.5 · 2^23: adding it rounds to a whole number, in the lowest bits
inline Vec<float> scale_by_power_of_two(Vec<float> x, Vec<float> n_plus_round) {
#if defined(__AVX512F__)
  return (Vec<float>)_mm512_scalef_ps((__m512)x, (__m512)(n_plus_round - kRound));
#else
  const Vec<int32_t> n = (Vec<int32_t>)n_plus_round - (int32_t)0x4B400000, half = n >> 1;  // no float is 2^128
  return x * (Vec<float>)((half + 127) << 23) * (Vec<float>)((n - half + 127) << 23);
#endif
}

// e^x to about 1 ulp; inf from x = 88.73 on, 0 where a float would be subnormal (x < −87.33: arithmetic on such numbers
// is a hundred times slower). NaN stays NaN.
//
// e^x = 2^n e^r with n = round(x / ln 2), |r| ≤ ln 2 / 2, and the polynomial of Cephes' expf for e^r.
inline Vec<float> exp(Vec<float> exponent) {
  constexpr float kLog2e = 1.44269504088896341f;
  constexpr float kLn2High = 0.693359375f, kLn2Low = -2.12194440e-4f;  // n · kLn2High is exact
  constexpr float kLeast = -87.33f, kMost = 89.0f;
  const Vec<float> x = lesser_of(splat(kMost), greater_of(splat(kLeast), exponent));
  const Vec<float> n_plus_round = x * kLog2e + kRound;
  const Vec<float> n = n_plus_round - kRound;
  const Vec<float> r = (x - n * kLn2High) - n * kLn2Low;
  Vec<float> p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * (r * r) + r + 1.0f;
  return exponent < kLeast ? Vec<float>{} : scale_by_power_of_two(p, n_plus_round);
}

// Uninitialised, aligned to the largest vector.
template <class T>
class Buffer {
 public:
  explicit Buffer(std::size_t count)
      : data_(static_cast<T*>(::operator new(count * sizeof(T), std::align_val_t(64)))) {}
  ~Buffer() { ::operator delete(data_, std::align_val_t(64)); }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;
  T* data() const { return data_; }
  T& operator[](std::size_t i) const { return data_[i]; }

 private:
  T* data_;
};

}  // namespace comppo::cpu::COMPPO_ISA
