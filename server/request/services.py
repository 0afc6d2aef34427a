"""The parts that every generation of this process shares."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from cache.types import GatewayId
from server.metrics import GatewayMetrics
from server.models.served_model import ServedModel
from server.rates import TokenBucket
from server.request.retry_state import PoisonCache, retry_budget
from server.router.queue import RequestQueue
from server.router.router import Router
from server.workers.client import StallWatch, WorkerClient
from server.workers.fleet import Fleet


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RequestServices:
    """The parts that every generation of this process shares."""

    gateway_id: GatewayId
    router: Router
    """Its calls about a placement may come in any state; each takes effect once."""
    client: WorkerClient
    watch: StallWatch
    metrics: GatewayMetrics
    fleet: Fleet
    queue: RequestQueue[Any]
    budget: TokenBucket = field(default_factory=retry_budget)
    poison: PoisonCache = field(default_factory=PoisonCache)
    is_served: Callable[[ServedModel], bool]
    """Returns whether requests are still prepared for this revision of a model."""
    is_learning: Callable[[str], bool]
    """Returns whether this gateway learns another revision of a model, which has a ready worker."""
