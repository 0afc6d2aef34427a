"""Which worker has refused which tenant for want of room a moment ago, so that a flood is answered here.

Under overload nearly every request is refused. Asking a worker each time would take the time of its event loop, and
with it the interpreter's lock, from the requests that it has admitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final

from cache.types import WorkerIncarnation
from server.workers.client import WorkerRefused

PAUSE_S: Final = 0.1
"""Short beside the queue that has been refused: the worker is asked again long before it runs dry."""


class FullQueues:
    """Owned by the event loop."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_tenant: dict[str, dict[WorkerIncarnation, tuple[float, WorkerRefused]]] = {}

    def note(self, boot: WorkerIncarnation, tenant: str, refused: WorkerRefused) -> None:
        """`boot` has no room for the tenant."""
        said_s = refused.failed.retry_after_s
        until_s = self._clock() + min(PAUSE_S, PAUSE_S if said_s is None else said_s)
        self._by_tenant.setdefault(tenant, {})[boot] = (until_s, refused)

    def of(self, tenant: str) -> Mapping[WorkerIncarnation, WorkerRefused]:
        """The workers that the tenant need not ask now, and what each has said."""
        known = self._by_tenant.get(tenant)
        if known is None:
            return {}
        now_s = self._clock()
        full = {boot: refused for boot, (until_s, refused) in known.items() if until_s > now_s}
        if not full:
            del self._by_tenant[tenant]
        return full
