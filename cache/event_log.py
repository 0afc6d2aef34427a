"""Where a pool notes what it stored and dropped, a run of hashes at a time; event objects are made when taken."""

from __future__ import annotations

from cache.events import BlockEvent, Cleared, Removed, Stored
from cache.types import BlockHash


class EventLog:
    """Events in order. Within one run of `stored` a parent precedes its child, within `removed` it follows it."""

    __slots__ = ("_runs",)

    def __init__(self) -> None:
        self._runs: list[tuple[type[Stored] | type[Removed], list[BlockHash]] | Cleared] = []

    def stored(self, hashes: list[BlockHash]) -> None:
        if hashes:
            self._runs.append((Stored, hashes))

    def removed(self, hashes: list[BlockHash]) -> None:
        if hashes:
            self._runs.append((Removed, hashes))

    def cleared(self) -> None:
        self._runs.append(Cleared())

    def take(self) -> list[BlockEvent]:
        """Everything since the last call."""
        runs, self._runs = self._runs, []
        events: list[BlockEvent] = []
        for run in runs:
            if isinstance(run, Cleared):
                events.append(run)
            else:
                kind, hashes = run
                events.extend(map(kind, hashes))
        return events
