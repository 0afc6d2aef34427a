"""What the generations of a process share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from cache.records import WorkerMember
from cache.types import GatewayId, WorkerId
from server.metrics import GatewayMetrics
from server.request.full_queues import FullQueues
from server.request.retry import RetryBudget
from server.request.waiting_room import WaitingRoom
from server.router.placement import Router
from server.text.retokenisation import RetokenisationCheck
from server.workers.client import WorkerClient
from server.workers.quarantine import Quarantine
from server.workers.watch import StallWatch


@dataclass(frozen=True, slots=True, eq=False)
class Backend:
    """What every generation of this process shares."""

    gateway_id: GatewayId
    router: Router
    client: WorkerClient
    watch: StallWatch
    budget: RetryBudget
    metrics: GatewayMetrics
    quarantine: Quarantine
    waiting_room: WaitingRoom
    full_queues: FullQueues
    report_failure: Callable[[WorkerId], None]
    """Tells the fleet that a worker could not be reached, or was lost."""
    report_wrong_epoch: Callable[[WorkerMember], None]
    """Tells the fleet that a worker has refused the epoch that it is known with."""
    turns: RetokenisationCheck = field(default_factory=RetokenisationCheck)
