"""The waits at this gateway for a worker, and their bound.

    bound    prompt tokens that wait for a first token, here and at workers, in equal shares for tenants
    full     workers that have just refused a tenant: the gateway answers a flood by itself
    held     requests that would wait long at their worker

A held request is placed when its wait at the worker would be short: at most `hold_s`, or a tenth of its wait so far.
The worker is chosen at that time: late binding. Short prompts seldom wait, since they pass long ones at workers.
Retries come first, then requests by priority, then tenants in turn, by their prompt tokens over their weight.

Source of the turns: Goyal et al., "Start-time Fair Queueing" (SIGCOMM 1996).
"""

from __future__ import annotations

import time
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from operator import attrgetter
from typing import Final, Generic, TypeVar

from cache.types import WorkerIncarnation
from server.rates import DecayedSum
from server.router.types import QueueFullError, RouteRequest
from server.workers.connection import WorkerRefused

T = TypeVar("T")

RETRY_S: Final = 0.05
"""The least time between two decisions about a held request."""
WAIT_SHARE: Final = 0.1
"""Release a request when its predicted wait at the worker is at most this fraction of its wait so far."""
PAUSE_S: Final = 0.25
"""Between two searches of a request that no worker can take: one may return or start in it."""
FULL_S: Final = 0.1
"""Short compared with the full queue: the worker is asked again long before it is idle."""
THROUGHPUT_WINDOW_S: Final = 10.0  # half of it would follow one long prompt; twice would follow a rush late
MAX_DRAIN_S: Final = 60.0  # bounds the advised wait: the load changes sooner
Refusals = Mapping[WorkerIncarnation, WorkerRefused]
_by_order: Final = attrgetter("order")


@dataclass(slots=True, eq=False)
class HeldRequest(Generic[T]):
    """A request in the queue, and its owner's item."""

    item: T
    request: RouteRequest
    prefill_s: float
    """At the worker of the first decision."""
    order: tuple[bool, int, float, int]
    """Its place: new, priority, the tenant's turn, arrival."""
    since_s: float
    due_s: float
    """Unless it is its model's first, do not decide again before this time: only an event changes the outcome."""
    is_released: bool = False


class RequestQueue(Generic[T]):
    """Owned by the gateway's event loop."""

    def __init__(
        self, hold_s: float = 0.0, max_tokens: int = 4_000_000, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`hold_s`: requests with a longer wait at their worker are held; 0.0: none is. `max_tokens`: the bound."""
        self.hold_s = hold_s
        self._max_tokens = max_tokens
        self._clock = clock
        self.num_tokens = 0
        """Prompt tokens without a first token."""
        self._tokens_by_tenant: dict[str, int] = {}
        self._released = DecayedSum(THROUGHPUT_WINDOW_S)
        self._full: dict[str, dict[WorkerIncarnation, tuple[float, WorkerRefused]]] = {}
        """By tenant: until when, and the refusal."""
        self._held: list[HeldRequest[T]] = []
        self._next_turn = defaultdict[tuple[str, int], dict[str, float]](dict)
        """By model and priority, then tenant, in prompt tokens of virtual time."""
        self._now_tokens = defaultdict[tuple[str, int], float](float)
        """By model and priority: virtual time, which is the turn of the latest tenant that was served."""
        self._arrivals = count()
        self._gone: set[HeldRequest[T]] = set()  # their clients have left: later requests move up

    # --- the bound ----------------------------------------------------------------------------------------------

    def enter(self, tenant: str, num_tokens: int) -> None:
        """Count a prompt as waiting, until it leaves once. Raises QueueFullError."""
        own = self._tokens_by_tenant.get(tenant, 0)
        num_tenants = len(self._tokens_by_tenant)
        if own and num_tenants * (own + num_tokens) > self._max_tokens:
            tokens_per_s = self._released.at(self._clock()) / THROUGHPUT_WINDOW_S
            drain_s = min(MAX_DRAIN_S, own * num_tenants / tokens_per_s) if tokens_per_s else 1.0
            raise QueueFullError(f"{own} prompt tokens wait already.", retry_after_s=drain_s)
        self._tokens_by_tenant[tenant] = own + num_tokens
        self.num_tokens += num_tokens

    def leave(self, tenant: str, num_tokens: int) -> None:
        """Count a prompt's first token, or its end."""
        self._tokens_by_tenant[tenant] -= num_tokens
        if not self._tokens_by_tenant[tenant]:
            del self._tokens_by_tenant[tenant]
        self.num_tokens -= num_tokens
        self._released.add(num_tokens, self._clock())

    # --- full workers -------------------------------------------------------------------------------------------

    def refused(self, worker: WorkerIncarnation, tenant: str, refusal: WorkerRefused) -> None:
        """Remember that the worker's queue is full for the tenant."""
        until_s = self._clock() + min(FULL_S, refusal.retry_after_s)
        self._full[tenant] = {**self._full.pop(tenant, {}), worker: (until_s, refusal)}
        for oldest in [*islice(self._full, 2)]:  # else a tenant that never comes again would stay
            self.full(oldest)

    def full(self, tenant: str) -> Refusals:
        """Return the workers that are still full for the tenant, each with its last refusal."""
        now_s, known = self._clock(), self._full.get(tenant, {})
        full = {worker: refusal for worker, (until_s, refusal) in known.items() if until_s > now_s}
        if not full:
            self._full.pop(tenant, None)
        return full

    # --- held requests ------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._held)

    def prefills_s(self, model: str) -> list[float]:
        """Return the prefill seconds of each held request of a model."""
        return [held.prefill_s for held in self._held if held.request.model == model]

    def holds(self, request: RouteRequest, wait_s: float) -> bool:
        """Return whether to hold a request that would wait `wait_s`: a new one, without budget, for any worker."""
        is_free = request.ttft_budget_s is None and request.numerics is None and not request.hard_affinity
        return is_free and 0.0 < self.hold_s < wait_s

    def hold(
        self, item: T, request: RouteRequest, wait_s: float, now_s: float, prefill_s: float = 0.0
    ) -> HeldRequest[T]:
        """Hold a request of which `holds` is true."""
        own = request.model, request.priority
        turn = max(self._now_tokens[own], self._next_turn[own].get(request.tenant, 0.0))
        if not request.is_retry:  # its turn was taken before
            self._next_turn[own][request.tenant] = turn + request.num_prompt_tokens / request.weight
        order = not request.is_retry, request.priority, turn, next(self._arrivals)
        held = HeldRequest(item, request, prefill_s, order, now_s, now_s)
        held.due_s = self._due_s(held, wait_s, now_s)
        insort(self._held, held, key=_by_order)
        return held

    def due(self, now_s: float) -> list[HeldRequest[T]]:
        """Return the requests to decide again, in order. The first of each model is decided at every turn.

        Its wait may end at once: a worker joins, a client leaves, a request ends sooner than predicted.
        """
        if self._gone:
            self._move_up()
        first = {held.request.model: held for held in reversed(self._held)}
        return [held for held in self._held if held.due_s <= now_s or held is first[held.request.model]]

    def stays(self, held: HeldRequest[T], wait_s: float, now_s: float) -> bool:
        """Return whether it stays in the queue, given that it would still wait `wait_s` at its worker."""
        if wait_s <= max(self.hold_s, (now_s - held.since_s) * WAIT_SHARE):
            held.is_released = True
            if not held.request.is_retry:  # its tenant's first turn counts: requests may pass one that waits on
                own = held.request.model, held.request.priority
                first = next(self._in_turn(own, held.request.tenant))
                self._now_tokens[own] = max(self._now_tokens[own], first.order[2])
            return False
        held.due_s = self._due_s(held, wait_s, now_s)
        return True

    def remove(self, held: HeldRequest[T]) -> None:
        """Remove it: it is placed, or its client has left. The turns end with the last request that has one."""
        self._held.remove(held)
        own = held.request.model, held.request.priority
        if next(self._in_turn(own), None) is None:
            self._next_turn.pop(own, None)
            self._now_tokens.pop(own, None)
            self._gone = {gone for gone in self._gone if (gone.request.model, gone.request.priority) != own}
        elif not (held.is_released or held.request.is_retry):
            self._gone.add(held)

    def _move_up(self) -> None:
        """Move the later requests of tenants whose clients have left up, in one pass: thousands may leave at once."""
        freed = defaultdict[tuple[tuple[str, int], str], float](float)
        for held in sorted([*self._held, *self._gone], key=_by_order):
            own, tenant = (held.request.model, held.request.priority), held.request.tenant
            held.order = *held.order[:2], held.order[2] - freed[own, tenant], held.order[3]
            if held in self._gone:
                num_tokens = held.request.num_prompt_tokens / held.request.weight
                freed[own, tenant] += num_tokens
                self._next_turn[own][tenant] -= num_tokens
        self._gone.clear()
        self._held.sort(key=_by_order)

    def _in_turn(self, own: tuple[str, int], tenant: str | None = None) -> Iterator[HeldRequest[T]]:
        """Yield the held requests of a model and priority that are no retries: of all tenants, or one."""
        for held in self._held:
            is_own = held.order[0] and (held.request.model, held.order[1]) == own
            if is_own and tenant in (None, held.request.tenant):
                yield held

    def _due_s(self, held: HeldRequest[T], wait_s: float, now_s: float) -> float:
        """Return when its wait is short enough: a worker computes a second of its queue in a second."""
        at_worker_s = min(wait_s - self.hold_s, (wait_s - WAIT_SHARE * (now_s - held.since_s)) / (1.0 + WAIT_SHARE))
        return now_s + max(RETRY_S, at_worker_s)
