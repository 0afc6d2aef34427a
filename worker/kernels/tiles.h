// Attention in tiles, of decodes and chunks, in float32 or bfloat16.
//
// Two products of tiles: the queries of some consecutive tokens (all heads that share a KV head) by kKeysAtOnce keys.
//
//   keys -> panels (head_dim, kPanel)     scores = queries * panels     sums *= 2 ** (old highest - highest)
//   values -> panels (keys, kPanel)       sums += 2 ** (scores - highest) * panels
//
// Tiles of keys begin at multiples of kKeysAtOnce, and a key that a query does not see adds 0. So a query's result
// depends neither on the tokens around it nor on threads and lanes: decodes and chunks of any size agree in every bit.
// It is computed in float32; tensors of bfloat16 are widened as they are read.

#pragma once

#include "decodes.h"
#include "products.h"

namespace {

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
  // Of a vector of a head. The last may overlap the one before it: shared elements are computed twice.
  int64_t offset(int64_t part) const { return std::min(part * kLanes, shape_.head_dim - kLanes); }
  // Its place in the first row of panels of `num_rows`.
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
  // Decodes: a thread that takes all heads of a row can fetch the next one early.
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

}  // namespace
