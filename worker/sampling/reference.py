"""Limits and the draw of a token in numpy: what worker/kernels/sampling.h computes, bit for bit, for CPUs without it.

The header has the idea. Each step here rounds as its line there.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from worker.kernels.cpu import UNIFORM_BITS
from worker.sampling.rules import FORBIDDEN

Floats = NDArray[np.float32]
Sums = NDArray[np.uint64]
_BLOCK: Final = 64
_UNIT_BITS: Final = 18
_LAST_UNIT: Final = 50
_LAST_T: Final = np.float32(63)
_LAST_IN_BLOCK: Final = 28
_FEW_KEYS: Final = 4096
_ROUNDING: Final = np.float32(1.5 * 2**23)
_POLYNOMIAL: Final = tuple(
    map(np.float32, (0.009671512991189957, -0.05550733581185341, 0.24022242426872253, -0.6931470036506653, 1.0))
)
_FIRST_FACTOR: Final = np.float32(-0.001326472731307149)


def draw(logits: Floats, limits: NDArray[np.void], uniform: int) -> int:
    """Draw from (vocab_size,) logits by a record of LIMITS and a number in units of 2^-53. 0 if none is finite."""
    return Draw(logits, limits).token(uniform) if np.isfinite(logits.max()) else 0


class Draw:
    """The kept logits of a row, in blocks, and their distribution."""

    def __init__(self, logits: Floats, limits: NDArray[np.void]) -> None:
        num_blocks = -(-len(logits) // _BLOCK)
        padded = np.full(num_blocks * _BLOCK, FORBIDDEN, np.float32)
        padded[: len(logits)] = logits
        self._size = len(logits)
        self._blocks = padded.reshape(num_blocks, _BLOCK)
        tops = self._blocks.max(axis=1)
        self._highest = tops.max()
        self._scale = np.float32(limits["scale"])
        self._units = (self._t(tops) + np.float32(0.5)).astype(np.int32)
        self.kept = self._blocks > FORBIDDEN
        self._t_of_all = self._t(self._blocks)
        last = (self._units[:, None] + _LAST_IN_BLOCK).astype(np.float32)
        weights = _weights(np.minimum(self._t_of_all, last), self._units[:, None])
        weights[self._units >= _LAST_UNIT] = 0
        self._weights = weights
        self._limit(limits)

    def token(self, uniform: int) -> int:
        sums = self._in_row(self._weights.sum(axis=1, dtype=np.uint64), self._units)
        ends = sums.cumsum()
        target = int(ends[-1]) * uniform >> UNIFORM_BITS
        block = min(int(np.searchsorted(ends, np.uint64(target), side="right")), len(sums) - 1)
        unit = int(self._units[block])
        target -= int(ends[block]) - int(sums[block])
        target = target >> _UNIT_BITS - unit if unit <= _UNIT_BITS else target << unit - _UNIT_BITS
        in_block = self._weights[block].cumsum(dtype=np.uint64)
        return block * _BLOCK + int(np.searchsorted(in_block, np.uint64(target), side="right"))

    def _limit(self, limits: NDArray[np.void]) -> None:
        if 0 < limits["top_k"] < self._size:
            self._limit_rank(int(limits["top_k"]))
        if limits["top_p"] < 1 << UNIFORM_BITS:
            self._limit_share(int(limits["top_p"]))
        if np.isfinite(limits["min_p_margin"]):
            exact = float(self._highest) - float(limits["min_p_margin"])
            lowest = np.float32(exact)
            self._keep(self._blocks >= (np.nextafter(lowest, np.float32(np.inf)) if float(lowest) < exact else lowest))
        if limits["typical_p"] < 1 << UNIFORM_BITS:
            self._limit_surprise(int(limits["typical_p"]))

    def _t(self, logits: Floats) -> Floats:
        t: Floats = np.minimum((self._highest - logits) * self._scale, _LAST_T)
        return t

    def _in_row(self, sums: Sums, units: NDArray[np.int32]) -> Sums:
        up = np.maximum(_UNIT_BITS - units, 0).astype(np.uint64)
        return (sums << up) >> np.maximum(units - _UNIT_BITS, 0).astype(np.uint64)

    def _keep(self, kept: NDArray[np.bool_]) -> None:
        self.kept &= kept
        self._weights[~self.kept] = 0

    def _weights_of_kept(self) -> Sums:
        """Return the weights of the kept logits in the unit of the row."""
        weights = self._in_row(self._weights.astype(np.uint64), self._units[:, None])
        of_kept: Sums = weights[self.kept]
        return of_kept

    def _total(self) -> int:
        return int(self._in_row(self._weights.sum(axis=1, dtype=np.uint64), self._units).sum())

    def _limit_rank(self, rank: int) -> None:
        lowest = np.partition(self._blocks, self._blocks.size - rank, axis=None)[self._blocks.size - rank]
        if lowest > FORBIDDEN:
            self._keep(self._blocks >= lowest)

    def _limit_share(self, share: int) -> None:
        needed = _share_of(self._total(), share)
        self._keep(self._blocks >= -_last_needed(-self._blocks[self.kept], self._weights_of_kept(), needed))

    def _limit_surprise(self, share: int) -> None:
        total = self._total()
        t = (self._t_of_all * np.float32(2**22)).astype(np.uint64)
        moments = (self._weights.astype(np.uint64) * t).sum(axis=1).tolist()
        moment = sum(
            each << _UNIT_BITS - unit if unit <= _UNIT_BITS else each >> unit - _UNIT_BITS
            for each, unit in zip(moments, self._units.tolist(), strict=True)
        )
        middle = np.float32(moment // total) * np.float32(2.0**-22)
        off = np.abs(self._t_of_all - middle)
        self._keep(off <= _last_needed(off[self.kept], self._weights_of_kept(), _share_of(total, share)))


def _weights(t: Floats, units: NDArray[np.int32]) -> NDArray[np.uint32]:
    shifted = t + _ROUNDING
    f = t - (shifted - _ROUNDING)
    power = np.full_like(f, _FIRST_FACTOR)
    for factor in _POLYNOMIAL:
        power *= f
        power += factor
    exponents = np.int32(127 + 25 + 0x4B400000) + units - shifted.view(np.int32)
    found: NDArray[np.uint32] = (power * (exponents << 23).view(np.float32) + np.float32(0.5)).astype(np.uint32)
    return found


def _last_needed(keys: Floats, weights: Sums, needed: int) -> np.float32:
    """Return the lowest key at which the weights up to it reach `needed`; infinity if they never do."""
    for count in (min(_FEW_KEYS, len(keys)), len(keys)):
        lowest = np.argpartition(keys, count - 1)[:count]
        order = lowest[np.argsort(keys[lowest])]
        place = np.searchsorted(weights[order].cumsum(), np.uint64(needed))
        if place < count:
            last: np.float32 = keys[order[place]]
            return last
    return np.float32(np.inf)


def _share_of(total: int, share: int) -> int:
    return max(1, total * share + (1 << UNIFORM_BITS) - 1 >> UNIFORM_BITS)
