// Vectors of floats, and bfloat16, for the kernels of cpu.cpp.
//
//   bfloat16   sEEEEEEEEmmmmmmm                   the upper half of a float32
//   widen      bits << 16                         narrow: to the nearest, ties to even

#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using Bf16 = uint16_t;

#if defined(__AVX512F__)
constexpr int kLanes = 16, kMaxGroup = 4;
#elif defined(__AVX2__)
constexpr int kLanes = 8, kMaxGroup = 3;
#else
constexpr int kLanes = 4, kMaxGroup = 4;
#endif
// kMaxGroup: queries of one KV head whose sums against 4 keys fit into the vector registers together.
constexpr int kMaxKeys = 8;          // scored together
constexpr int64_t kTileKeys = 256;   // keys whose scores are in the cache together
constexpr int64_t kPrefetch = 16;    // keys ahead
constexpr int64_t kRowsAtOnce = 32;  // that a thread takes in row-wise kernels

float widen(Bf16 value) {
  const uint32_t bits = uint32_t(value) << 16;
  float wide;
  std::memcpy(&wide, &bits, 4);
  return wide;
}

Bf16 narrow(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  return Bf16((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

template <class Row> void for_each_row(int64_t num_rows, int num_threads, int64_t rows_at_once, Row row) {
  if (num_threads == 1) {
    for (int64_t i = 0; i < num_rows; ++i) row(i);
    return;
  }
#pragma omp parallel for schedule(dynamic, rows_at_once) num_threads(num_threads)
  for (int64_t i = 0; i < num_rows; ++i) row(i);
}

// ---- vectors of L floats -------------------------------------------------------------------------------------------

template <int L> struct Vectors {
  typedef float Floats __attribute__((vector_size(4 * L)));
  typedef int32_t Ints __attribute__((vector_size(4 * L)));
  typedef uint32_t Words __attribute__((vector_size(4 * L)));
  typedef uint64_t Doublewords __attribute__((vector_size(8 * L)));
  typedef Bf16 Halves __attribute__((vector_size(2 * L)));
};
template <int L> using Floats = typename Vectors<L>::Floats;
template <int L> using Ints = typename Vectors<L>::Ints;
template <int L> using Words = typename Vectors<L>::Words;
template <int L> using Doublewords = typename Vectors<L>::Doublewords;

template <class Vector> Vector load(const void *address) {
  Vector vector;
  std::memcpy(&vector, address, sizeof vector);
  return vector;
}

template <class Vector> void store(void *address, Vector vector) { std::memcpy(address, &vector, sizeof vector); }

// L floats from or to adjacent elements of a tensor
template <int L> Floats<L> load_floats(const float *from) { return load<Floats<L>>(from); }
template <int L> Floats<L> load_floats(const Bf16 *from) {
  const auto halves = load<typename Vectors<L>::Halves>(from);
  return (Floats<L>)(__builtin_convertvector(halves, Words<L>) << 16);
}
template <int L> void store_floats(float *to, Floats<L> floats) { store(to, floats); }
template <int L> void store_floats(Bf16 *to, Floats<L> floats) {
  for (int lane = 0; lane < L; ++lane) to[lane] = narrow(floats[lane]);
}
float to_float(float value) { return value; }
float to_float(Bf16 value) { return widen(value); }

template <int L> Floats<L> larger(Floats<L> a, Floats<L> b) { return a > b ? a : b; }
template <int L> Floats<L> smaller(Floats<L> a, Floats<L> b) { return a < b ? a : b; }

// The nearest integers, ties to even.
template <int L> Ints<L> nearest(Floats<L> floats) {
#if defined(__AVX512F__)
  if constexpr (L == 16) return (Ints<L>)_mm512_cvtps_epi32((__m512)floats);
#elif defined(__AVX2__)
  if constexpr (L == 8) return (Ints<L>)_mm256_cvtps_epi32((__m256)floats);
#endif
  for (int lane = 0; lane < L; ++lane) floats[lane] = std::nearbyint(floats[lane]);
  return __builtin_convertvector(floats, Ints<L>);
}

// A word holds two neighbours of a head, [odd element | even element]: one vector of words is two vectors of floats.
template <int L> Floats<L> even(Words<L> words) { return (Floats<L>)(words << 16); }
template <int L> Floats<L> odd(Words<L> words) { return (Floats<L>)(words & 0xFFFF0000u); }
template <int L> Words<L> narrow_pairs(Floats<L> even, Floats<L> odd) {
  const Words<L> low = (Words<L>)even, high = (Words<L>)odd;
  return ((low + 0x7FFF + ((low >> 16) & 1)) >> 16) | ((high + 0x7FFF + ((high >> 16) & 1)) & 0xFFFF0000u);
}

// L floats -> 4: adds the upper half to the lower until 4 are left.
template <int L> Floats<4> fold(Floats<L> vector) {
  if constexpr (L == 4) {
    return vector;
  } else {
    const auto half = [&]<int... I>(std::integer_sequence<int, I...>) {
      return __builtin_shufflevector(vector, vector, I...) + __builtin_shufflevector(vector, vector, (I + L / 2)...);
    };
    return fold<L / 2>(half(std::make_integer_sequence<int, L / 2>{}));
  }
}

Floats<4> add_neighbours(Floats<4> a, Floats<4> b) {
  return __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
}

template <int L> float sum(Floats<L> vector) {
  const Floats<4> quarter = fold<L>(vector);
  return (quarter[0] + quarter[1]) + (quarter[2] + quarter[3]);
}

float sum_of_squares(const Bf16 *x, int64_t size) {
  constexpr int L = kLanes;
  Floats<L> totals[4] = {};
  int64_t i = 0;
  for (; i + 4 * L <= size; i += 4 * L) {
    for (int part = 0; part < 2; ++part) {
      const auto words = load<Words<L>>(x + i + part * 2 * L);
      totals[2 * part] += even<L>(words) * even<L>(words);
      totals[2 * part + 1] += odd<L>(words) * odd<L>(words);
    }
  }
  float total = sum<L>((totals[0] + totals[1]) + (totals[2] + totals[3]));
  for (; i < size; ++i) total += widen(x[i]) * widen(x[i]);
  return total;
}

}  // namespace
