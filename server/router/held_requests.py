"""The queue of requests that this gateway holds because each would wait long at its worker. It has no I/O.

A held request is placed when its wait at the worker would be short: at most `hold_s`, or a tenth of its wait so far.
The worker is chosen at that time: late binding. Short prompts seldom wait, since they pass long ones at workers.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Final, Generic, TypeVar

from server.router.types import RouteRequest

T = TypeVar("T")

RETRY_S: Final = 0.05
"""The least time between two decisions about a held request."""
WAIT_SHARE: Final = 0.1
"""Release a request when its predicted wait at the worker is at most this fraction of its wait so far."""
_by_order: Final = attrgetter("order")


@dataclass(slots=True, eq=False)
class HeldRequest(Generic[T]):
    """An item of the queue."""

    item: T
    order: tuple[int, float, int]
    """Its place: priority, the tenant's turn, arrival."""
    since_s: float
    due_s: float
    """Do not decide again before this time: the outcome cannot change."""


class HeldRequests(Generic[T]):
    """Held requests by priority, then tenants in turn, by their prompt tokens over their weight, then by arrival.

    Source of the turns: Goyal et al., "Start-time Fair Queueing" (SIGCOMM 1996).
    """

    def __init__(self, hold_s: float) -> None:
        """`hold_s`: requests with a longer wait at their worker are held; 0.0: none is."""
        self.hold_s = hold_s
        self._queue: list[HeldRequest[T]] = []
        self._turn_tokens = 0.0
        """The turn of the last request that left, in prompt tokens of virtual time."""
        self._next_turn: dict[str, float] = {}
        """By tenant."""
        self._num_added = 0

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[HeldRequest[T]]:
        return iter(self._queue)

    def add(self, item: T, request: RouteRequest, wait_s: float, now_s: float) -> HeldRequest[T] | None:
        """Hold a request that would wait `wait_s` at its worker. Return None if it need not be held."""
        if not 0.0 < self.hold_s < wait_s:
            return None
        turn = max(self._turn_tokens, self._next_turn.get(request.tenant, 0.0))
        self._next_turn[request.tenant] = turn + request.num_prompt_tokens / request.weight
        self._num_added += 1
        held = HeldRequest(item, (request.priority, turn, self._num_added), now_s, self._due_s(wait_s, 0.0, now_s))
        insort(self._queue, held, key=_by_order)
        return held

    def due(self, now_s: float) -> list[HeldRequest[T]]:
        """Return the requests to decide again, in order."""
        return [held for held in self._queue if held.due_s <= now_s]

    def stays(self, held: HeldRequest[T], wait_s: float, now_s: float) -> bool:
        """Return whether it stays in the queue, given that it would still wait `wait_s` at its worker."""
        waited_s = now_s - held.since_s
        if wait_s <= max(self.hold_s, waited_s * WAIT_SHARE):
            return False
        held.due_s = self._due_s(wait_s, waited_s, now_s)
        return True

    def remove(self, held: HeldRequest[T]) -> None:
        """Remove it: it is placed, or its client has left."""
        self._queue.remove(held)
        self._turn_tokens = max(self._turn_tokens, held.order[1])
        if not self._queue:
            self._turn_tokens = 0.0
            self._next_turn.clear()

    def _due_s(self, wait_s: float, waited_s: float, now_s: float) -> float:
        """Return the earliest time of its release: a worker computes a second of its queue in a second."""
        at_worker_s = min(wait_s - self.hold_s, (wait_s - WAIT_SHARE * waited_s) / (1.0 + WAIT_SHARE))
        return now_s + max(RETRY_S, at_worker_s)
