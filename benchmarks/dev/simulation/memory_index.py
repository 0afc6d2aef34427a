"""The prefix index in memory: the index of simulations, and the oracle that tests compare the Redis index with.

It has the epochs, leases and prefix-closed sets of the shared index, and none of its failures.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from cache.hashing import index_entry
from cache.records import Candidate, WorkerLoad, WorkerMember
from cache.types import BlockHash, IndexEntry, TierName, WorkerId


@dataclass(slots=True, eq=False)
class _Entry:
    member: WorkerMember
    load: WorkerLoad
    deadline_s: float
    written_s: float
    held: set[IndexEntry]
    held_in_tiers: list[set[IndexEntry]]


class MemoryIndex:
    """Both sides of the index: what workers write, and a `cache.records.PrefixIndex` that never fails."""

    def __init__(self, clock: Callable[[], float], lease_s: float = 6.0) -> None:
        """Take the time, in seconds, from `clock`."""
        self._clock = clock
        self._lease_s = lease_s
        self._entries: dict[WorkerId, _Entry] = {}

    def register(
        self,
        member: WorkerMember,
        held: Iterable[BlockHash] = (),
        load: WorkerLoad | None = None,
        held_in_tiers: Mapping[TierName, Iterable[BlockHash]] | None = None,
    ) -> None:
        """Begin an epoch or a set version of a worker, which holds `held` and nothing from before."""
        now = self._clock()
        blocks = {index_entry(block_hash) for block_hash in held}
        below = [{index_entry(h) for h in (held_in_tiers or {}).get(tier, ())} for tier in member.tiers]
        self._entries[member.worker_id] = _Entry(member, load or WorkerLoad(), now + self._lease_s, now, blocks, below)

    def publish(
        self,
        worker_id: WorkerId,
        stored: Iterable[BlockHash] = (),
        removed: Iterable[BlockHash] = (),
        load: WorkerLoad | None = None,
    ) -> None:
        """Change a worker's set, replace its load and renew its lease."""
        entry = self._entries[worker_id]
        entry.held.update(index_entry(block_hash) for block_hash in stored)
        entry.held.difference_update(index_entry(block_hash) for block_hash in removed)
        entry.load = entry.load if load is None else load
        entry.written_s = self._clock()
        entry.deadline_s = entry.written_s + self._lease_s

    def retire(self, worker_id: WorkerId) -> None:
        """Forget a worker."""
        self._entries.pop(worker_id, None)

    def clear(self) -> None:
        """Forget every worker, as FLUSHALL does."""
        self._entries.clear()

    async def lookup(
        self, hashes: Sequence[BlockHash], model: str | None = None, num_tokens: int = 0
    ) -> list[Candidate] | None:
        """Answer `match` through the protocol of a reader."""
        return self.match(hashes, model)

    def match(self, hashes: Sequence[BlockHash], model: str | None = None) -> list[Candidate]:
        """Return every live worker and the length of its match."""
        now = self._clock()
        candidates = []
        for entry in self._entries.values():
            if entry.deadline_s > now and (model is None or entry.member.model == model):
                lengths = [num_matched(entry.held, hashes)]
                for held in entry.held_in_tiers:
                    lengths.append(num_matched(held, hashes, lengths[-1]))
                age_s = now - entry.written_s
                candidates.append(Candidate(entry.member, entry.load, lengths[0], age_s, tuple(lengths[1:])))
        return candidates


def num_matched(held: set[IndexEntry], hashes: Sequence[BlockHash], base: int = 0) -> int:
    """Return the length of the prefix of `hashes` that is in the prefix-closed `held`, or held already: `base`."""
    if base < len(hashes) and index_entry(hashes[base]) not in held:
        return base
    return bisect_left(hashes, True, base, key=lambda block_hash: index_entry(block_hash) not in held)
