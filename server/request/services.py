"""The parts that every generation of this process shares: those of the gateway, the retry budget, poison requests."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import msgspec

from cache.types import GatewayId
from server.metrics import GatewayMetrics
from server.models.registry import Models
from server.rates import TokenBucket
from server.request.choice import GenerationSpec
from server.router.queue import RequestQueue
from server.router.router import Router
from server.workers.client import StallWatch, WorkerClient
from server.workers.fleet import Fleet

MAX_RETRIES: Final = 100.0  # saved up: bounds the retries at the moment when a fleet fails
RETRIES_PER_REQUEST: Final = 0.1  # so retries add at most a tenth to the load of a busy gateway
RETRIES_PER_S: Final = 2.0  # for gateways with few requests
POISON_TTL_S: Final = 60.0
"""Long enough to end a client's retries; short, because the fault may be the worker's."""
MAX_POISON_ENTRIES: Final = 10_000  # bounds the memory; the oldest are forgotten


def retry_budget() -> TokenBucket:
    """Return the retries after refusals of a process: `RETRIES_PER_REQUEST` more for each, at most 100 saved up.

    Retries after a lost worker are limited by `MAX_LOSSES`, not by this budget.
    Source: the retry budgets of Finagle and Linkerd.
    """
    return TokenBucket(RETRIES_PER_S, MAX_RETRIES)


class PoisonCache:
    """Poison requests, by a hash of everything that decides the computation."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until_s: dict[bytes, float] = {}

    def add(self, spec: GenerationSpec) -> None:
        key = _poison_key(spec)
        self._until_s.pop(key, None)  # the last to expire is the last in the dict
        if len(self._until_s) >= MAX_POISON_ENTRIES:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[key] = self._clock() + POISON_TTL_S

    def __contains__(self, spec: GenerationSpec) -> bool:
        now_s, last_s = self._clock(), next(reversed(self._until_s.values()), 0.0)
        return last_s > now_s and self._until_s.get(_poison_key(spec), 0.0) > now_s  # a large body takes long to hash


def _poison_key(spec: GenerationSpec) -> bytes:
    digest = blake2b(spec.root, digest_size=16)
    digest.update(array("I", spec.prompt_ids).tobytes())
    call = None if spec.text_request is None else spec.text_request.call
    digest.update(msgspec.msgpack.encode((spec.sampling, spec.embed, spec.media, call)))
    return digest.digest()


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RequestServices:
    """The parts, one of each for the process."""

    gateway_id: GatewayId
    router: Router
    """Its calls about a placement may come in any state; each takes effect once."""
    client: WorkerClient
    watch: StallWatch
    metrics: GatewayMetrics
    fleet: Fleet
    models: Models
    queue: RequestQueue[Any]
    budget: TokenBucket = field(default_factory=retry_budget)
    poison: PoisonCache = field(default_factory=PoisonCache)
