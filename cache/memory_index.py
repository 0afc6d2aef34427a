"""The prefix index in memory: the model against which the Redis one is tested, and the index of simulations.

It has the semantics of the shared index (epochs, leases, prefix-closed sets) and none of its failures. Time is passed
in as a function, in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from cache.hashing import index_entry
from cache.records import Candidate, WorkerLoad, WorkerMember
from cache.types import BlockHash, IndexEntry, WorkerId


@dataclass(slots=True, eq=False)
class _Entry:
    member: WorkerMember
    load: WorkerLoad
    deadline_s: float
    written_s: float
    held: set[IndexEntry] = field(default_factory=set)


class MemoryIndex:
    """Both sides of the index. `lookup` answers as `cache.records.PrefixIndex` says, and never None."""

    def __init__(self, clock: Callable[[], float], lease_s: float = 6.0) -> None:
        self._clock = clock
        self._lease_s = lease_s
        self._entries: dict[WorkerId, _Entry] = {}

    def register(self, member: WorkerMember, held: Iterable[BlockHash] = (), load: WorkerLoad | None = None) -> None:
        """A worker begins an epoch (or a generation of it): what it held before is gone."""
        now = self._clock()
        blocks = {index_entry(block_hash) for block_hash in held}
        self._entries[member.worker_id] = _Entry(member, load or WorkerLoad(), now + self._lease_s, now, blocks)

    def publish(
        self,
        worker_id: WorkerId,
        stored: Iterable[BlockHash] = (),
        removed: Iterable[BlockHash] = (),
        load: WorkerLoad | None = None,
    ) -> None:
        """Change a worker's set, replace its load, renew its lease."""
        entry = self._entries[worker_id]
        entry.held.update(index_entry(block_hash) for block_hash in stored)
        entry.held.difference_update(index_entry(block_hash) for block_hash in removed)
        entry.load = entry.load if load is None else load
        entry.written_s = self._clock()
        entry.deadline_s = entry.written_s + self._lease_s

    def retire(self, worker_id: WorkerId) -> None:
        self._entries.pop(worker_id, None)

    def clear(self) -> None:
        """What FLUSHALL does."""
        self._entries.clear()

    async def lookup(self, hashes: Sequence[BlockHash], model: str | None = None) -> list[Candidate] | None:
        return self.match(hashes, model)

    def match(self, hashes: Sequence[BlockHash], model: str | None = None) -> list[Candidate]:
        """`lookup` without the event loop. Bisects, because what a worker holds is prefix-closed."""
        now = self._clock()
        return [
            Candidate(entry.member, entry.load, num_matched(entry.held, hashes), now - entry.written_s)
            for entry in self._entries.values()
            if entry.deadline_s > now and (model is None or entry.member.model == model)
        ]


def num_matched(held: set[IndexEntry], hashes: Sequence[BlockHash]) -> int:
    """Length of the prefix of `hashes` in the prefix-closed set `held`."""
    low, high = 0, len(hashes)
    while low < high:
        middle = (low + high) // 2
        if index_entry(hashes[middle]) in held:
            low = middle + 1
        else:
            high = middle
    return low
