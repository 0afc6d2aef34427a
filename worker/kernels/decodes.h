// Attention of decodes in bfloat16 over the pages of the KV cache: one query of each sequence.

#pragma once

#include "vectors.h"

namespace {

struct Shape {  // of a model's attention and its pool
  int64_t num_kv_heads, group_size, head_dim, block_size;
  float scale;
};

struct Decodes {  // the rows of a step
  const int64_t *block_tables;  // (num_rows, table_width)
  const int64_t *bounds;        // (num_rows, 2): the first key that a row's query sees, and the end of its keys
  int64_t num_rows, table_width;
};

// Sets rows[i] to the position of key first + i in a pool, in elements. Rows beyond the last key repeat it.
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

// A query's scores[first..stop) -> 2 ** (score - highest), the others of `size` -> 0. Returns the factor on earlier
// sums, 2 ** (old highest - highest).
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
// L words are one vector. The last vector of a head may overlap the one before it: repeated elements have a query of 0.
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

  // scores[g][k] = queries[g] . keys[k] for the G queries that begin at `first`
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

  // sums[g] += sum over k of scores[g][k] * values[k] for the G queries that begin at `first`
  template <int G> void add_values(int64_t first, const Bf16 *values, int64_t num_keys) {
    int64_t v = 0;
    for (; v + 2 <= num_vectors_; v += 2) add_value_vectors<G, 2>(first, v, values, num_keys);
    if (v < num_vectors_) add_value_vectors<G, 1>(first, v, values, num_keys);
  }

  template <int G, int N> void add_value_vectors(int64_t first, int64_t v, const Bf16 *values, int64_t num_keys) {
    constexpr int K = G == 1 ? 2 : 1;  // sums of one query are too few to keep the units busy
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

}  // namespace
