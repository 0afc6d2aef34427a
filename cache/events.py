"""Block events. Replayed in order, they give exactly the set of hashes that a pool holds.

Stored comes with the first copy of a hash and Removed with the last: a set has no copies. Within one batch parents are
stored before children and removed after them. So the set is prefix-closed after every batch.
"""

from __future__ import annotations

from dataclasses import dataclass

from cache.types import BlockHash


@dataclass(frozen=True, slots=True)
class Stored:
    """The first copy of `block_hash` became findable, after the forward that wrote it had returned."""

    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class Removed:
    """The last copy of `block_hash` was evicted."""

    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class Cleared:
    """The whole pool was reset: nothing stored before this event exists. The worker begins a new epoch."""


BlockEvent = Stored | Removed | Cleared


class EventLog:
    """A pool's events in order, noted by runs of hashes; `take` makes the event objects."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[type[Stored] | type[Removed], list[BlockHash]] | Cleared] = []

    def stored(self, hashes: list[BlockHash]) -> None:
        """Note a run of hashes, parents before children."""
        if hashes:
            self._runs.append((Stored, hashes))

    def removed(self, hashes: list[BlockHash]) -> None:
        """Note a run of hashes, children before parents."""
        if hashes:
            self._runs.append((Removed, hashes))

    def cleared(self) -> None:
        """Note that the pool was reset."""
        self._runs.append(Cleared())

    def take(self) -> list[BlockEvent]:
        """Return the events since the last call."""
        runs, self._runs = self._runs, []
        events: list[BlockEvent] = []
        for run in runs:
            if isinstance(run, Cleared):
                events.append(run)
            else:
                kind, hashes = run
                events.extend(map(kind, hashes))
        return events
