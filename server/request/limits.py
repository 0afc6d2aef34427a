"""Refuse work before it costs a worker anything: too many waiting prompt tokens, and workers known to be full."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from cache.types import WorkerIncarnation
from server.errors import OverloadedError
from server.workers.client import WorkerRefused

THROUGHPUT_WINDOW_S: Final = 10.0
BACKPRESSURE_S: Final = 0.1
"""Short next to the queue that was full: the worker is asked again long before it runs dry."""


class PromptTokenLimiter:
    """Bounds the prompt tokens that wait for a first token behind this gateway, in equal shares for tenants.

    Workers bound their own queues; this bounds what the gateway holds in memory for all of them.
    """

    def __init__(self, max_tokens: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_tokens = max_tokens
        self._clock = clock
        self._by_tenant: dict[str, int] = {}
        self._tokens_per_s = 0.0
        self._updated_s = clock()
        self.num_tokens = 0

    def reserve(self, tenant: str, num_tokens: int) -> Reservation:
        """Count a prompt as waiting until the reservation is released. Raises OverloadedError."""
        own = self._by_tenant.get(tenant, 0)
        num_tenants = len(self._by_tenant)
        if own and num_tenants * (own + num_tokens) > self._max_tokens:
            message = f"{own} prompt tokens wait already."
            raise OverloadedError(message, code="queue_full", retry_after_s=self._drain_s(own * num_tenants))
        self._by_tenant[tenant] = own + num_tokens
        self.num_tokens += num_tokens
        return Reservation(self, tenant, num_tokens)

    def release(self, tenant: str, num_tokens: int) -> None:
        """Called by a reservation, once."""
        left = self._by_tenant[tenant] - num_tokens
        if left:
            self._by_tenant[tenant] = left
        else:
            del self._by_tenant[tenant]
        self.num_tokens -= num_tokens
        self._decay()
        self._tokens_per_s += num_tokens / THROUGHPUT_WINDOW_S

    def _decay(self) -> None:
        now_s = self._clock()
        self._tokens_per_s *= max(0.0, 1.0 - (now_s - self._updated_s) / THROUGHPUT_WINDOW_S)
        self._updated_s = now_s

    def _drain_s(self, num_tokens: int) -> float:
        """Estimate how long so many tokens take at the recent pace."""
        self._decay()
        return min(60.0, num_tokens / self._tokens_per_s) if self._tokens_per_s else 1.0


class Reservation:
    """One prompt's share of the limit. A second `release` does nothing."""

    __slots__ = ("_limiter", "_num_tokens", "_tenant")

    def __init__(self, limiter: PromptTokenLimiter, tenant: str, num_tokens: int) -> None:
        self._limiter: PromptTokenLimiter | None = limiter
        self._tenant = tenant
        self._num_tokens = num_tokens

    def release(self) -> None:
        limiter, self._limiter = self._limiter, None
        if limiter is not None:
            limiter.release(self._tenant, self._num_tokens)


class BackpressureCache:
    """Remembers for a moment which worker refused which tenant for want of room, so that a flood is answered here.

    Under overload, asking a worker for each request would take its event loop's time from the admitted ones.
    """

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_tenant: dict[str, dict[WorkerIncarnation, tuple[float, WorkerRefused]]] = {}

    def add(self, boot: WorkerIncarnation, tenant: str, refusal: WorkerRefused) -> None:
        """Remember that a worker has no room for the tenant."""
        asked_s = refusal.failed.retry_after_s
        until_s = self._clock() + min(BACKPRESSURE_S, BACKPRESSURE_S if asked_s is None else asked_s)
        self._by_tenant.setdefault(tenant, {})[boot] = (until_s, refusal)

    def refusals(self, tenant: str) -> Mapping[WorkerIncarnation, WorkerRefused]:
        """Return the workers that need not be asked for the tenant, each with its last refusal."""
        known = self._by_tenant.get(tenant)
        if known is None:
            return {}
        now_s = self._clock()
        full = {boot: refusal for boot, (until_s, refusal) in known.items() if until_s > now_s}
        if not full:
            del self._by_tenant[tenant]
        return full
