"""The prefixes that requests share most: a tree is built from a pool's blocks when somebody asks for it, never before.

    root --[ a b c ]--+--[ d e ]    hits 7        a request counts where its match ended, and at every block above
       hits 9         +--[ f ]      hits 1        here c is reported (9), e (7) and f (1), not what lies between

A pool gives its runs quickly (`Allocator.prefix_runs`); everything else here may happen in another thread.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from cache.types import BlockHash


class PrefixRun(NamedTuple):
    """Consecutive blocks of a chain as a pool knows them."""

    parent: BlockHash
    """The block before the first, or the root of the chain."""
    hashes: Sequence[BlockHash]
    num_references: int
    """Sequences that hold the blocks now."""
    num_hits: int
    """Requests whose match ended with the last of the blocks."""
    idle_accesses: int
    """Accesses to the pool since the blocks were used; 0 while they are held."""


@dataclass(frozen=True, slots=True)
class SharedPrefix:
    path: tuple[BlockHash, ...]
    """The chain's root, then the reported prefixes above this one, then this one's last block."""
    num_blocks: int
    num_references: int
    num_hits: int
    """Requests that found it, all of it, since its blocks were stored."""
    idle_accesses: int


def top_prefixes(runs: Iterable[PrefixRun], limit: int) -> list[SharedPrefix]:
    """The prefixes that were found, those first that spared most blocks. `runs` has parents before children."""
    runs = list(runs)
    position = {run.hashes[-1]: index for index, run in enumerate(runs)}
    parents = [position.get(run.parent, -1) for run in runs]
    depths, hits = [0] * len(runs), [run.num_hits for run in runs]
    for index, (run, parent) in enumerate(zip(runs, parents, strict=True)):
        assert parent < index, "a child before its parent"
        depths[index] = len(run.hashes) + (depths[parent] if parent >= 0 else 0)
    passed_on = [0] * len(runs)  # the most hits that one child has
    for index in range(len(runs) - 1, -1, -1):
        if (parent := parents[index]) >= 0:
            hits[parent] += hits[index]
            passed_on[parent] = max(passed_on[parent], hits[index])
    reported = [index for index in range(len(runs)) if hits[index] > passed_on[index]]
    best = heapq.nlargest(limit, reported, key=lambda index: (hits[index] * depths[index], -index))

    def path(index: int) -> tuple[BlockHash, ...]:
        hashes = [runs[index].hashes[-1]]
        while (above := parents[index]) >= 0:
            index = above
            if hits[index] > passed_on[index]:
                hashes.append(runs[index].hashes[-1])
        return (runs[index].parent, *reversed(hashes))

    return [
        SharedPrefix(path(index), depths[index], runs[index].num_references, hits[index], runs[index].idle_accesses)
        for index in best
    ]
