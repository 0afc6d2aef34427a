// Products in float32, with weights of 32, 8 or 4 bits.
//
// A panel is kPanel outputs of a weight side by side, (num_inputs, kPanel): a tile of rows reads it once, in order. Each
// sum runs over the inputs in order, in one lane of one register: it depends on no other row, nor on the number of lanes.

#pragma once

#include "vectors.h"

namespace {

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

// A panel of quantised weights is groups of kGroup inputs. A thread dequantises some of them at a time, to the same
// floats as a dense weight.
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

// L outputs that begin at `lane`: calls use(i, weights) for each input i whose code is in this word of the group.
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
// waits for the one before it, but not for those of other panels.
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

// Outputs of one panel for some rows, until they are complete. Rows of `out` may be a multiple of a page apart, which
// is slow in caches.
struct Sums {
  float *sums;  // (num_rows, kPanel)
  float *out;   // (num_rows, num_outputs), beginning with the panel's first output
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

// How many panels a thread takes at once: more take less time each until the registers are full, but may leave threads
// without work.
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

}  // namespace
