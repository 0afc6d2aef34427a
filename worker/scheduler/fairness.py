"""Fair share between tenants: the next request is of the tenant that has received the least service.

Service is counted in tokens over the tenant's weight; a sampled token counts as two computed ones. A tenant that
returns starts at the least count of those present, so idleness earns nothing. Within a tenant, and at equal counts, the
queue's order holds.
Source: Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024), the virtual token counter.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush
from typing import Final

from worker.scheduler.request import TokenSequence

SAMPLED_WEIGHT: Final = 2.0  # as in the source


class FairShare:
    """The virtual token counters of the tenants."""

    def __init__(self) -> None:
        self._served: dict[str, float] = {}
        self._num_open: Counter[str] = Counter()
        """Requests in the engine, by tenant."""
        self._weights: dict[str, float] = {}

    def enter(self, tenant: str, weight: float = 1.0) -> None:
        """Count a new request of the tenant, whose last weight applies to all of its requests."""
        self._weights[tenant] = weight
        if tenant not in self._num_open:
            least = min((self._served[present] for present in self._num_open), default=0.0)
            served = max(self._served.get(tenant, 0.0), least)
            # Drop absent tenants whose count is not above the least: they would return at the least count.
            self._served = {t: count for t, count in self._served.items() if t in self._num_open or count > least}
            self._served[tenant] = served
        self._num_open[tenant] += 1

    def leave(self, tenant: str) -> None:
        """Count the end of a request. Counts are kept while any tenant is present."""
        self._num_open[tenant] -= 1
        if not self._num_open[tenant]:
            del self._num_open[tenant], self._weights[tenant]
        if not self._num_open:
            self._served.clear()

    def charge(self, tenant: str, num_tokens: int, num_sampled: int) -> None:
        if len(self._served) > 1:
            self._served[tenant] = self._served.get(tenant, 0.0) + self._service(tenant, num_tokens, num_sampled)

    def order(self, waiting: Iterable[TokenSequence]) -> Iterable[TokenSequence]:
        """Return the waiting sequences, next first. Each counts as served when it is taken."""
        if len(self._num_open) <= 1:
            return waiting
        queues: dict[str, deque[TokenSequence]] = {}
        for sequence in waiting:
            queues.setdefault(sequence.tenant, deque()).append(sequence)
        return self._merge(queues)

    def _merge(self, queues: dict[str, deque[TokenSequence]]) -> Iterator[TokenSequence]:
        heap = [(self._served.get(tenant, 0.0), queue[0].order, tenant) for tenant, queue in queues.items()]
        heapify(heap)
        while heap:
            served, _, tenant = heappop(heap)
            queue = queues[tenant]
            sequence = queue.popleft()
            num_choices = len(sequence.choices)  # admission may take only some of its choices
            yield sequence
            if queue:
                served += self._service(tenant, sequence.num_pending, num_choices * sequence.sampling.max_tokens)
                heappush(heap, (served, queue[0].order, tenant))

    def _service(self, tenant: str, num_tokens: int, num_sampled: int) -> float:
        return (num_tokens + SAMPLED_WEIGHT * num_sampled) / self._weights.get(tenant, 1.0)
