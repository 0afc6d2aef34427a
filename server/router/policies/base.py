"""What a policy sees, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache.records import WorkerMember
from server.router.cost import CostModel
from server.router.placement import RouteRequest


@dataclass(slots=True, eq=False)
class Option:
    """One worker that could take the request, in everybody's terms."""

    member: WorkerMember
    matched_tokens: int
    """Prompt tokens that the index or the overlay says are cached there, full blocks only."""
    own_s: float
    """Prefill seconds of this request there."""
    wait_s: float
    """Prefill seconds queued there."""
    recent_s: float
    """Prefill seconds assigned to it, decayed over a minute."""
    num_outstanding: int
    """Requests sent there that have not ended."""
    num_waiting: int
    """Requests there whose first token is not out."""
    active_blocks: int
    """Blocks of the outstanding requests."""
    kv_usage: float
    """Part of its pool that running requests hold, 0..1."""
    num_blocks: int = 0
    """Size of its pool, 0 where it is not known."""
    unseen_s: float = 0.0
    """Age of what is known of other gateways' requests there; 0 when there are none."""
    room_s: float = 0.0
    """Seconds until its blocks will fit into the pool there."""
    num_new_blocks: int = 0
    """Of its blocks, those that are not there yet."""
    num_delayed: float = 0.0
    """Requests there that would wait for this one, where workers share themselves out."""
    queued_s: float = 0.0
    """Prefill seconds queued there, with nothing taken off for the one in service."""
    prefill_tokens_per_s: float = 1.0


def mean_draw() -> float:
    """In place of a random number, where nothing is decided."""
    return 0.5


@dataclass(frozen=True, slots=True)
class FleetView:
    """What is true of all workers together."""

    cost: CostModel
    recent_s: float
    """Prefill seconds assigned to the fleet, decayed over a minute."""
    num_workers: int
    draw: Callable[[], float] = mean_draw
    """A random number in 0..1."""


class Policy(Protocol):
    """Owned by one dispatcher; may keep state of its own."""

    def scores(self, request: RouteRequest, options: Sequence[Option], fleet: FleetView) -> Sequence[float]:
        """One score an option, the least wins, equals are drawn at random."""

    def placed(self, request: RouteRequest, option: Option) -> None:
        """The request went to `option`."""


class StatelessPolicy:
    def placed(self, request: RouteRequest, option: Option) -> None:
        pass
