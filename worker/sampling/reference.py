"""Limits and the draw of a token in numpy: what worker/kernels/sampling.h computes, bit for bit, for CPUs without it.

The header has the idea. Each step here rounds as its line there.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.kernels.cpu import UNIFORM_BITS, Limits
from worker.sampling.rules import FORBIDDEN

Floats = NDArray[np.float32]
Sums = NDArray[np.uint64]
_BLOCK: Final = 64
_UNIT_BITS: Final = 18
_LAST_UNIT: Final = 50
_LAST_T: Final = np.float32(63)
_LAST_IN_BLOCK: Final = 28
_NEAR: Final = 8
_BINS: Final = 4096
_BLOCKS_AT_ONCE: Final = 512
_ROUNDING: Final = np.float32(1.5 * 2**19)
_FACTORS: Final = np.float32(0.24023355543613434), np.float32(-0.6931878328323364)
_ONE: Final = np.float32(1)
_POWERS: Final = np.exp2(-np.arange(16) / 16).astype(np.float32).view(np.int32) + (np.arange(16, dtype=np.int32) << 19)


def draw(logits: Floats, limits: Limits, uniform: int) -> int:
    """Draw from (vocab_size,) logits by the limits and a number in units of 2^-53. 0 if none is finite."""
    return Draw(logits, limits).token(uniform) if np.isfinite(logits.max()) else 0


class Draw:
    """The kept logits of a row, in blocks, and their distribution."""

    def __init__(self, logits: Floats, limits: Limits) -> None:
        num_blocks = -(-len(logits) // _BLOCK)
        padded = np.full(num_blocks * _BLOCK, FORBIDDEN, np.float32)
        padded[: len(logits)] = logits
        self._size = len(logits)
        self._blocks = padded.reshape(num_blocks, _BLOCK)
        self._tops = np.maximum.reduceat(padded, np.arange(0, len(padded), _BLOCK))
        self._highest = self._tops.max()
        self._scale = np.float32(limits.scale)
        self._units = (self._t(self._tops) + np.float32(0.5)).astype(np.int32)
        self.kept = self._blocks > FORBIDDEN
        self._t_of_all = self._t(self._blocks)
        self._weights = np.empty(self._blocks.shape, np.uint32)
        for first in range(0, num_blocks, _BLOCKS_AT_ONCE):  # which stay in the cache
            part = slice(first, first + _BLOCKS_AT_ONCE)
            self._weights[part] = _weights(self._t_of_all[part], self._units[part, None])
        self._weights[self._units >= _LAST_UNIT] = 0
        self._limit(limits)

    def token(self, uniform: int) -> int:
        sums = self._sums()
        ends = sums.cumsum()
        target = int(ends[-1]) * uniform >> UNIFORM_BITS
        block = min(int(np.searchsorted(ends, np.uint64(target), side="right")), len(sums) - 1)
        unit = int(self._units[block])
        target -= int(ends[block]) - int(sums[block])
        target = target >> _UNIT_BITS - unit if unit <= _UNIT_BITS else target << unit - _UNIT_BITS
        in_block = self._weights[block].cumsum(dtype=np.uint64)
        return block * _BLOCK + int(np.searchsorted(in_block, np.uint64(target), side="right"))

    def _limit(self, limits: Limits) -> None:
        if 0 < limits.top_k < self._size:
            self._limit_rank(int(limits.top_k))
        if limits.top_p < 1 << UNIFORM_BITS:
            self._limit_share(int(limits.top_p))
        if np.isfinite(limits.min_p_margin):
            exact = float(self._highest) - float(limits.min_p_margin)
            lowest = np.float32(exact)
            self._keep(self._blocks >= (np.nextafter(lowest, np.float32(np.inf)) if float(lowest) < exact else lowest))
        if limits.typical_p < 1 << UNIFORM_BITS:
            self._limit_surprise(int(limits.typical_p))

    def _t(self, logits: Floats) -> Floats:
        t: Floats = np.minimum((self._highest - logits) * self._scale, _LAST_T)
        return t

    def _in_row(self, sums: Sums, units: NDArray[np.int32]) -> Sums:
        up = np.maximum(_UNIT_BITS - units, 0).astype(np.uint64)
        return (sums << up) >> np.maximum(units - _UNIT_BITS, 0).astype(np.uint64)

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self.kept &= kept
        self._weights *= kept

    def _sums(self) -> Sums:
        """Return the sums of the blocks in the unit of the row."""
        return self._in_row(self._weights.sum(axis=1, dtype=np.uint32).astype(np.uint64), self._units)

    def _last_key(self, keys: Floats, near: NDArray[np.bool_], total: int, share: int) -> np.float32:
        """Return the lowest key of what is kept at which it has the share. Those that are not near have higher keys."""
        needed = max(1, total * share + (1 << UNIFORM_BITS) - 1 >> UNIFORM_BITS)
        for among in (self.kept & near, self.kept):
            places = among.reshape(-1).nonzero()[0]
            weights = self._in_row(self._weights.reshape(-1)[places].astype(np.uint64), self._units[places // _BLOCK])
            if weights.sum() >= needed:
                return _last_needed(keys.reshape(-1)[places], weights, needed)
        return np.float32(np.inf)

    def _limit_rank(self, rank: int) -> None:
        among = self._blocks
        if rank <= len(self._tops):  # as many logits are as high as the highest of that many blocks
            among = among[among >= np.partition(self._tops, -rank)[-rank]]
        lowest = np.partition(among, -rank, axis=None)[-rank]
        if lowest > FORBIDDEN:
            self._keep(self._blocks >= lowest)

    def _limit_share(self, share: int) -> None:
        near = self._t_of_all <= _NEAR
        self._keep(self._blocks >= -self._last_key(-self._blocks, near, int(self._sums().sum()), share))

    def _limit_surprise(self, share: int) -> None:
        total = int(self._sums().sum())
        t = (self._t_of_all * np.float32(2**22)).astype(np.uint64)
        moments = (self._weights.astype(np.uint64) * t).sum(axis=1).tolist()
        moment = sum(
            each << _UNIT_BITS - unit if unit <= _UNIT_BITS else each >> unit - _UNIT_BITS
            for each, unit in zip(moments, self._units.tolist(), strict=True)
        )
        middle = np.float32(moment // total) * np.float32(2.0**-22)
        off = np.abs(self._t_of_all - middle)
        self._keep(off <= self._last_key(off, off <= _NEAR, total, share))


def _weights(t: Floats, units: NDArray[np.int32]) -> Floats:
    t = np.minimum(t, (units + _LAST_IN_BLOCK).astype(np.float32))
    shifted = t + _ROUNDING
    f = t - (shifted - _ROUNDING)
    power = (f * _FACTORS[0] + _FACTORS[1]) * f + _ONE
    sixteenths = shifted.view(np.int32)
    unscaled = np.take(_POWERS, sixteenths & 15) + ((units + 25) << 23) - (sixteenths << 19)
    found: Floats = np.rint(power * unscaled.view(np.float32))
    return found


def _last_needed(keys: Floats, weights: Sums, needed: int) -> np.float32:
    """Return the lowest key at which the weights up to it reach `needed`, which all together do."""
    while (low := float(keys.min())) < (high := float(keys.max())):
        bins = ((keys - np.float64(low)) * (_BINS / (high - low))).astype(np.int64)
        # Floats count exactly below 2^53, which a half of the bits of weights stays below.
        upper, lower = (np.bincount(bins, part).astype(np.int64) for part in (weights >> 21, weights & (1 << 21) - 1))
        ends = ((upper << 21) + lower).cumsum()
        found = int(np.searchsorted(ends, needed))
        needed -= int(ends[found - 1]) if found else 0
        is_in = bins == found
        keys, weights = keys[is_in], weights[is_in]
    return np.float32(low)
