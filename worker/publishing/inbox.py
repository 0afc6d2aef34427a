"""The inbox of a publisher: what an engine hands over, from any thread."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from cache.events import BlockEvent
from cache.records import WorkerLoad, WorkerMember
from cache.types import Tier

_Item = tuple[Tier | None, Sequence[BlockEvent], WorkerLoad | None] | WorkerMember
"""Events of the pool with the load, events of a tier, or a new epoch."""


class PublisherInbox:
    """Takes an engine's cache events and load for a Publisher. Any thread may call it; it never blocks."""

    def __init__(self) -> None:
        """Call it in the publisher's event loop."""
        self.items: deque[_Item] = deque()
        self.wake = asyncio.Event()
        """Set when items have come."""
        self._loop = asyncio.get_running_loop()

    def offer(self, events: Sequence[BlockEvent], load: WorkerLoad) -> None:
        """Take the events since the last call, in order, and the current load."""
        self._put((None, events, load))

    def offer_tier(self, tier: Tier, events: Sequence[BlockEvent]) -> None:
        """Take the events of a store below the pool since the last call, in order.

        From any thread, but never while another one clears the stores and calls `begin_epoch`.
        """
        self._put((tier, events, None))

    def begin_epoch(self, member: WorkerMember) -> None:
        """The cache is empty, and the worker is `member` with a new epoch. Earlier events belong to the old one."""
        self._put(member)

    def _put(self, item: _Item) -> None:
        self.items.append(item)
        if not self.wake.is_set():
            with suppress(RuntimeError):  # the loop has closed: the process ends
                self._loop.call_soon_threadsafe(self.wake.set)
