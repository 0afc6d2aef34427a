// Kernels for a CPU.
//
// Between the matrix products of a decode step in bfloat16: RMS norm, rotary embedding, argmax, and attention over the
// pages of the KV cache. torch needs some 25 calls a layer for them; here each is one call, one loop.
//
// In float32: the products themselves, with weights of 32, 8 or 4 bits, and attention in tiles, also for chunks in bfloat16.
//
// worker/kernels/cpu.py compiles this file once per instruction set and loads it with ctypes. `#pragma omp` runs on the
// threads of torch's own libgomp: a second pool would fight with them for the cores.
//
//   bfloat16   sEEEEEEEEmmmmmmm                   the upper half of a float32
//   widen      bits << 16                         narrow: to the nearest, ties to even
//
// NaN must stay NaN: a broken model has to be noticed. So the build uses no unsafe math (g++ 12 folds a vector times zero
// to zero as soon as it may ignore the sign of zero).

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
  typedef Bf16 Halves __attribute__((vector_size(2 * L)));
};
template <int L> using Floats = typename Vectors<L>::Floats;
template <int L> using Ints = typename Vectors<L>::Ints;
template <int L> using Words = typename Vectors<L>::Words;

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

// A word holds two neighbours of a head, [odd element | even element]: one vector of words is two vectors of floats.
template <int L> Floats<L> even(Words<L> words) { return (Floats<L>)(words << 16); }
template <int L> Floats<L> odd(Words<L> words) { return (Floats<L>)(words & 0xFFFF0000u); }
template <int L> Words<L> narrow_pairs(Floats<L> even, Floats<L> odd) {
  const Words<L> low = (Words<L>)even, high = (Words<L>)odd;
  return ((low + 0x7FFF + ((low >> 16) & 1)) >> 16) | ((high + 0x7FFF + ((high >> 16) & 1)) & 0xFFFF0000u);
}

// L floats -> 4, the upper half added to the lower until then.
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

// ---- attention -----------------------------------------------------------------------------------------------------

struct Shape {  // of a model's attention and its pool
  int64_t num_kv_heads, group_size, head_dim, block_size;
  float scale;
};

struct Decodes {  // the rows of a step
  const int64_t *block_tables;  // (num_rows, table_width)
  const int64_t *bounds;        // (num_rows, 2): the first key that a row's query sees, and the end of its keys
  int64_t num_rows, table_width;
};

// Sets rows[i] to the position of key first + i in a pool, in elements. The last key stands for those beyond it.
void find_rows(const Shape &shape, const int64_t *block_table, int64_t first, int64_t stop, int64_t *rows,
               int64_t num_rows) {
  const int64_t stride = shape.num_kv_heads * shape.head_dim;
  int64_t block = first / shape.block_size, inside = first % shape.block_size;
  const int64_t count = std::min(num_rows, stop - first);
  for (int64_t i = 0; i < count; ++i) {
    rows[i] = (block_table[block] * shape.block_size + inside) * stride;
    if (++inside == shape.block_size) ++block, inside = 0;
  }
  std::fill(rows + count, rows + num_rows, rows[count - 1]);
}

// A query's scores[first..stop) -> 2 ** (score - highest), the others of `size` -> 0. Returns what the sums so far fade
// by, 2 ** (old highest - highest).
//
// The total is NaN when a score is not finite. It is summed in N vectors: the same N * kLanes round the same.
template <int N> float weigh(float *scores, int64_t first, int64_t stop, int64_t size, float &highest, float &total) {
  constexpr int W = kLanes;
  const int64_t padded = (size + N * W - 1) / (N * W) * (N * W);
  std::fill(scores, scores + first, -1e30f);
  std::fill(scores + stop, scores + padded, -1e30f);
  Floats<W> tops = load<Floats<W>>(scores);
  for (int64_t k = W; k < padded; k += W) tops = larger<W>(tops, load<Floats<W>>(scores + k));
  float top = highest;
  for (int lane = 0; lane < W; ++lane) top = std::max(top, tops[lane]);
  const float fading = std::exp2(highest - top);
  Floats<W> totals[N] = {}, check = {};
  for (int64_t k = 0; k < padded; k += N * W) {
    for (int n = 0; n < N; ++n) {
      const auto score = load<Floats<W>>(scores + k + n * W);
      check += score * 0.0f;
      // 2**x = 2**n * 2**f with n the nearest integer; 2**f by its series, exact to float32's last bit but one
      const Floats<W> x = larger<W>(score - top, Floats<W>{} - 126.0f);
      const Ints<W> exponent = __builtin_convertvector(x - 0.5f, Ints<W>);
      const Floats<W> f = x - __builtin_convertvector(exponent, Floats<W>);
      Floats<W> power = f * 1.5403530e-4f + 1.3333558e-3f;
      power = power * f + 9.6181291e-3f;
      power = power * f + 5.5504109e-2f;
      power = power * f + 2.4022651e-1f;
      power = power * f + 6.9314718e-1f;
      power = power * f + 1.0f;
      power *= (Floats<W>)((exponent + 127) << 23);
      totals[n] += power;
      store(scores + k + n * W, power);
    }
  }
  std::fill(scores, scores + first, 0.0f);
  std::fill(scores + stop, scores + padded, 0.0f);
  for (int half = N / 2; half > 0; half /= 2) {
    for (int n = 0; n < half; ++n) totals[n] += totals[n + half];
  }
  highest = top;
  total = total * fading + sum<W>(totals[0]) + sum<W>(check);
  return fading;
}

// One KV head of one row: the queries that share it (its group) against all keys that they see.
//
//   tile     scores = queries . keys            sums *= 2 ** (old highest - highest)
//            sums += 2 ** (scores - highest) * values
//   end      sums / total, narrowed
//
// L words are one vector. The last vector of a head may overlap the one before it; what it repeats has a query of zero.
template <int L> class Head {
 public:
  explicit Head(const Shape &shape)
      : shape_(shape), half_(shape.head_dim / 2), num_vectors_((half_ + L - 1) / L),
        scratch_(new (std::align_val_t(64)) float[size_t(shape.group_size) * (4 * num_vectors_ * L + kScores + 2)]) {
    queries_ = scratch_;
    sums_ = queries_ + shape.group_size * 2 * num_vectors_ * L;
    scores_ = sums_ + shape.group_size * 2 * num_vectors_ * L;
    highest_ = scores_ + shape.group_size * kScores;
    totals_ = highest_ + shape.group_size;
  }
  ~Head() { ::operator delete[](scratch_, std::align_val_t(64)); }
  Head(const Head &) = delete;
  Head &operator=(const Head &) = delete;

  // query and out (group_size, head_dim); keys and values: this head in block 0 of the pools.
  void attend(const Bf16 *query, const Bf16 *keys, const Bf16 *values, const int64_t *block_table, int64_t start,
              int64_t stop, Bf16 *out) {
    load_queries(query);
    for (int64_t first = start; first < stop; first += kTileKeys) {
      const int64_t num_keys = std::min(kTileKeys, stop - first);
      find_rows(shape_, block_table, first, stop, rows_, kTileKeys + kPrefetch + kMaxKeys);
      for_each_part([&]<int G>(int64_t part) { dot_keys<G>(part, keys, num_keys); });
      for (int64_t g = 0; g < shape_.group_size; ++g) weigh_scores(g, num_keys);
      for_each_part([&]<int G>(int64_t part) { add_values<G>(part, values, num_keys); });
    }
    store_out(out);
  }

 private:
  static constexpr int64_t kScores = kTileKeys + 16;  // of one query, with room for a vector's rest

  int64_t offset(int64_t vector) const { return std::min(vector * L, half_ - L); }  // in words
  float *at(float *buffer, int64_t g, int64_t vector) const { return buffer + (g * num_vectors_ + vector) * 2 * L; }

  // Calls part<G>(first) for parts of the group, of at most kMaxGroup queries and nearly equal size.
  template <class Part> void for_each_part(Part part) {
    const int64_t size = shape_.group_size, num_parts = (size + kMaxGroup - 1) / kMaxGroup;
    for (int64_t i = 0; i < num_parts; ++i) {
      const int64_t first = size * i / num_parts;
      switch (size * (i + 1) / num_parts - first) {
        case 1: part.template operator()<1>(first); break;
        case 2: part.template operator()<2>(first); break;
        case 3: part.template operator()<3>(first); break;
        default: part.template operator()<4>(first); break;
      }
    }
  }

  void load_queries(const Bf16 *query) {
    const float factor = shape_.scale * 1.4426950408889634f;  // for powers of 2 instead of e
    for (int64_t g = 0; g < shape_.group_size; ++g) {
      for (int64_t v = 0; v < num_vectors_; ++v) {
        const auto words = load<Words<L>>(query + g * shape_.head_dim + 2 * offset(v));
        Floats<L> first = even<L>(words) * factor, second = odd<L>(words) * factor;
        for (int64_t lane = 0; lane < v * L - offset(v); ++lane) first[lane] = second[lane] = 0;
        store(at(queries_, g, v), first);
        store(at(queries_, g, v) + L, second);
        store(at(sums_, g, v), Floats<L>{});
        store(at(sums_, g, v) + L, Floats<L>{});
      }
      highest_[g] = -INFINITY;
      totals_[g] = 0;
    }
  }

  // scores[g][k] = queries[g] . keys[k] for G queries from `first` on
  template <int G> void dot_keys(int64_t first, const Bf16 *keys, int64_t num_keys) {
    constexpr int K = G == 1 ? kMaxKeys : 4;
    for (int64_t key = 0; key < num_keys; key += K) {
      const int64_t *rows = rows_ + key;
      for (int k = 0; k < K; ++k) {
        for (int64_t element = 0; element < shape_.head_dim; element += 32) {  // one cache line
          __builtin_prefetch(keys + rows[k + kPrefetch] + element);
        }
      }
      Floats<L> totals[G][K] = {};
      for (int64_t v = 0; v < num_vectors_; ++v) {
        for (int k = 0; k < K; ++k) {
          const auto words = load<Words<L>>(keys + rows[k] + 2 * offset(v));
          for (int g = 0; g < G; ++g) {
            totals[g][k] += even<L>(words) * load<Floats<L>>(at(queries_, first + g, v));
            totals[g][k] += odd<L>(words) * load<Floats<L>>(at(queries_, first + g, v) + L);
          }
        }
      }
      for (int g = 0; g < G; ++g) {
        for (int k = 0; k < K; k += 4) {
          const auto *t = totals[g] + k;
          store(scores_ + (first + g) * kScores + key + k,
                add_neighbours(add_neighbours(fold<L>(t[0]), fold<L>(t[1])),
                               add_neighbours(fold<L>(t[2]), fold<L>(t[3]))));
        }
      }
    }
  }

  void weigh_scores(int64_t g, int64_t num_keys) {
    const float fading = weigh<1>(scores_ + g * kScores, 0, num_keys, num_keys, highest_[g], totals_[g]);
    for (int64_t v = 0; v < num_vectors_; ++v) {
      float *sums = at(sums_, g, v);
      store(sums, load<Floats<L>>(sums) * fading);
      store(sums + L, load<Floats<L>>(sums + L) * fading);
    }
  }

  // sums[g] += sum over k of scores[g][k] * values[k] for G queries from `first` on
  template <int G> void add_values(int64_t first, const Bf16 *values, int64_t num_keys) {
    int64_t v = 0;
    for (; v + 2 <= num_vectors_; v += 2) add_value_vectors<G, 2>(first, v, values, num_keys);
    if (v < num_vectors_) add_value_vectors<G, 1>(first, v, values, num_keys);
  }

  template <int G, int N> void add_value_vectors(int64_t first, int64_t v, const Bf16 *values, int64_t num_keys) {
    constexpr int K = G == 1 ? 2 : 1;  // sums of one query alone are too few to keep the units busy
    Floats<L> sums[K][G][N][2] = {};
    const float *weights = scores_ + first * kScores;
    for (int64_t key = 0; key < num_keys; key += K) {
      for (int k = 0; k < K; ++k) {
        for (int n = 0; n < N; ++n) {
          __builtin_prefetch(values + rows_[key + k + kPrefetch] + 2 * offset(v + n));
          const auto words = load<Words<L>>(values + rows_[key + k] + 2 * offset(v + n));
          for (int g = 0; g < G; ++g) {
            sums[k][g][n][0] += even<L>(words) * weights[g * kScores + key + k];
            sums[k][g][n][1] += odd<L>(words) * weights[g * kScores + key + k];
          }
        }
      }
    }
    for (int g = 0; g < G; ++g) {
      for (int n = 0; n < N; ++n) {
        for (int part = 0; part < 2; ++part) {
          float *sum = at(sums_, first + g, v + n) + part * L;
          for (int k = 0; k < K; ++k) store(sum, load<Floats<L>>(sum) + sums[k][g][n][part]);
        }
      }
    }
  }

  void store_out(Bf16 *out) {
    for (int64_t g = 0; g < shape_.group_size; ++g) {
      const float inverse = 1.0f / totals_[g];
      for (int64_t v = 0; v < num_vectors_; ++v) {
        const float *sums = at(sums_, g, v);
        const auto words = narrow_pairs<L>(load<Floats<L>>(sums) * inverse, load<Floats<L>>(sums + L) * inverse);
        store(out + g * shape_.head_dim + 2 * offset(v), words);
      }
    }
  }

  const Shape &shape_;
  const int64_t half_, num_vectors_;
  float *scratch_;
  float *queries_, *sums_;    // (group_size, num_vectors, [even, odd], L)
  float *scores_;             // (group_size, kScores)
  float *highest_, *totals_;  // (group_size,)
  int64_t rows_[kTileKeys + kPrefetch + kMaxKeys];
};

template <int L>
void attend_heads(const Shape &shape, const Decodes &decodes, const Bf16 *query, int64_t query_stride, const Bf16 *keys,
                  const Bf16 *values, Bf16 *out, int num_threads) {
  const int64_t num_heads = shape.num_kv_heads, group_elements = shape.group_size * shape.head_dim;
#pragma omp parallel num_threads(num_threads)
  {
    Head<L> head(shape);
#pragma omp for schedule(dynamic)
    for (int64_t item = 0; item < decodes.num_rows * num_heads; ++item) {
      const int64_t row = item / num_heads, kv_head = item % num_heads;
      head.attend(query + row * query_stride + kv_head * group_elements, keys + kv_head * shape.head_dim,
                  values + kv_head * shape.head_dim, decodes.block_tables + row * decodes.table_width,
                  decodes.bounds[2 * row], decodes.bounds[2 * row + 1], out + item * group_elements);
    }
  }
}

// ---- products in float32 -------------------------------------------------------------------------------------------
//
// A panel is kPanel outputs of a weight side by side, (num_inputs, kPanel): a tile of rows reads it once, in order. Each
// sum runs over the inputs in order, in one lane of one register: it depends on no other row, nor on the number of lanes.

#if defined(__AVX512F__)
constexpr int kTileRows = 12, kPanelVectors = 2;
#elif defined(__AVX2__)
constexpr int kTileRows = 6, kPanelVectors = 2;
#else
constexpr int kTileRows = 6, kPanelVectors = 4;
#endif
constexpr int kPanel = kPanelVectors * kLanes;
constexpr int64_t kInputsAtOnce = 1024;  // of a panel, that stay in the L1 or L2 cache for all tiles of rows
constexpr int64_t kInputsAhead = 48;     // of a panel, that are fetched early
constexpr int64_t kStatesAtOnce = 192;   // rows that stay in the L2 cache; a multiple of kTileRows

struct Product {
  const std::byte *panels;  // (ceil(num_outputs / kPanel), panel_bytes)
  const float *bias;        // (num_outputs,) or null
  int64_t num_inputs, num_outputs, panel_bytes;
  int64_t num_bits;  // of a weight: 32, 8 or 4
};

// A panel of quantised weights is groups of kGroup inputs. A thread dequantises some of them at a time, to the very
// floats of a dense weight.
//
//   8 bits   code -128..127   code * scale
//   4 bits   code 0..15       code * scale + minimum
//
// A word has the codes of consecutive inputs to one output, the first in its lowest bits.
constexpr int64_t kGroup = 32;
constexpr int64_t kGroupsAtOnce = 4;   // dequantised for many rows, and multiplied from the L1 cache
constexpr int64_t kBytesAhead = 1024;  // of each panel, that are fetched early for few rows

template <int Bits> struct Group;
template <> struct Group<8> {
  float scales[2][kPanel];  // of each half of the inputs
  uint32_t words[kGroup / 4][kPanel];
};
template <> struct Group<4> {
  float scales[1][kPanel], minima[kPanel];
  uint32_t words[kGroup / 8][kPanel];
};

// L outputs from `lane` on: calls use(i, weights) for each input i whose code is in this word of the group.
template <int Bits, class Use> void for_each_weight(const Group<Bits> &group, int word, int lane, Use use) {
  constexpr int L = kLanes, kCodes = 32 / Bits, kNumScales = std::extent_v<decltype(Group<Bits>::scales)>;
  const auto scale = load<Floats<L>>(group.scales[word * kCodes * kNumScales / kGroup] + lane);
  const auto words = load<Words<L>>(group.words[word] + lane);
  Floats<L> minimum = {};
  if constexpr (Bits == 4) minimum = load<Floats<L>>(group.minima + lane);
#pragma GCC unroll 8
  for (int code = 0; code < kCodes; ++code) {
    if constexpr (Bits == 8) {
      const auto codes = (Ints<L>)(words << (24 - 8 * code)) >> 24;
      use(word * kCodes + code, __builtin_convertvector(codes, Floats<L>) * scale);
    } else {
      const auto codes = (Ints<L>)(words >> (4 * code) & 15);
      use(word * kCodes + code, __builtin_convertvector(codes, Floats<L>) * scale + minimum);
    }
  }
}

template <int Bits> void fetch_ahead(const Group<Bits> &group, int64_t num_bytes) {
  const auto *ahead = reinterpret_cast<const std::byte *>(&group) + num_bytes;
  for (size_t i = 0; i < sizeof group; i += 64) __builtin_prefetch(ahead + i);
}

// groups -> panel (num_groups * kGroup, kPanel)
template <int Bits> void dequantise(const Group<Bits> *groups, int64_t num_groups, float *panel) {
  for (const auto *group = groups; group < groups + num_groups; ++group, panel += kGroup * kPanel) {
    fetch_ahead(*group, kGroupsAtOnce * sizeof *group);
    for (int lane = 0; lane < kPanel; lane += kLanes) {
      for (int word = 0; word < Bits; ++word) {  // of 32 bits, for 32 inputs
        for_each_weight<Bits>(*group, word, lane,
                              [=](int i, Floats<kLanes> weights) { store(panel + i * kPanel + lane, weights); });
      }
    }
  }
}

// sums (Panels, Rows, kPanel) += states (Rows, num_inputs) * Panels panels of groups. Several panels at once: a sum
// waits for the one before it, those of other panels do not.
template <int Bits, int Rows, int Panels>
void multiply_few(const void *panels, const float *states, int64_t num_inputs, float *sums) {
  constexpr int L = kLanes, V = kPanelVectors;
  const auto *groups = static_cast<const Group<Bits> *>(panels);
  const int64_t num_groups = num_inputs / kGroup;
  Floats<L> totals[Panels * V][Rows];
  const auto sum_of = [=](int vector, int row) { return sums + (vector / V * Rows + row) * kPanel + vector % V * L; };
  for (int vector = 0; vector < Panels * V; ++vector) {
    for (int row = 0; row < Rows; ++row) totals[vector][row] = load<Floats<L>>(sum_of(vector, row));
  }
  for (int64_t group = 0; group < num_groups; ++group) {
    for (int panel = 0; panel < Panels; ++panel) fetch_ahead(groups[panel * num_groups + group], kBytesAhead);
    for (int word = 0; word < Bits; ++word) {
#pragma GCC unroll 8
      for (int vector = 0; vector < Panels * V; ++vector) {
        for_each_weight<Bits>(groups[vector / V * num_groups + group], word, vector % V * L,
                              [&](int i, Floats<L> weights) {
                                const float *state = states + group * kGroup + i;
#pragma GCC unroll 4
                                for (int row = 0; row < Rows; ++row) {
                                  totals[vector][row] += state[row * num_inputs] * weights;
                                }
                              });
      }
    }
  }
  for (int vector = 0; vector < Panels * V; ++vector) {
    for (int row = 0; row < Rows; ++row) store(sum_of(vector, row), totals[vector][row]);
  }
}

// sums (Rows, kPanel) += states (Rows, num_inputs) * panel (num_inputs, kPanel); strides in elements
template <int Rows>
void multiply_tile(const float *states, int64_t state_stride, const float *panel, int64_t num_inputs, float *sums,
                   int64_t sum_stride) {
  constexpr int L = kLanes;
  Floats<L> totals[Rows][kPanelVectors];
  for (int row = 0; row < Rows; ++row) {
    for (int v = 0; v < kPanelVectors; ++v) totals[row][v] = load<Floats<L>>(sums + row * sum_stride + v * L);
  }
  for (int64_t i = 0; i < num_inputs; ++i) {
    Floats<L> weights[kPanelVectors];
    for (int v = 0; v < kPanel / 16; ++v) __builtin_prefetch(panel + (i + kInputsAhead) * kPanel + v * 16);
    for (int v = 0; v < kPanelVectors; ++v) weights[v] = load<Floats<L>>(panel + i * kPanel + v * L);
    for (int row = 0; row < Rows; ++row) {
      const float state = states[row * state_stride + i];
      for (int v = 0; v < kPanelVectors; ++v) totals[row][v] += state * weights[v];
    }
  }
  for (int row = 0; row < Rows; ++row) {
    for (int v = 0; v < kPanelVectors; ++v) store(sums + row * sum_stride + v * L, totals[row][v]);
  }
}

// The same for any number of rows, in tiles as even as possible: small ones keep the units less busy.
void multiply_rows(int64_t num_rows, const float *states, int64_t state_stride, const float *panel, int64_t num_inputs,
                   float *sums, int64_t sum_stride) {
  static constexpr auto tiles = []<int... I>(std::integer_sequence<int, I...>) {
    return std::array{multiply_tile<I + 1>...};
  }(std::make_integer_sequence<int, kTileRows>{});
  for (int64_t num_tiles = (num_rows + kTileRows - 1) / kTileRows; num_tiles > 0; --num_tiles) {
    const int64_t rows = (num_rows + num_tiles - 1) / num_tiles;
    tiles[rows - 1](states, state_stride, panel, num_inputs, sums, sum_stride);
    num_rows -= rows, states += rows * state_stride, sums += rows * sum_stride;
  }
}

// sums (num_rows, kPanel) += states (num_rows, num_inputs) * panel (num_inputs, kPanel)
void multiply_floats(const void *panel, const float *states, int64_t num_rows, int64_t num_inputs, float *sums) {
  const int64_t num_parts = num_rows <= kTileRows ? 1 : (num_inputs + kInputsAtOnce - 1) / kInputsAtOnce;
  for (int64_t part = 0; part < num_parts; ++part) {
    const int64_t i = num_inputs * part / num_parts, end = num_inputs * (part + 1) / num_parts;
    const float *weights = static_cast<const float *>(panel) + i * kPanel;
    multiply_rows(num_rows, states + i, num_inputs, weights, end - i, sums, kPanel);
  }
}

// The same for a panel of groups.
template <int Bits>
void multiply_groups(const void *panel, const float *states, int64_t num_rows, int64_t num_inputs, float *sums) {
  const auto *groups = static_cast<const Group<Bits> *>(panel);
  alignas(64) float weights[kGroupsAtOnce * kGroup * kPanel];
  for (int64_t first = 0; first < num_inputs / kGroup; first += kGroupsAtOnce) {
    const int64_t num_groups = std::min(kGroupsAtOnce, num_inputs / kGroup - first);
    dequantise<Bits>(groups + first, num_groups, weights);
    multiply_rows(num_rows, states + first * kGroup, num_inputs, weights, num_groups * kGroup, sums, kPanel);
  }
}

// Outputs of one panel for some rows, until they are whole. Rows of `out` may be a multiple of a page apart, which the
// caches do not like.
struct Sums {
  float *sums;  // (num_rows, kPanel)
  float *out;   // (num_rows, num_outputs), from the panel's first output on
  int64_t num_rows, num_outputs, width;

  Sums(const Product &product, int64_t panel, float *buffer, float *first_row, int64_t rows)
      : sums(buffer), out(first_row + panel * kPanel), num_rows(rows), num_outputs(product.num_outputs),
        width(std::min<int64_t>(kPanel, num_outputs - panel * kPanel)) {}

  void begin(const float *bias, bool adds) {
    alignas(64) float first[kPanel] = {};
    if (bias) std::memcpy(first, bias, width * sizeof(float));
    for (int64_t row = 0; row < num_rows; ++row) {
      float *start = sums + row * kPanel;
      std::memcpy(start, first, sizeof first);
      if (!adds) continue;
      for (int64_t i = 0; i < width; ++i) start[i] += out[row * num_outputs + i];
    }
  }

  void end() {
    for (int64_t row = 0; row < num_rows; ++row) {
      std::memcpy(out + row * num_outputs, sums + row * kPanel, width * sizeof(float));
    }
  }
};

// The outputs of one panel for some rows of `out` (num_rows, num_outputs)
void multiply_panel(const Product &product, int64_t number, const float *states, float *out, int64_t num_rows,
                    bool adds) {
  alignas(64) float buffer[kStatesAtOnce * kPanel];
  Sums sums(product, number, buffer, out, num_rows);
  sums.begin(product.bias ? product.bias + number * kPanel : nullptr, adds);
  const auto multiply =
      product.num_bits == 4 ? multiply_groups<4> : product.num_bits == 8 ? multiply_groups<8> : multiply_floats;
  multiply(product.panels + number * product.panel_bytes, states, num_rows, product.num_inputs, buffer);
  sums.end();
}

constexpr int kFewRows = 4, kFewPanels = 8 / kPanelVectors;  // that multiply_few takes at once

// The outputs of some panels for at most kFewRows rows
void multiply_few_panels(const Product &product, int64_t number, int64_t num_panels, const float *states, float *out,
                         int64_t num_rows, bool adds) {
  using Function = void (*)(const void *, const float *, int64_t, float *);
  static constexpr auto functions = []<int... I>(std::integer_sequence<int, I...>) {
    constexpr int kEach = kFewRows * kFewPanels;
    return std::array<Function, 2 * kEach>{
        multiply_few<(I < kEach ? 4 : 8), I % kEach / kFewPanels + 1, I % kFewPanels + 1>...};
  }(std::make_integer_sequence<int, 2 * kFewRows * kFewPanels>{});
  alignas(64) float buffer[kFewPanels * kFewRows * kPanel];
  const auto sums_of = [&](int64_t panel) {
    return Sums(product, number + panel, buffer + panel * num_rows * kPanel, out, num_rows);
  };
  for (int64_t i = 0; i < num_panels; ++i) {
    sums_of(i).begin(product.bias ? product.bias + (number + i) * kPanel : nullptr, adds);
  }
  const int64_t of_bits = product.num_bits == 8 ? kFewRows : 0;
  const auto multiply = functions[(of_bits + num_rows - 1) * kFewPanels + num_panels - 1];
  multiply(product.panels + number * product.panel_bytes, states, product.num_inputs, buffer);
  for (int64_t i = 0; i < num_panels; ++i) sums_of(i).end();
}

// How many panels a thread takes at once: more are quicker by the panel until the registers are full, but may leave
// threads without work.
int64_t panels_at_once(int64_t num_panels, int64_t num_rows, int num_threads) {
  int64_t best = 1, least = INT64_MAX;
  const int64_t most = num_rows > 2 && kLanes < 16 ? kFewPanels - 1 : kFewPanels;
  for (int64_t count = 1; count <= most; ++count) {
    const int64_t num_units = (num_panels + count - 1) / count;
    const int64_t time = (num_units + num_threads - 1) / num_threads * (5 * count + 3);  // as measured
    if (time < least) least = time, best = count;
  }
  return best;
}

// ---- attention in tiles --------------------------------------------------------------------------------------------
//
// Two products of tiles: the queries of some consecutive tokens (all heads that share a KV head) by kKeysAtOnce keys.
//
//   keys -> panels (head_dim, kPanel)     scores = queries * panels     sums *= 2 ** (old highest - highest)
//   values -> panels (keys, kPanel)       sums += 2 ** (scores - highest) * panels
//
// Tiles of keys begin at multiples of kKeysAtOnce, and a key that a query does not see adds 0. So a query's result
// depends neither on the tokens around it nor on threads and lanes: decodes and chunks of any size agree in every bit.
// It is computed in float32; tensors of bfloat16 are widened as they are read.

constexpr int64_t kKeysAtOnce = 128;  // a multiple of every kPanel
constexpr int kTotals = 16 / kLanes;

struct TileTokens {
  int64_t table, row, start, num_tokens;  // row of the tables, first row of the step and its position
};

struct Tiles {  // of a step
  const int64_t *block_tables;  // (sequences, table_width)
  const TileTokens *tiles;
  int64_t num_tiles, table_width, max_tokens;
};

// L rows of L floats, a row stride apart in `rows`, become L columns.
template <int L, int Step = L / 2> void transpose(Floats<L> *rows) {
  const auto swap = [&]<int... I>(std::integer_sequence<int, I...>, int i) {
    const Floats<L> a = rows[i], b = rows[i + Step];
    rows[i] = __builtin_shufflevector(a, b, (I & Step ? L + I - Step : I)...);
    rows[i + Step] = __builtin_shufflevector(a, b, (I & Step ? L + I : I + Step)...);
  };
#pragma GCC unroll 16
  for (int i = 0; i < L; ++i) {
    if (!(i & Step)) swap(std::make_integer_sequence<int, L>{}, i);
  }
  if constexpr (Step > 1) transpose<L, Step / 2>(rows);
}

// One thread's buffers for tiles of one shape, over tensors of E.
template <class E> class Tile {
 public:
  Tile(const Shape &shape, int64_t max_tokens)
      : shape_(shape), max_rows_(max_tokens * shape.group_size), num_parts_((shape.head_dim + kLanes - 1) / kLanes),
        num_panels_((num_parts_ + kPanelVectors - 1) / kPanelVectors) {
    const int64_t rows = (max_rows_ + 15) / 16 * 16, width = num_panels_ * kPanel;
    const int64_t sizes[] = {rows * width, rows * width, rows * kKeysAtOnce,  rows,
                             rows,         kKeysAtOnce * width, kKeysAtOnce * width};
    float **buffers[] = {&queries_, &sums_, &scores_, &highest_, &totals_, &keys_, &values_};
    int64_t size = 0;
    for (const int64_t each : sizes) size += each;
    struct alignas(64) Line {
      float floats[16];
    };
    thread_local std::vector<Line> lines;  // to get and to touch fresh memory in each call would take longer
    if (int64_t(lines.size()) < size / 16 + 1) lines.resize(size / 16 + 1);
    float *next = lines[0].floats;
    for (int i = 0; i < 7; ++i) *buffers[i] = next, next += sizes[i];
  }

  // The queries of tokens at start.. over one KV head. query and out: that head's first query of the first token.
  // next_keys: of the head that is likely to follow, whose first tile is fetched early.
  void attend(const E *query, int64_t query_stride, const E *keys, const E *values, const E *next_keys,
              const int64_t *block_table, int64_t start, int64_t num_tokens, int64_t window, E *out) {
    const int64_t group = shape_.group_size, num_rows = num_tokens * group, stop = start + num_tokens;
    load_queries(query, query_stride, num_tokens);
    const int64_t lowest = std::max<int64_t>(0, start + 1 - window);
    for (int64_t first = lowest / kKeysAtOnce * kKeysAtOnce; first < stop; first += kKeysAtOnce) {
      const int64_t num_keys = std::min(kKeysAtOnce, stop - first);
      // the tokens that see a key of the tile
      const int64_t begin = std::max<int64_t>(0, first - start);
      const int64_t end = std::min(num_tokens, first + num_keys - 1 - start + window);
      const int64_t rows = (end - begin) * group;
      find_rows(shape_, block_table, first, stop, rows_, kKeysAtOnce);
      load_keys(keys, values, num_keys);
      float *scores = scores_ + begin * group * kKeysAtOnce;
      std::fill(scores, scores + rows * kKeysAtOnce, 0.0f);
      for (int64_t key = 0; key < num_keys; key += kPanel) {
        const int64_t row = std::max(begin, first + key - start) * group;
        multiply_rows(end * group - row, queries_ + row * shape_.head_dim, shape_.head_dim,
                      keys_ + key * shape_.head_dim, shape_.head_dim, scores_ + row * kKeysAtOnce + key, kKeysAtOnce);
      }
      for (int64_t row = begin * group; row < end * group; ++row) {
        const int64_t position = start + row / group;
        const int64_t low = std::max<int64_t>(0, position + 1 - window - first);
        const int64_t high = std::min(num_keys, position + 1 - first);
        const float fading =
            weigh<kTotals>(scores_ + row * kKeysAtOnce, low, high, num_keys, highest_[row], totals_[row]);
        if (fading == 1) continue;
        for (int64_t panel = 0; panel < num_panels_; ++panel) {
          float *sums = sums_ + (panel * max_rows_ + row) * kPanel;
          for (int i = 0; i < kPanel; ++i) sums[i] *= fading;
        }
      }
      const bool is_last = first + kKeysAtOnce >= stop;
      const int64_t next = is_last ? lowest / kKeysAtOnce * kKeysAtOnce : first + kKeysAtOnce;
      find_rows(shape_, block_table, next, stop, next_rows_, kKeysAtOnce);
      load_values(values, is_last ? next_keys : keys, num_keys);
      for (int64_t panel = 0; panel < num_panels_; ++panel) {
        multiply_rows(rows, scores, kKeysAtOnce, values_ + panel * kKeysAtOnce * kPanel, num_keys,
                      sums_ + (panel * max_rows_ + begin * group) * kPanel, kPanel);
      }
    }
    const int64_t width = shape_.num_kv_heads * group * shape_.head_dim;
    for (int64_t row = 0; row < num_rows; ++row) {
      const float inverse = 1.0f / totals_[row];
      E *to = out + row / group * width + row % group * shape_.head_dim;
      for (int64_t part = 0; part < num_parts_; ++part) {
        const auto sums = load<Floats<kLanes>>(at(sums_, part, max_rows_) + row * kPanel);
        store_floats<kLanes>(to + offset(part), sums * inverse);
      }
    }
  }

 private:
  // Of a vector of a head. The last may overlap the one before it: what they share is computed twice.
  int64_t offset(int64_t part) const { return std::min(part * kLanes, shape_.head_dim - kLanes); }
  // Where it lies in the first row of panels of `num_rows`.
  static float *at(float *panels, int64_t part, int64_t num_rows) {
    return panels + part / kPanelVectors * num_rows * kPanel + part % kPanelVectors * kLanes;
  }

  void load_queries(const E *query, int64_t stride, int64_t num_tokens) {
    const float factor = shape_.scale * 1.4426950408889634f;  // for powers of 2 instead of e
    const int64_t size = shape_.group_size * shape_.head_dim, num_rows = num_tokens * shape_.group_size;
    for (int64_t token = 0; token < num_tokens; ++token) {
      for (int64_t i = 0; i < size; ++i) queries_[token * size + i] = to_float(query[token * stride + i]) * factor;
    }
    for (int64_t panel = 0; panel < num_panels_; ++panel) {
      std::fill_n(sums_ + panel * max_rows_ * kPanel, num_rows * kPanel, 0.0f);
    }
    std::fill_n(highest_, num_rows, -INFINITY);
    std::fill_n(totals_, num_rows, 0.0f);
  }

  // Fills keys_ (kKeysAtOnce / kPanel, head_dim, kPanel), and fetches the values.
  void load_keys(const E *keys, const E *values, int64_t num_keys) {
    constexpr int L = kLanes;
    for (int64_t key = 0; key < num_keys; key += L) {
      float *columns = keys_ + key / kPanel * kPanel * shape_.head_dim + key % kPanel;
      for (int64_t part = 0; part < num_parts_; ++part) {
        Floats<L> block[L];
        for (int k = 0; k < L; ++k) block[k] = load_floats<L>(keys + rows_[key + k] + offset(part));
        transpose<L>(block);
        for (int i = 0; i < L; ++i) store(columns + (offset(part) + i) * kPanel, block[i]);
      }
      for (int k = 0; k < L; ++k) fetch(values + rows_[key + k]);
    }
  }

  // Fills values_ (panels, kKeysAtOnce, kPanel), and fetches the keys of the next tile.
  void load_values(const E *values, const E *keys, int64_t num_keys) {
    for (int64_t key = 0; key < num_keys; ++key) {
      for (int64_t part = 0; part < num_parts_; ++part) {
        store(at(values_, part, kKeysAtOnce) + key * kPanel, load_floats<kLanes>(values + rows_[key] + offset(part)));
      }
      fetch(keys + next_rows_[key]);
    }
  }

  void fetch(const E *row) const {
    for (int64_t i = 0; i < shape_.head_dim; i += 64 / int64_t(sizeof(E))) __builtin_prefetch(row + i);
  }

  const Shape &shape_;
  const int64_t max_rows_, num_parts_, num_panels_;
  float *queries_;            // (max_rows, head_dim): token by token
  float *sums_;               // (panels, max_rows, kPanel)
  float *scores_;             // (max_rows, kKeysAtOnce)
  float *highest_, *totals_;  // (max_rows,)
  float *keys_, *values_;     // panels
  int64_t rows_[kKeysAtOnce], next_rows_[kKeysAtOnce];
};

// Stores a key and a value for each row at its slot, then attends from the queries. A query sees `window` keys.
//
// As for `attend`; slots (num_rows,), out (num_rows, heads * head_dim). head_dim >= kLanes.
template <class E>
void attend_in_tiles(const Shape *shape, const Tiles *step, const int64_t *slots, int64_t num_rows, int64_t window,
                     const E *query, int64_t query_stride, const E *key, int64_t key_stride, const E *value,
                     int64_t value_stride, E *keys, E *values, E *out, int num_threads) {
  const int64_t num_heads = shape->num_kv_heads, row_size = num_heads * shape->head_dim;
  // Decodes: a thread that takes all heads of a row knows which comes next.
  const int64_t items_at_once = step->max_tokens == 1 && step->num_tiles >= 2 * num_threads ? num_heads : 1;
#pragma omp parallel num_threads(num_threads)
  {
#pragma omp for
    for (int64_t row = 0; row < num_rows; ++row) {
      std::memcpy(keys + slots[row] * row_size, key + row * key_stride, row_size * sizeof(E));
      std::memcpy(values + slots[row] * row_size, value + row * value_stride, row_size * sizeof(E));
    }
    Tile<E> tile(*shape, step->max_tokens);
    // the last tiles of a chunk see most keys: first
#pragma omp for schedule(dynamic, items_at_once) nowait
    for (int64_t item = step->num_tiles * num_heads - 1; item >= 0; --item) {
      const auto [table, row, start, num_tokens] = step->tiles[item / num_heads];
      const int64_t head = item % num_heads, first = head * shape->head_dim;
      tile.attend(query + row * query_stride + first * shape->group_size, query_stride, keys + first, values + first,
                  keys + (head > 0 ? head - 1 : num_heads - 1) * shape->head_dim,
                  step->block_tables + table * step->table_width, start, num_tokens, window,
                  out + (row * num_heads + head) * shape->group_size * shape->head_dim);
    }
  }
}

struct Norm {
  const float *weight;  // (size,)
  int64_t size;
  float offset;
};

}  // namespace

extern "C" {

// x * weight / sqrt(sum(x^2) + offset) for each row x of states; states and out (num_rows, size)
void rms_norm(const Norm *norm, const Bf16 *states, Bf16 *out, int64_t num_rows, int num_threads) {
  const auto [weight, size, offset] = *norm;
  for_each_row(num_rows, num_threads, kRowsAtOnce, [=](int64_t row) {
    const Bf16 *x = states + row * size;
    Bf16 *normed = out + row * size;
    const float total = sum_of_squares(x, size);
    const float factor = 1.0f / std::sqrt(total + offset);
    for (int64_t i = 0; i < size; ++i) normed[i] = narrow(widen(x[i]) * factor * weight[i]);
  });
}

// Rotates the first num_heads heads of each row in place; states (num_rows, width), table (num_rows, 2, head_dim) of
// cosines and signed sines.
void rotate(Bf16 *states, const Bf16 *table, int64_t num_rows, int64_t width, int64_t num_heads, int64_t head_dim,
            int num_threads) {
  for_each_row(num_rows, num_threads, kRowsAtOnce, [=](int64_t row) {
    const int64_t half = head_dim / 2;
    const Bf16 *cos = table + row * 2 * head_dim, *sin = cos + head_dim;
    for (int64_t head = 0; head < num_heads; ++head) {
      Bf16 *__restrict lower = states + row * width + head * head_dim;
      Bf16 *__restrict upper = lower + half;
      for (int64_t i = 0; i < half; ++i) {
        const float x = widen(lower[i]), y = widen(upper[i]);
        lower[i] = narrow(x * widen(cos[i]) + y * widen(sin[i]));
        upper[i] = narrow(y * widen(cos[half + i]) + x * widen(sin[half + i]));
      }
    }
  });
}

// out[row] = the first of the highest of states (num_rows, size); NaN is higher than anything.
//
// Compared as integers in the same order: of a negative number, the negated magnitude. The magnitude of infinity is
// added, so that -inf becomes 0, and NaN with a sign, which would lie below, comes out on top.
void argmax(const Bf16 *states, int64_t *out, int64_t num_rows, int64_t size, int num_threads) {
  const auto ordered = [](Bf16 value) {
    const uint16_t magnitude = value & 0x7FFF;
    return uint16_t((value > 0x7FFF ? -magnitude : magnitude) + 0x7F80);
  };
  for_each_row(num_rows, num_threads, 1, [=](int64_t row) {
    const Bf16 *x = states + row * size;
    int64_t found = 0;
    int highest = -1;
    for (int64_t first = 0; first < size; first += 1024) {
      const int64_t stop = std::min(first + 1024, size);
      uint16_t top = 0;
      for (int64_t i = first; i < stop; ++i) top = std::max(top, ordered(x[i]));
      if (top <= highest) continue;
      highest = top;
      found = first;
      while (ordered(x[found]) != top) ++found;
    }
    out[row] = found;
  });
}

// Stores a key and a value for each row at its last position, then attends from its query.
//
// query, key and value: rows of adjacent heads, row strides in elements; keys and values (num_blocks, block_size,
// kv_heads, head_dim); out (num_rows, heads * head_dim).
void attend(const Shape *shape, const Decodes *decodes, const Bf16 *query, int64_t query_stride, const Bf16 *key,
            int64_t key_stride, const Bf16 *value, int64_t value_stride, Bf16 *keys, Bf16 *values, Bf16 *out,
            int num_threads) {
  const int64_t row_size = shape->num_kv_heads * shape->head_dim;
  for (int64_t row = 0; row < decodes->num_rows; ++row) {
    const int64_t last = decodes->bounds[2 * row + 1] - 1, block_size = shape->block_size;
    const int64_t block = decodes->block_tables[row * decodes->table_width + last / block_size];
    const int64_t slot = (block * block_size + last % block_size) * row_size;
    std::memcpy(keys + slot, key + row * key_stride, row_size * sizeof(Bf16));
    std::memcpy(values + slot, value + row * value_stride, row_size * sizeof(Bf16));
  }
  const int threads = int(std::min<int64_t>(num_threads, decodes->num_rows * shape->num_kv_heads));
  const auto attend_with = shape->head_dim >= 2 * kLanes ? attend_heads<kLanes> : attend_heads<4>;
  attend_with(*shape, *decodes, query, query_stride, keys, values, out, threads);
}

// attend_in_tiles, in float32 and in bfloat16
void attend_tiles_float32(const Shape *shape, const Tiles *step, const int64_t *slots, int64_t num_rows, int64_t window,
                          const float *query, int64_t query_stride, const float *key, int64_t key_stride, const float *value,
                          int64_t value_stride, float *keys, float *values, float *out, int num_threads) {
  attend_in_tiles(shape, step, slots, num_rows, window, query, query_stride, key, key_stride, value, value_stride, keys,
                  values, out, num_threads);
}

void attend_tiles_bfloat16(const Shape *shape, const Tiles *step, const int64_t *slots, int64_t num_rows, int64_t window,
                           const Bf16 *query, int64_t query_stride, const Bf16 *key, int64_t key_stride, const Bf16 *value,
                           int64_t value_stride, Bf16 *keys, Bf16 *values, Bf16 *out, int num_threads) {
  attend_in_tiles(shape, step, slots, num_rows, window, query, query_stride, key, key_stride, value, value_stride, keys,
                  values, out, num_threads);
}

// Outputs of a panel.
int panel_width() { return kPanel; }

// out (num_rows, num_outputs) = states (num_rows, num_inputs) * weights + bias, with `adds` added to what is there.
void multiply(const Product *product, const float *states, float *out, int64_t num_rows, int adds, int num_threads) {
  const int64_t num_panels = (product->num_outputs + kPanel - 1) / kPanel;
  if (product->num_bits < 32 && num_rows <= kFewRows) {
    const int64_t at_once = panels_at_once(num_panels, num_rows, num_threads);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t panel = 0; panel < num_panels; panel += at_once) {
      multiply_few_panels(*product, panel, std::min(at_once, num_panels - panel), states, out, num_rows, adds != 0);
    }
    return;
  }
  const int64_t num_parts = (num_rows + kStatesAtOnce - 1) / kStatesAtOnce;
#pragma omp parallel for collapse(2) schedule(dynamic) num_threads(num_threads)
  for (int64_t part = 0; part < num_parts; ++part) {
    for (int64_t panel = 0; panel < num_panels; ++panel) {
      const int64_t first = part * kStatesAtOnce;
      multiply_panel(*product, panel, states + first * product->num_inputs,
                     out + first * product->num_outputs, std::min(kStatesAtOnce, num_rows - first),
                     adds != 0);
    }
  }
}
}
