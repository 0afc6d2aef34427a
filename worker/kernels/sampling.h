// Sampling: a token from a row of logits in float32, by the rules and limits of its request.
//
//   logits --edits, mask--> highest of each block --> best token                                     greedy
//                                                 \-> range of kept logits --> weights --> a token   random
//
// Weights are integers, so a sum of them does not depend on the order, the width of vectors, or threads. The weight of a
// logit is 2^25 * 2^-t, t = (highest - logit) * log2(e) / temperature, in a unit of its block: that of the block's highest
// logit. A block's sum fits into 32 bits, and is off by less than 2^-20 of its largest weight. Products are rounded before
// they are added to: `rounded` keeps the compiler from fusing the two. worker/sampling/reference.py computes the same,
// bit for bit.
//
// What a limit keeps is a range of keys, which `last_needed` finds without sorting. The highest logits of blocks tell
// which blocks have none of the range.

#pragma once

#include "vectors.h"

#include <tuple>

namespace {

constexpr int64_t kBlock = 64;        // logits with one highest
constexpr int kUnitBits = 18;         // the shift of a block's sum that has the row's highest: sums of rows fit into 64 bits
constexpr int kLastUnit = 50;         // from this block unit on, all weights of the block are 0
constexpr float kLastT = 63.0f;
constexpr float kLastInBlock = 28.0f;
constexpr float kRounding = 0x1.8p19f;  // added to a float, leaves the nearest 16th in its lower bits
constexpr size_t kFewKeys = 4096;     // that are searched without bins
constexpr float kNear = 8.0f;         // bits of a weight within which a limit's keys are tried first
constexpr float kInfinity = __builtin_inff(), kLowest = -__FLT_MAX__;

// Changes of some logits of a row.
struct Edits {
  const int32_t *ids;
  const float *values;
  int64_t count;
};

struct Limits {
  double min_p_margin;        // below the highest logit; infinity: no limit
  int64_t top_k;              // 0: no limit
  uint64_t top_p, typical_p;  // in units of 2^-53; 2^53: no limit
  float penalty;              // for repetition
  float scale;                // log2(e) / temperature; 0: greedy
};

// A row, its rules, and its limits.
struct SamplingRow {
  float *logits;            // edited in place, and restored
  uint64_t uniform;         // in units of 2^-53
  Edits repeated[2];        // divided by the penalty if above 0, else multiplied
  Edits lowered;            // by their values
  Edits biased;             // by their values
  Edits forbidden;
  Edits stops;              // forbidden if another token is left
  Limits limits;

  bool has_edits() const {
    return repeated[0].count + repeated[1].count + lowered.count + biased.count + forbidden.count + stops.count > 0;
  }
};

// ---- rows ----------------------------------------------------------------------------------------------------------

#if defined(__x86_64__)
#define HEADSTART_VECTOR "+v"
#else
#define HEADSTART_VECTOR "+w"
#endif

// The compiler may fuse no product with a sum across this.
Floats<kLanes> rounded(Floats<kLanes> product) {
  asm("" : HEADSTART_VECTOR(product));
  return product;
}

constexpr auto kLaneNumbers = []<int... I>(std::integer_sequence<int, I...>) {
  return std::array<int32_t, sizeof...(I)>{I...};
}(std::make_integer_sequence<int, kLanes>{});

// The logits of a row as its mask leaves them.
template <bool kMasked> struct Logits {
  const float *x;
  const uint32_t *allowed;  // a bit for each token of whole blocks
  int64_t size;

  float at(int64_t i) const { return kMasked && !(allowed[i / 32] >> (i % 32) & 1) ? -kInfinity : x[i]; }
  // values, which are those from i on, a multiple of kLanes
  Floats<kLanes> masked(int64_t i, Floats<kLanes> values) const {
    if constexpr (kMasked) {
#if defined(__AVX512F__)
      const __m512 none = _mm512_set1_ps(-kInfinity);
      values = (Floats<16>)_mm512_mask_mov_ps(none, __mmask16(allowed[i >> 5] >> (i & 16)), (__m512)values);
#else
      const Ints<kLanes> lanes = 1 << (::load<Ints<kLanes>>(kLaneNumbers.data()) + int32_t(i & 31));
      values = (int32_t(allowed[i >> 5]) & lanes) != 0 ? values : Floats<kLanes>{} - kInfinity;
#endif
    }
    return values;
  }
};

// Joins the lanes of a vector, half by half.
template <int L, class Vector, class Join> auto joined(Vector vector, Join join) {
  if constexpr (L == 1) {
    return vector[0];
  } else if constexpr (L == 2) {
    return join(vector[0], vector[1]);
  } else {
    return [&]<int... I>(std::integer_sequence<int, I...>) {
      return joined<L / 2>(join(__builtin_shufflevector(vector, vector, I...),
                                __builtin_shufflevector(vector, vector, (I + L / 2)...)),
                           join);
    }(std::make_integer_sequence<int, L / 2>{});
  }
}

// Joins the lanes of each of as many vectors: lane i of the result is of vectors[i], which are overwritten.
template <class Vector, class Join> Vector joined_each(Vector (&vectors)[kLanes], Join join) {
  const auto interleaved = [&]<int... I>(Vector a, Vector b, std::integer_sequence<int, I...>) {
    return join(__builtin_shufflevector(a, b, (I / 2 + I % 2 * kLanes)...),
                __builtin_shufflevector(a, b, (kLanes / 2 + I / 2 + I % 2 * kLanes)...));
  };
#pragma GCC unroll 4
  for (int count = kLanes / 2; count > 0; count /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < count; ++i) {
      vectors[i] = interleaved(vectors[i], vectors[i + count], std::make_integer_sequence<int, kLanes>{});
    }
  }
  return vectors[0];
}

float highest_lane(Floats<kLanes> vector) {
  return joined<kLanes>(vector, [](auto a, auto b) { return a > b ? a : b; });
}

// Calls each(i, logits) for the vectors of a block; logits beyond the row are -inf.
template <bool kMasked, class Each>
[[gnu::always_inline]] inline void for_vectors(const Logits<kMasked> &row, int64_t block, const Each &each) {
  const int64_t first = block * kBlock;
  const float *x = row.x + first;
  float last[kBlock];
  if (first + kBlock > row.size) {
    for (int i = 0; i < kBlock; ++i) last[i] = first + i < row.size ? x[i] : -kInfinity;
    x = last;
  }
#pragma GCC unroll 16
  for (int i = 0; i < kBlock; i += kLanes) each(first + i, row.masked(first + i, load_floats<kLanes>(x + i)));
}

template <bool kMasked> float highest_of_block(const Logits<kMasked> &row, int64_t block) {
  Floats<kLanes> top = Floats<kLanes>{} - kInfinity;
  for_vectors(row, block, [&](int64_t, Floats<kLanes> x) { top = larger<kLanes>(x, top); });
  return highest_lane(top);
}

// ---- weights -------------------------------------------------------------------------------------------------------

// The bits of 2^-(i / 16), and i << 19.
constexpr auto kPowers = [] {
  std::array<uint32_t, 16> bits{0x3F800000, 0x3F75257D, 0x3F6AC0C7, 0x3F60CCDF, 0x3F5744FD, 0x3F4E248C, 0x3F45672A, 0x3F3D08A4,
                                0x3F3504F3, 0x3F2D583F, 0x3F25FED7, 0x3F1EF532, 0x3F1837F0, 0x3F11C3D3, 0x3F0B95C2, 0x3F05AAC3};
  for (uint32_t i = 0; i < 16; ++i) bits[i] += i << 19;
  return bits;
}();

// kPowers of the lower bits of each lane
Words<kLanes> powers_of(Words<kLanes> lanes) {
  if constexpr (kLanes == 16) {
    return __builtin_shuffle(load<Words<kLanes>>(kPowers.data()), lanes);
  } else if constexpr (kLanes == 8) {
    return __builtin_shuffle(load<Words<kLanes>>(kPowers.data()), load<Words<kLanes>>(kPowers.data() + 8), lanes);
  } else {
    for (int lane = 0; lane < kLanes; ++lane) lanes[lane] = kPowers[lanes[lane] % 16];
    return lanes;
  }
}

// 2^25 * 2^-(t - unit), rounded. The polynomial is the minimax one for 2^-f, |f| <= 1/32; its error is below 2^-21.
Words<kLanes> weights(Floats<kLanes> t, int32_t unit) {
  constexpr int L = kLanes;
  const Floats<L> shifted = t + kRounding;
  const Floats<L> f = t - (shifted - kRounding);
  const Floats<L> power = rounded(f * (rounded(f * 0x1.ebff92p-3f) + -0x1.62e984p-1f)) + 1.0f;
  // The lower bits of `shifted` are the nearest 16th of t; moved by 19, its integer is where an exponent is.
  const Words<L> sixteenths = (Words<L>)shifted;
  const Floats<L> unscaled = (Floats<L>)(powers_of(sixteenths) + (uint32_t(25 + unit) << 23) - (sixteenths << 19));
  return (Words<L>)nearest<L>(power * unscaled);
}

// The logits that are kept, and their distribution.
struct Kept {
  float highest, scale;
  float lowest = kLowest;              // of the kept logits
  float middle = 0.0f, reach = -1.0f;  // if reach >= 0, only |t - middle| <= reach

  Floats<kLanes> t(Floats<kLanes> x, float last) const {
    const Floats<kLanes> t = rounded((highest - x) * scale);
    return smaller<kLanes>(t, last - Floats<kLanes>{});
  }
  float t(float x) const { return t(Floats<kLanes>{} + x, kLastT)[0]; }
  // Of logits of a block with this unit. Beyond kLastInBlock a weight is 0.
  template <bool kAll> Words<kLanes> weights(Floats<kLanes> x, int32_t unit) const {
    const Floats<kLanes> t = this->t(x, float(unit) + kLastInBlock);
    Words<kLanes> found = ::weights(t, unit);
    if constexpr (!kAll) {
      found &= (Words<kLanes>)(x >= lowest);
      if (reach >= 0.0f) found &= (Words<kLanes>)(off(t) <= reach);
    }
    return found;
  }
  Floats<kLanes> off(Floats<kLanes> t) const { return t < middle ? middle - t : t - middle; }
  bool keeps_all() const { return lowest == kLowest && reach < 0.0f; }
};

// A sum of weights of a block, in the unit of the row.
uint64_t in_row(uint64_t sum, int32_t unit) { return unit <= kUnitBits ? sum << (kUnitBits - unit) : sum >> (unit - kUnitBits); }

uint32_t sum_lanes(Words<kLanes> words) {
  return joined<kLanes>(words, [](auto a, auto b) { return a + b; });
}

// ---- limits --------------------------------------------------------------------------------------------------------

// Logits with a key, where lower keys are kept first, and a weight in the unit of the row.
struct Candidates {
  std::vector<float> keys;
  std::vector<uint64_t> weights;
  size_t count = 0;

  // Adds those of a part of a block, whose weights are in its unit, that `takes` names; returns the sum of their weights.
  template <int kCount, class Takes>
  uint64_t add(const float *block_keys, const uint32_t *block_weights, int32_t unit, Takes takes) {
    if (keys.size() < count + kBlock) keys.resize(2 * (count + kBlock)), weights.resize(keys.size());
    float *next_key = keys.data() + count;
    uint64_t *next_weight = weights.data() + count, total = 0;
    for (int i = 0; i < kCount; ++i) {  // without a branch
      const bool is_taken = takes(i);
      *next_key = block_keys[i], *next_weight = in_row(block_weights[i], unit);
      total += is_taken ? *next_weight : 0;
      next_key += is_taken, next_weight += is_taken;
    }
    count = next_key - keys.data();
    return total;
  }
};

// The buffers of a thread.
struct Scratch {
  std::vector<float> highest;              // of each block; -inf from the last block to a multiple of kLanes
  std::vector<int32_t> units;              // of each block
  std::vector<float> order;
  std::vector<uint64_t> sums;              // of the weights of each block
  std::vector<uint8_t> is_touched;         // blocks
  std::vector<int64_t> touched;            // the blocks that are
  std::vector<std::pair<float *, float>> undo;
  std::vector<std::pair<float, int64_t>> best;
  std::vector<uint64_t> bins;
  Candidates candidates;
};

Scratch &scratch() {
  static thread_local Scratch buffers;
  return buffers;
}

constexpr float kBinsInBit = 64.0f;  // of surprise
constexpr int32_t kBins = 1 << 12;   // for up to kLastT bits

// The lowest key at which the weights of all keys up to it reach `needed` (1 to the total). Reorders the candidates.
float last_needed(Candidates &found, uint64_t needed) {
  auto &keys = found.keys;
  auto &weights = found.weights;
  size_t first = 0, stop = found.count;
  const auto swap = [&](size_t a, size_t b) { std::swap(keys[a], keys[b]), std::swap(weights[a], weights[b]); };
  while (true) {
    const float a = keys[first], b = keys[first + (stop - first) / 2], c = keys[stop - 1];
    const float pivot = std::max(std::min(a, b), std::min(std::max(a, b), c));
    size_t below = first, above = stop, i = first;
    uint64_t lower = 0, equal = 0;
    while (i < above) {
      if (keys[i] < pivot) {
        lower += weights[i];
        swap(i++, below++);
      } else if (keys[i] > pivot) {
        swap(i, --above);
      } else {
        equal += weights[i++];
      }
    }
    if (needed <= lower) {
      stop = below;
    } else if (needed <= lower + equal || above == stop) {
      return pivot;
    } else {
      needed -= lower + equal;
      first = above;
    }
  }
}

uint64_t share_of(uint64_t total, uint64_t share) {
  const unsigned __int128 exact = (unsigned __int128)total * share;
  return std::max<uint64_t>(1, uint64_t((exact + ((1ull << 53) - 1)) >> 53));
}

// Draws a token of one row.
template <bool kMasked> class Sampler {
 public:
  // `scratch` has the highest logits of the blocks.
  Sampler(const Logits<kMasked> &row, float highest, float scale)
      : row_(row), tops_(scratch().highest), units_(scratch().units), kept_{highest, scale} {
    units_.resize(tops_.size());
    for (size_t block = 0; block < tops_.size(); block += kLanes) {
      const Floats<kLanes> t = kept_.t(load_floats<kLanes>(&tops_[block]), kLastT);
      store(&units_[block], __builtin_convertvector(t + 0.5f, Ints<kLanes>));
    }
  }

  void limit(const Limits &by) {
    if (by.top_k > 0 && by.top_k < row_.size) limit_rank(by.top_k);
    if (by.top_p < 1ull << 53) limit_share(by.top_p);
    if (by.min_p_margin < double(kInfinity)) {
      const double exact = double(kept_.highest) - by.min_p_margin;
      float lowest = float(exact);
      if (double(lowest) < exact) lowest = std::nextafter(lowest, kInfinity);
      kept_.lowest = std::max(kept_.lowest, lowest);
    }
    if (by.typical_p < 1ull << 53) limit_surprise(by.typical_p);
  }

  int64_t draw(uint64_t uniform) {
    const auto &sums = scratch().sums;
    const unsigned __int128 total = sum_blocks();
    uint64_t target = uint64_t((total * uniform) >> 53);
    int64_t block = 0;
    while (block + 1 < int64_t(sums.size()) && sums[block] <= target) target -= sums[block++];
    const int32_t unit = units_[block];
    target = unit <= kUnitBits ? target >> (kUnitBits - unit) : target << (unit - kUnitBits);
    int64_t found = -1;
    for_vectors(row_, block, [&](int64_t i, Floats<kLanes> x) {
      uint32_t weights[kLanes];
      store(weights, kept_.template weights<false>(x, unit));
      for (int lane = 0; lane < kLanes && found < 0; ++lane) {
        if (weights[lane] > target) found = i + lane;
        target -= weights[lane];
      }
    });
    return std::max<int64_t>(found, 0);
  }

  // Sums the weights of each block, in the unit of the row; returns that of all.
  uint64_t sum_blocks() { return kept_.keeps_all() ? sum_blocks<true>() : sum_blocks<false>(); }

  // A logit that at least `rank` logits reach, as high as the blocks tell; `otherwise` if they do not.
  float bound_of(int64_t rank, float otherwise) const {
    if (rank > int64_t(tops_.size())) return otherwise;
    auto &order = scratch().order;
    order = tops_;
    std::nth_element(order.begin(), order.begin() + (rank - 1), order.end(), std::greater<float>());
    return order[rank - 1];
  }

 private:
  template <bool kAll> uint64_t sum_blocks() const {
    auto &sums = scratch().sums;
    sums.assign(tops_.size(), 0);
    uint64_t total = 0;
    const Kept kept = kept_;  // in registers
    for (size_t first = 0; first < tops_.size(); first += kLanes) {
      Words<kLanes> found[kLanes] = {};
      bool is_any = false;
      for (int i = 0; i < kLanes; ++i) {
        if (!reaches(first + i, kLowest)) continue;
        Words<kLanes> sum{};
        const int32_t unit = units_[first + i];
        for_vectors(row_, first + i, [&](int64_t, Floats<kLanes> x) { sum += kept.weights<kAll>(x, unit); });
        found[i] = sum;
        is_any = true;
      }
      if (!is_any) continue;
      const Words<kLanes> words = joined_each(found, [](auto a, auto b) { return a + b; });
      for (int i = 0; i < kLanes; ++i) total += sums[first + i] = in_row(words[i], units_[first + i]);
    }
    return total;
  }

  // Whether some of a block may be kept and at least `bound`, with a weight.
  bool reaches(size_t block, float bound) const {
    if (tops_[block] < std::max(bound, kept_.lowest) || units_[block] >= kLastUnit) return false;
    return kept_.reach < 0.0f || kept_.t(tops_[block]) - kept_.middle <= kept_.reach;
  }

  // Calls each(block, keys, weights) for blocks with logits that are kept and at least `bound`, until it returns false.
  // Both are of kBlock logits. A weight is 0 for those that are not, in the unit of the block else; for a rank 1.
  template <class By, class Each> void for_blocks(const By &by, float bound, Each each) const {
    alignas(64) float keys[kBlock];
    alignas(64) uint32_t weights[kBlock];
    const float lowest = std::max(bound, kept_.lowest);
    const Kept kept = kept_;
    for (size_t block = 0; block < tops_.size(); ++block) {
      if (tops_[block] < lowest) continue;
      const int32_t unit = units_[block], first = int32_t(block * kBlock);
      for_vectors(row_, block, [&](int64_t i, Floats<kLanes> x) {
        const Words<kLanes> amount = By::kIsRank ? Words<kLanes>{} + 1 : kept.weights<false>(x, unit);
        store(keys + i - first, by.keys(x));
        store(weights + i - first, amount & (Words<kLanes>)(x >= lowest));
      });
      if (!each(By::kIsRank ? kUnitBits : unit, keys, weights)) return;
    }
  }

  // Returns the lowest key of what is kept at which the weights up to it reach `needed`; infinity if they never do.
  // Logits below `bound` have higher keys than all others.
  template <class By> float last_key(uint64_t needed, float bound, const By &by) const {
    auto &found = scratch().candidates;
    found.count = 0;
    uint64_t total = 0;
    for_blocks(by, bound, [&](int32_t unit, const float *keys, const uint32_t *weights) {
      total += found.template add<kBlock>(keys, weights, unit, [&](int i) { return weights[i] > 0; });
      return found.count < kFewKeys;
    });
    if (found.count < kFewKeys && total >= needed) return last_needed(found, needed);
    // Many keys: first the bin that has the last one. Neighbours count in different bins, so that none waits for another.
    auto &bins = scratch().bins;
    bins.assign(2 * kBins, 0);
    uint64_t *counts = bins.data();
    for_blocks(by, kLowest, [&](int32_t unit, const float *keys, const uint32_t *weights) {
      int32_t bins_of[kBlock];
      for (int i = 0; i < kBlock; i += kLanes) store(bins_of + i, by.bins(load_floats<kLanes>(keys + i)));
      for (int i = 0; i < kBlock; ++i) counts[2 * bins_of[i] + i % 2] += in_row(weights[i], unit);
      return true;
    });
    int32_t bin = 0;
    for (; bin < kBins; ++bin) {
      const uint64_t sum = counts[2 * bin] + counts[2 * bin + 1];
      if (sum >= needed) break;
      needed -= sum;
    }
    if (bin == kBins) return kInfinity;
    found.count = 0;
    for_blocks(by, kLowest, [&](int32_t unit, const float *keys, const uint32_t *weights) {
      for (int i = 0; i < kBlock; i += kLanes) {
        const Ints<kLanes> is_in = by.bins(load_floats<kLanes>(keys + i)) == bin;
        if (joined<kLanes>(is_in, [](auto a, auto b) { return a | b; }) == 0) continue;
        found.add<kLanes>(keys + i, weights + i, unit, [&](int lane) { return is_in[lane] != 0 && weights[i + lane] > 0; });
      }
      return true;
    });
    return last_needed(found, needed);
  }

  // Orders of what is kept: `keys`, and `bins` in their order.
  template <bool kRank> struct ByLogit {
    static constexpr bool kIsRank = kRank;  // each logit counts as 1
    Kept kept;

    Floats<kLanes> keys(Floats<kLanes> x) const { return -x; }
    Ints<kLanes> bins(Floats<kLanes> keys) const { return bins_of(kept.t(-keys, kLastT)); }
  };

  struct BySurprise {
    static constexpr bool kIsRank = false;
    Kept kept;  // with the middle

    Floats<kLanes> keys(Floats<kLanes> x) const { return kept.off(kept.t(x, kLastT)); }
    Ints<kLanes> bins(Floats<kLanes> keys) const { return bins_of(keys); }
  };

  static Ints<kLanes> bins_of(Floats<kLanes> t) { return __builtin_convertvector(t * kBinsInBit, Ints<kLanes>); }

  void keep_from(float key) {
    if (key < kInfinity) kept_.lowest = -key;
  }

  void limit_rank(int64_t rank) {
    keep_from(last_key(uint64_t(rank), bound_of(rank, kLowest), ByLogit<true>{kept_}));
  }

  void limit_share(uint64_t share) {
    const uint64_t needed = share_of(sum_blocks(), share);
    keep_from(last_key(needed, kept_.highest - kNear / kept_.scale, ByLogit<false>{kept_}));
  }

  // Locally typical sampling keeps what is nearest to the entropy. As a surprise is t and a constant, that is the mean.
  // t has 22 bits after the point here.
  void limit_surprise(uint64_t share) {
    unsigned __int128 moment = 0;
    uint64_t total = 0;
    const Kept kept = kept_;
    alignas(64) uint32_t weights[kBlock], ts[kBlock];
    for (size_t block = 0; block < tops_.size(); ++block) {
      if (!reaches(block, kLowest)) continue;
      const int32_t unit = units_[block], first = int32_t(block * kBlock);
      Words<kLanes> sum{};
      for_vectors(row_, block, [&](int64_t i, Floats<kLanes> x) {
        const Words<kLanes> found = kept.weights<false>(x, unit);
        store(weights + i - first, found);
        store(ts + i - first, __builtin_convertvector(kept.t(x, kLastT) * 0x1p22f, Ints<kLanes>));
        sum += found;
      });
      uint64_t in_block = 0;
      for (int i = 0; i < kBlock; ++i) in_block += uint64_t(weights[i]) * ts[i];
      moment += unit <= kUnitBits ? (unsigned __int128)in_block << (kUnitBits - unit) : in_block >> (unit - kUnitBits);
      total += in_row(sum_lanes(sum), unit);
    }
    kept_.middle = float(uint64_t(moment / total)) * 0x1p-22f;
    const float bound = kept.highest - (kept_.middle + kNear) / kept.scale;
    kept_.reach = last_key(share_of(total, share), bound, BySurprise{kept_});
  }

  const Logits<kMasked> &row_;
  const std::vector<float> &tops_;
  std::vector<int32_t> &units_;
  Kept kept_;
};

// ---- rules ---------------------------------------------------------------------------------------------------------

void touch(int64_t block) {
  auto &buffers = scratch();
  if (!buffers.is_touched[block]) buffers.touched.push_back(block);
  buffers.is_touched[block] = 1;
}

template <class Change> void edit(float *logits, const Edits &edits, Change change) {
  auto &buffers = scratch();
  for (int64_t i = 0; i < edits.count; ++i) {
    float *logit = logits + edits.ids[i];
    const int64_t block = edits.ids[i] / kBlock;
    const float before = *logit;
    buffers.undo.emplace_back(logit, before);
    *logit = change(before, i);
    if (std::max(before, *logit) >= buffers.highest[block]) touch(block);
  }
}

// Returns the best logit of the row, once the highest of the touched blocks are found again.
template <bool kMasked> float update_touched(const Logits<kMasked> &row) {
  auto &buffers = scratch();
  for (const int64_t block : buffers.touched) {
    buffers.highest[block] = highest_of_block(row, block);
    buffers.is_touched[block] = 0;
  }
  buffers.touched.clear();
  Floats<kLanes> best = Floats<kLanes>{} - kInfinity;
  for (size_t block = 0; block < buffers.highest.size(); block += kLanes) {
    best = larger<kLanes>(load_floats<kLanes>(&buffers.highest[block]), best);
  }
  return highest_lane(best);
}

// Edits the row as its rules say; returns the best logit after that. `highest` has the blocks' highest.
template <bool kMasked> float apply_rules(const SamplingRow &row, const Logits<kMasked> &logits) {
  auto &buffers = scratch();
  buffers.is_touched.resize(buffers.highest.size());
  const auto forbid = [](float, int64_t) { return -kInfinity; };
  for (const Edits &edits : row.repeated) {
    edit(row.logits, edits, [&](float x, int64_t) { return x > 0.0f ? x / row.limits.penalty : x * row.limits.penalty; });
  }
  edit(row.logits, row.lowered, [&](float x, int64_t i) { return x - row.lowered.values[i]; });
  edit(row.logits, row.biased, [&](float x, int64_t i) { return x + row.biased.values[i]; });
  edit(row.logits, row.forbidden, forbid);
  float best = update_touched(logits);
  if (row.stops.count > 0) {
    const size_t num_before = buffers.undo.size();
    edit(row.logits, row.stops, forbid);
    if (const float left = update_touched(logits); left > -kInfinity) return left;
    for (size_t i = buffers.undo.size(); i-- > num_before;) {
      *buffers.undo[i].first = buffers.undo[i].second;
      touch((buffers.undo[i].first - row.logits) / kBlock);
    }
    buffers.undo.resize(num_before);
    best = update_touched(logits);
  }
  return best;
}

// Finds the highest logits of the blocks, and the best of the row without its mask: NaN if there is one.
template <bool kMasked> float find_highest(const Logits<kMasked> &logits) {
  const Logits<false> raw{logits.x, nullptr, logits.size};
  const int64_t num_blocks = (logits.size + kBlock - 1) / kBlock;
  auto &highest = scratch().highest;
  highest.resize((num_blocks + kLanes - 1) / kLanes * kLanes);
  Floats<kLanes> best = Floats<kLanes>{} - kInfinity;
  Ints<kLanes> broken{};
  for (int64_t first = 0; first < num_blocks; first += kLanes) {
    Floats<kLanes> tops[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      Floats<kLanes> top = Floats<kLanes>{} - kInfinity, raw_top = top;
      for_vectors(raw, first + i, [&](int64_t at, Floats<kLanes> x) {
        broken |= x != x;
        raw_top = larger<kLanes>(x, raw_top);
        if constexpr (kMasked) top = larger<kLanes>(logits.masked(at, x), top);
      });
      best = larger<kLanes>(raw_top, best);
      tops[i] = kMasked ? top : raw_top;
    }
    store(&highest[first], joined_each(tops, [](auto a, auto b) { return larger<kLanes>(a, b); }));
  }
  return joined<kLanes>(broken, [](auto a, auto b) { return a | b; }) ? __builtin_nanf("") : highest_lane(best);
}

// Returns a token, and the best logits before and after the rules.
template <bool kMasked> std::tuple<int64_t, float, float> sample_row(const SamplingRow &row, const uint32_t *mask, int64_t size) {
  const Logits<kMasked> logits{row.logits, mask, size};
  auto &buffers = scratch();
  buffers.undo.clear();
  const float best_raw = find_highest(logits);
  if (std::isnan(best_raw)) return {0, best_raw, best_raw};
  const float best = row.has_edits() ? apply_rules(row, logits) : update_touched(logits);
  int64_t token = 0;
  if (std::isfinite(best)) {
    if (row.limits.scale > 0.0f) {
      Sampler<kMasked> sampler(logits, best, row.limits.scale);
      sampler.limit(row.limits);
      token = sampler.draw(row.uniform);
    } else {
      token = (std::find(buffers.highest.begin(), buffers.highest.end(), best) - buffers.highest.begin()) * kBlock;
      while (logits.at(token) != best) ++token;
    }
  }
  for (size_t i = buffers.undo.size(); i-- > 0;) *buffers.undo[i].first = buffers.undo[i].second;
  return {token, best_raw, best};
}

// ---- log probabilities ---------------------------------------------------------------------------------------------

// The log probability and the rank, from 1, of a token, and the best tokens with theirs. NaN where the row is broken.
void rate_row(const float *x, int64_t size, int64_t token, int64_t num_best, float *logprob, int64_t *rank, float *values,
              int64_t *ids) {
  const Logits<false> row{x, nullptr, size};
  auto &buffers = scratch();
  const float highest = find_highest(row);
  std::fill(values, values + num_best, __builtin_nanf(""));
  std::fill(ids, ids + num_best, 0);
  *logprob = __builtin_nanf("");
  *rank = 1;
  if (!std::isfinite(highest)) return;
  Sampler<false> sampler(row, highest, 0x1.715476p0f);  // log2(e)
  const double log_total = double(highest) + std::log(double(sampler.sum_blocks()) * 0x1p-43);
  *logprob = float(double(x[token]) - log_total);
  Words<kLanes> higher{};
  for (size_t block = 0; block < buffers.highest.size(); ++block) {
    if (buffers.highest[block] > x[token]) for_vectors(row, block, [&](int64_t, Floats<kLanes> logits) {
      higher -= (Words<kLanes>)(logits > x[token]);
    });
  }
  *rank = 1 + sum_lanes(higher);
  if (num_best == 0) return;
  const float bound = sampler.bound_of(num_best, -kInfinity);
  auto &best = buffers.best;
  best.clear();
  for (size_t block = 0; block < buffers.highest.size(); ++block) {
    if (buffers.highest[block] < bound) continue;
    const int64_t stop = std::min(int64_t(block + 1) * kBlock, size);
    for (int64_t i = block * kBlock; i < stop; ++i) {
      if (x[i] >= bound) best.emplace_back(-x[i], i);
    }
  }
  std::partial_sort(best.begin(), best.begin() + num_best, best.end());
  for (int64_t i = 0; i < num_best; ++i) {
    values[i] = float(double(-best[i].first) - log_total);
    ids[i] = best[i].second;
  }
}

}  // namespace
