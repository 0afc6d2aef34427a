"""How many prompt tokens may wait for their first token behind this gateway, shared out evenly among tenants.

Workers bound their own queues; this bounds what a gateway holds in memory for all of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from server.errors import OverloadedError

MEMORY_S: Final = 10.0


class WaitingRoom:
    """Owned by the event loop."""

    def __init__(self, max_tokens: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_tokens = max_tokens
        self._clock = clock
        self._by_tenant: dict[str, int] = {}
        self._served_per_s = 0.0
        self._served_s = clock()
        self.num_tokens = 0

    def enter(self, tenant: str, num_tokens: int) -> Place:
        """Leave the place when the first token is there. Raises OverloadedError."""
        own = self._by_tenant.get(tenant, 0)
        num_tenants = len(self._by_tenant)
        if own and num_tenants * (own + num_tokens) > self._max_tokens:
            message = f"{own} prompt tokens wait already."
            raise OverloadedError(message, code="queue_full", retry_after_s=self._drain_s(own * num_tenants))
        self._by_tenant[tenant] = own + num_tokens
        self.num_tokens += num_tokens
        return Place(self, tenant, num_tokens)

    def _leave(self, tenant: str, num_tokens: int) -> None:
        left = self._by_tenant[tenant] - num_tokens
        if left:
            self._by_tenant[tenant] = left
        else:
            del self._by_tenant[tenant]
        self.num_tokens -= num_tokens
        self._decay()
        self._served_per_s += num_tokens / MEMORY_S

    def _decay(self) -> None:
        now_s = self._clock()
        self._served_per_s *= max(0.0, 1.0 - (now_s - self._served_s) / MEMORY_S)
        self._served_s = now_s

    def _drain_s(self, num_tokens: int) -> float:
        """How long so many tokens take at the recent pace."""
        self._decay()
        return min(60.0, num_tokens / self._served_per_s) if self._served_per_s else 1.0


class Place:
    """One request's; leaving it twice is leaving it once."""

    __slots__ = ("_num_tokens", "_room", "_tenant")

    def __init__(self, room: WaitingRoom, tenant: str, num_tokens: int) -> None:
        self._room: WaitingRoom | None = room
        self._tenant = tenant
        self._num_tokens = num_tokens

    def leave(self) -> None:
        room, self._room = self._room, None
        if room is not None:
            room._leave(self._tenant, self._num_tokens)
