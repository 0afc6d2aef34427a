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
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
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
    came_tokens: float
    """The virtual time at which it came."""
    since_s: float
    due_s: float
    """Unless it is its model's first, do not decide again before this time: only an event changes the outcome."""
    order: tuple[bool, int, float] = (True, 0, 0.0)
    """Its place: new, priority, the tenant's turn. Of equals, the first to come."""

    def take_turn(self, ends: dict[str, float]) -> float:
        """Return its turn, after which the tenant's prompts end later. A retry has taken its own before."""
        request = self.request
        turn = max(self.came_tokens, ends.get(request.tenant, 0.0))
        if not request.is_retry:
            ends[request.tenant] = turn + request.num_prompt_tokens / request.weight
        return turn


@dataclass(slots=True)
class _Turns:
    """Virtual time of a model and priority, in prompt tokens over weight."""

    now: float = 0.0
    """The turn of the latest tenant that was served."""
    next: dict[str, float] = field(default_factory=dict)
    """By tenant: where the prompts end that were served to it. Those that still wait follow, in `due`."""


# Why workers have no slots here: with one request a worker, agents waited 8.0 s for a first token instead of 2.1. Two
# ways to hold new sessions while live ones fill the pools gave 3.93 and 4.50 s, instead of 4.14
# (benchmarks/RESULTS.md).
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
        self._turns = defaultdict[tuple[str, int], _Turns](_Turns)
        """By model and priority."""

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
        came_tokens = self._turns[request.model, request.priority].now
        held = HeldRequest(item, request, prefill_s, came_tokens, now_s, now_s)
        held.due_s = self._due_s(held, wait_s, now_s)
        self._held.append(held)
        return held

    def due(self, now_s: float) -> list[HeldRequest[T]]:
        """Return the requests to decide again, in order. The first of each model is decided at every turn.

        Its wait may end at once: a worker joins, a client leaves, a request ends sooner than predicted.
        """
        ends = {own: turns.next.copy() for own, turns in self._turns.items()}
        for held in self._held:
            request = held.request
            turn = held.take_turn(ends[request.model, request.priority])
            held.order = not request.is_retry, request.priority, turn
        in_order = sorted(self._held, key=_by_order)
        first = {held.request.model: held for held in reversed(in_order)}
        return [held for held in in_order if held.due_s <= now_s or held is first[held.request.model]]

    def stays(self, held: HeldRequest[T], wait_s: float, now_s: float) -> bool:
        """Return whether it stays in the queue, given that it would still wait `wait_s` at its worker."""
        if wait_s > max(self.hold_s, (now_s - held.since_s) * WAIT_SHARE):
            held.due_s = self._due_s(held, wait_s, now_s)
            return True
        if not held.request.is_retry:
            turns = self._turns[held.request.model, held.request.priority]
            turns.now = max(turns.now, held.take_turn(turns.next))
        return False

    def remove(self, held: HeldRequest[T]) -> None:
        """Remove it: it is placed, or its client has left. Its model's turns of its priority end with the last one."""
        self._held.remove(held)
        own = held.request.model, held.request.priority
        if all((other.request.model, other.request.priority) != own for other in self._held):
            del self._turns[own]

    def _due_s(self, held: HeldRequest[T], wait_s: float, now_s: float) -> float:
        """Return when its wait is short enough: a worker computes a second of its queue in a second."""
        at_worker_s = min(wait_s - self.hold_s, (wait_s - WAIT_SHARE * (now_s - held.since_s)) / (1.0 + WAIT_SHARE))
        return now_s + max(RETRY_S, at_worker_s)
