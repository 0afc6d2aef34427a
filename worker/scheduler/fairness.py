"""Whose request starts next when several tenants wait: that of the tenant who has had the least service.

Service is counted in tokens, a drawn one as two computed ones. A tenant that comes back after a while begins at the
least count of those who are here, so that idleness saves nothing up, and a tenant alone is not held back by anything.
Within a tenant, and between tenants with the same count, the order of the queue holds.
Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), the virtual token counter.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from worker.scheduler.request import TokenSequence

DRAWN_WEIGHT: Final = 2.0
_MIN_PRUNED: Final = 64
"""Tenants among whom it is worth to look for those who can be forgotten."""


class FairShare:
    """Counts what each tenant was served. Used by the engine's thread."""

    __slots__ = ("_max_served", "_open", "_served")

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._max_served = _MIN_PRUNED
        self._open: Counter[str] = Counter()

    def enter(self, tenant: str) -> None:
        """A request of the tenant has come."""
        if tenant not in self._open:
            least = self._least
            if len(self._served) > self._max_served:
                self._prune(least)
            self._served[tenant] = max(self._served.get(tenant, 0.0), least)
        self._open[tenant] += 1

    def leave(self, tenant: str) -> None:
        """A request of the tenant has ended. A debt is remembered while others are here."""
        self._open[tenant] -= 1
        if not self._open[tenant]:
            del self._open[tenant]
        if not self._open:
            self._served.clear()

    def charge(self, tenant: str, num_tokens: int, num_drawn: int) -> None:
        if len(self._served) > 1:
            self._served[tenant] = self._served.get(tenant, 0.0) + _service(num_tokens, num_drawn)

    @property
    def _least(self) -> float:
        """Service of the tenant who is here and has had the least."""
        return min((self._served[tenant] for tenant in self._open), default=0.0)

    def _prune(self, least: float) -> None:
        """Forget those who have gone and would come back at the least count anyway."""
        self._served = {t: served for t, served in self._served.items() if t in self._open or served > least}
        self._max_served = max(_MIN_PRUNED, 2 * len(self._served))

    def order(self, waiting: Iterable[TokenSequence]) -> Iterable[TokenSequence]:
        """The waiting, next first, as if each were served as it is taken."""
        if len(self._open) <= 1:
            return waiting
        queues: dict[str, deque[TokenSequence]] = {}
        for sequence in waiting:
            queues.setdefault(sequence.request.wire.tenant, deque()).append(sequence)
        return self._merged(queues)

    def _merged(self, queues: dict[str, deque[TokenSequence]]) -> Iterator[TokenSequence]:
        heap = [(self._served.get(tenant, 0.0), queue[0].order, tenant) for tenant, queue in queues.items()]
        heapify(heap)
        while heap:
            served, _, tenant = heappop(heap)
            queue = queues[tenant]
            sequence = queue.popleft()
            yield sequence
            if queue:
                max_tokens = sequence.request.wire.sampling.max_tokens
                served += _service(sequence.num_pending, len(sequence.choices) * max_tokens)
                heappush(heap, (served, queue[0].order, tenant))


def _service(num_tokens: int, num_drawn: int) -> float:
    return num_tokens + DRAWN_WEIGHT * num_drawn
