"""What the generations of a process share."""

from __future__ import annotations

from dataclasses import dataclass, field

from cache.types import GatewayId
from server.metrics import GatewayMetrics
from server.request.full_queues import FullQueues
from server.request.retry import RetryBudget
from server.request.waiting_room import WaitingRoom
from server.router.router import Router
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
    turns: RetokenisationCheck = field(default_factory=RetokenisationCheck)
