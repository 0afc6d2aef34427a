"""The waiting sequences, by priority and then first come, first served, with aging.

The place of a request is its arrival time plus `priority * aging_s` (lower priorities first): a request of priority 1
waits as if it had come `aging_s` later. The place never changes, so nothing starves: every request that arrives late
enough stands behind, whatever its priority. A preempted sequence returns to its old place, before all that came after.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from operator import attrgetter

from worker.scheduler.request import Sequence

_by_order = attrgetter("order")


class OrderedSequences:
    """Sequences kept in their order; used for the waiting and for the running ones."""

    __slots__ = ("_sequences",)

    def __init__(self) -> None:
        self._sequences: list[Sequence] = []

    def add(self, sequence: Sequence) -> None:
        insort(self._sequences, sequence, key=_by_order)

    def remove(self, sequence: Sequence) -> None:
        """Remove `sequence`, which must be here and must not have changed its order."""
        position = bisect_left(self._sequences, sequence.order, key=_by_order)
        assert self._sequences[position] is sequence, f"no sequence at {sequence.order}"
        del self._sequences[position]

    @property
    def last(self) -> Sequence:
        return self._sequences[-1]

    def __iter__(self) -> Iterator[Sequence]:
        """Over a copy: the loop may add and remove."""
        return iter(self._sequences.copy())

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        position = bisect_left(self._sequences, sequence.order, key=_by_order)
        return position < len(self._sequences) and self._sequences[position] is sequence
