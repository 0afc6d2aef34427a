"""The work of a fleet with a larger or smaller cache, from the ages of blocks that come back.

A block's age is the time since a prompt last had it: younger blocks are found more often. Twice the workers keep blocks
twice as long. So they find blocks of an age as often as today's fleet finds blocks of half that age.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

from cache.types import HASH_BYTES, BlockHash

MAX_BLOCKS: Final = 1 << 15
"""Remembered blocks. With more, those not seen for `FORGET_S` are forgotten. If most are younger, every second one is,
and later only every second block is remembered."""
FORGET_S: Final = float(1 << 17)
"""A block that no prompt has had for this time counts as new."""
SAMPLED_TOKENS: Final = 256
"""One block of a prompt is looked at in that many tokens."""
NUM_AGES: Final = 18
"""Ages by powers of two seconds, up to `FORGET_S`."""
_NEVER: Final = NUM_AGES


class ReuseAges:
    """Counts by age the blocks of one model's prompts, and those that were cached."""

    def __init__(self) -> None:
        self._seen_s: dict[BlockHash, float] = {}
        self._limit = 1 << 32
        """Only blocks whose hash begins with a lower number are remembered."""
        self._cached = [0.0] * (NUM_AGES + 1)
        self._all = [0.0] * (NUM_AGES + 1)

    def add(self, hashes: Sequence[BlockHash], num_cached: int, block_size: int, now_s: float) -> None:
        """Count the blocks of a prompt, of which the first `num_cached` were found."""
        stride = max(1, SAMPLED_TOKENS // block_size)
        seen_s, end = self._seen_s, self._end()
        for at in range(stride - 1, len(hashes), stride):
            block_hash = hashes[at]
            if block_hash >= end:
                continue
            before_s = seen_s.get(block_hash)
            age = _NEVER if before_s is None else min(_NEVER, max(0, math.frexp(now_s - before_s)[1]))
            self._all[age] += 1.0
            if at < num_cached:
                self._cached[age] += 1.0
            seen_s[block_hash] = now_s
        if len(seen_s) > MAX_BLOCKS:
            self._forget(now_s - FORGET_S)

    def _forget(self, before_s: float) -> None:
        seen_s = {key: at_s for key, at_s in self._seen_s.items() if at_s > before_s}
        if len(seen_s) > MAX_BLOCKS // 2:
            self._limit //= 2
            end = self._end()
            seen_s = {key: at_s for key, at_s in seen_s.items() if key < end}
        self._seen_s = seen_s

    def _end(self) -> bytes:
        return self._limit.to_bytes(5, "big")[1:] if self._limit < 1 << 32 else b"\xff" * (HASH_BYTES + 1)

    def fade(self, share: float) -> None:
        """Keep only this share of what was counted."""
        self._cached = [share * number for number in self._cached]
        self._all = [share * number for number in self._all]

    def missed_ratio(self, scale: float) -> float:
        """Return the tokens that a fleet of `scale` times the workers would compute, over those of today's fleet.

        From half to twice the fleet; beyond, the same as there.
        """
        num_all, num_cached = sum(self._all), sum(self._cached)
        if num_all <= num_cached:
            return 1.0
        shift = max(-1.0, min(1.0, math.log2(scale)))
        found = [cached / total if total else None for cached, total in zip(self._cached, self._all, strict=True)]
        change = 0.0
        for age in range(NUM_AGES):
            ours, theirs = found[age], found[min(NUM_AGES - 1, max(0, age - 1 if shift > 0.0 else age + 1))]
            if ours is None or theirs is None:
                continue
            # A larger fleet never finds less of an age.
            moved = (theirs - ours) * abs(shift)
            change += self._all[age] * (max(0.0, moved) if shift > 0.0 else min(0.0, moved))
        return 1.0 - change / (num_all - num_cached)
