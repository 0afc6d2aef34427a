"""The bound on the prompt tokens that wait in one gateway process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from server.errors import OverloadedError
from server.rates import DecayedSum

THROUGHPUT_WINDOW_S: Final = 10.0
MAX_DRAIN_S: Final = 60.0


class PromptTokenLimiter:
    """A bound on the prompt tokens that wait for a first token, in equal shares for tenants.

    Workers bound their own queues; this bounds the memory for prompts in the gateway.
    """

    def __init__(self, max_tokens: int, *, clock: Callable[[], float] = time.monotonic) -> None:
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
