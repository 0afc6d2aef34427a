// Kernels for a CPU: their entry points.
//
//   vectors.h    vectors of floats, bfloat16
//   decodes.h    attention of decodes in bfloat16
//   products.h   products in float32, with weights of 32, 8 or 4 bits
//   sampling.h   a token from a row of logits
//   tiles.h      attention in tiles, in float32, and of chunks in bfloat16
//
// Between the matrix products of a decode step in bfloat16 there are RMS norm, rotary embedding, argmax, and attention.
// torch needs some 25 calls a layer for them; here each is one call, one loop.
//
// worker/kernels/cpu.py compiles this file once per instruction set and loads it with ctypes. `#pragma omp` runs on the
// threads of torch's own libgomp: a second pool would compete with them for the cores.
//
// NaN must stay NaN, so that a broken model is noticed. The build uses no unsafe math: g++ 12 folds a vector times zero
// to zero as soon as it may ignore the sign of zero.

#include "decodes.h"
#include "products.h"
#include "sampling.h"
#include "tiles.h"
#include "vectors.h"

namespace {

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

// out[row] = the first of the highest elements of states (num_rows, size); NaN is higher than anything.
//
// Compared as integers in the same order: of a negative number, the negated magnitude. The magnitude of infinity is
// added, so that -inf becomes 0, and NaN with a sign, which would be lowest, is the highest.
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

// Samples a token from each row, of those that its mask allows if it has one; also returns the best logits before and
// after the rules, NaN if one is.
void sample(const SamplingRow *rows, const uint32_t *const *masks, int64_t *token_ids, float *best_raw, float *best,
            int64_t num_rows, int64_t size, int num_threads) {
  for_each_row(num_rows, num_threads, 1, [=](int64_t row) {
    const auto sample_one = masks[row] ? sample_row<true> : sample_row<false>;
    std::tie(token_ids[row], best_raw[row], best[row]) = sample_one(rows[row], masks[row], size);
  });
}

// Rates a token of each of these rows of logits (..., size), and finds the num_best best of each: see rate_row.
void rate(const float *logits, const int64_t *rows, const int64_t *token_ids, int64_t num_rows, int64_t size,
          int64_t num_best, float *logprobs, int64_t *ranks, float *values, int64_t *ids, int num_threads) {
  for_each_row(num_rows, num_threads, 1, [=](int64_t row) {
    rate_row(logits + rows[row] * size, size, token_ids[row], num_best, logprobs + row, ranks + row, values + row * num_best,
             ids + row * num_best);
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
