"""Limits of one gateway process: waiting prompt tokens, retries after refusals, full workers, poison requests."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping
from hashlib import blake2b
from typing import Final

import msgspec

from cache.types import WorkerIncarnation
from server.errors import OverloadedError
from server.rates import DecayedSum, TokenBucket
from server.request.choice import GenerationSpec
from server.workers.connection import WorkerRefused

THROUGHPUT_WINDOW_S: Final = 10.0
MAX_DRAIN_S: Final = 60.0
BACKPRESSURE_S: Final = 0.1
"""Short next to the queue that was full: the worker is asked again long before it runs dry."""
MAX_RETRIES: Final = 100.0
RETRIES_PER_REQUEST: Final = 0.1
RETRIES_PER_S: Final = 2.0
POISON_TTL_S: Final = 60.0
"""Long enough to end a client's retries; short, because a worker may have failed for a reason of its own."""
MAX_POISON_ENTRIES: Final = 10_000

Clock = Callable[[], float]


class PromptTokenLimiter:
    """A bound on the prompt tokens that wait for a first token, in equal shares for tenants.

    Workers bound their own queues; this bounds the prompts that the gateway holds in memory for all of them.
    """

    def __init__(self, max_tokens: int, *, clock: Clock = time.monotonic) -> None:
        self._max_tokens = max_tokens
        self._clock = clock
        self._by_tenant: dict[str, int] = {}
        self._released = DecayedSum(THROUGHPUT_WINDOW_S)
        self.num_tokens = 0

    def reserve(self, tenant: str, num_tokens: int) -> None:
        """Count a prompt as waiting, until it is released once. Raises OverloadedError."""
        own = self._by_tenant.get(tenant, 0)
        num_tenants = len(self._by_tenant)
        if own and num_tenants * (own + num_tokens) > self._max_tokens:
            tokens_per_s = self._released.at(self._clock()) / THROUGHPUT_WINDOW_S
            drain_s = min(MAX_DRAIN_S, own * num_tenants / tokens_per_s) if tokens_per_s else 1.0
            raise OverloadedError(f"{own} prompt tokens wait already.", code="queue_full", retry_after_s=drain_s)
        self._by_tenant[tenant] = own + num_tokens
        self.num_tokens += num_tokens

    def release(self, tenant: str, num_tokens: int) -> None:
        self._by_tenant[tenant] -= num_tokens
        if not self._by_tenant[tenant]:
            del self._by_tenant[tenant]
        self.num_tokens -= num_tokens
        self._released.add(num_tokens, self._clock())


class BackpressureCache:
    """Recent queue-full refusals, by tenant and worker, so that a flood is answered here.

    Under overload, asking a worker for each request would take its event loop's time from the admitted ones.
    """

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._by_tenant: dict[str, dict[WorkerIncarnation, tuple[float, WorkerRefused]]] = {}

    def add(self, worker: WorkerIncarnation, tenant: str, refusal: WorkerRefused) -> None:
        """Remember that a worker has no room for the tenant."""
        until_s = self._clock() + min(BACKPRESSURE_S, refusal.retry_after_s)
        self._by_tenant.setdefault(tenant, {})[worker] = (until_s, refusal)

    def refusals(self, tenant: str) -> Mapping[WorkerIncarnation, WorkerRefused]:
        """Return the workers that need not be asked for the tenant, each with its last refusal."""
        known = self._by_tenant.get(tenant)
        if known is None:
            return {}
        now_s = self._clock()
        full = {worker: refusal for worker, (until_s, refusal) in known.items() if until_s > now_s}
        if not full:
            del self._by_tenant[tenant]
        return full


class RetryBudget:
    """A process's allowance of retries after refusals: a tenth of the requests, and two a second, at most 100 saved up.

    Lost workers spend nothing here: `MAX_LOSSES` bounds them for each request.

    Source: the retry budgets of Finagle and Linkerd.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._bucket = TokenBucket(RETRIES_PER_S, MAX_RETRIES)
        self.num_requests = 0
        """Requests since the last retry: each earns a part of one."""

    def spend(self) -> bool:
        """Take one retry, if one is left."""
        now_s = self._clock()
        self._bucket.add(now_s, RETRIES_PER_REQUEST * self.num_requests)
        self.num_requests = 0
        return self._bucket.take(now_s) == 0.0


class PoisonCache:
    """Requests that broke a worker, by a hash of everything that decides the computation. Each gateway has its own."""

    def __init__(self, *, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._until_s: dict[bytes, float] = {}

    def add(self, spec: GenerationSpec) -> None:
        while len(self._until_s) >= MAX_POISON_ENTRIES:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[_poison_key(spec)] = self._clock() + POISON_TTL_S

    def __contains__(self, spec: GenerationSpec) -> bool:
        if not self._until_s:
            return False
        key = _poison_key(spec)
        until_s = self._until_s.get(key)
        if until_s is not None and until_s <= self._clock():
            del self._until_s[key]
            return False
        return until_s is not None


def _poison_key(spec: GenerationSpec) -> bytes:
    digest = blake2b(spec.root, digest_size=16)
    digest.update(array("I", spec.prompt_ids).tobytes())
    digest.update(msgspec.msgpack.encode(spec.sampling))
    return digest.digest()
