"""Publishes what this worker holds to the shared index, off the engine thread.

    engine thread: offer(events, load)   -> inbox -> [event loop] held, stored, removed -> IndexWriter -> Redis
    any thread: offer_tier(tier, events) ->

The engine never waits for Redis. A block that is stored and dropped between two publishes is never sent. `held` mirrors
the pool and each tier, so a rewrite needs nothing of the engine. Its size is bounded by theirs, also while Redis is
unreachable.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final

from cache.events import BlockEvent, Removed, Stops, Stored
from cache.hashing import index_entry
from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import IndexWriter, SetChange, WriterSettings
from cache.types import IndexEntry, TierName
from worker.publishing.inbox import PublisherInbox

logger = logging.getLogger(__name__)

_MAX_BATCH: Final = 20_000
"""Entries in one MULTI: more are published by several, in order."""
_CONNECT_POLL_S: Final = 0.01  # the client has no event for it

TIDY_PER_FIELD_S: Final = 0.02
"""Every worker looks for fields that are too long, less often the more fields there are."""


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    """Intervals of the publisher."""

    interval_s: float = 0.05
    heartbeat_s: float = 1.0
    retry_s: float = 0.02
    max_retry_s: float = 1.0
    rewrite_s: float = 0.5
    """The least time between two rewrites of the whole set."""
    silent_s: float = 5.0
    """The time without a publish after which `problem` reports it."""
    tidy_s: float = 2.0
    """How often to look for fields of the registry that are too long, in a small fleet."""
    prune_s: float = 600.0


class Changes:
    """The blocks of a pool or a tier, and how the published set differs from them. Has one owner; not thread-safe."""

    def __init__(self) -> None:
        self.held: dict[IndexEntry, int] = {}
        """For each block, after how many blocks a hit stops that matches up to it; 0 where hits have no such stop.

        In the order of storing, which is parents first: a parent outlives its children.
        """
        self.num_published = 0
        """Entries in the published set, including all that was taken."""
        self._pending: dict[IndexEntry, int | None] = {}
        """Entries in which the set differs, in order of change, with what it has of each; None: nothing."""

    def apply(self, events: Sequence[BlockEvent]) -> None:
        """Apply events in order."""
        held, pending = self.held, self._pending
        for event in events:
            entry = index_entry(event.block_hash)
            before = held.get(entry)
            match event:
                case Stored():
                    held.setdefault(entry, 0)
                case Removed():
                    held.pop(entry, None)
                case Stops(_, num_blocks) if before is not None:
                    held[entry] = num_blocks
            if pending.setdefault(entry, before) == held.get(entry):
                del pending[entry]

    def mark_published(self) -> None:
        """Forget the differences: the published set is what is held."""
        self._pending.clear()
        self.num_published = len(self.held)

    def take(self, limit: int) -> SetChange:
        """Take the next entries to store and to remove, at most `limit` in all. They count as published."""
        stored, removed, stops = list[IndexEntry](), list[IndexEntry](), list[int]()
        for entry, before in list(islice(self._pending.items(), limit)):
            del self._pending[entry]
            if (stop := self.held.get(entry)) is None:
                removed.append(entry)
                self.num_published -= 1
            else:
                stored.append(entry)
                stops.append(stop)
                self.num_published += before is None
        return SetChange(stored, removed, self.num_published, stops)

    def __bool__(self) -> bool:
        return bool(self._pending)


class Publisher:
    """Publishes what comes into its inbox, over an IndexWriter. Runs in the worker's event loop."""

    def __init__(
        self,
        url: str,
        member: WorkerMember,
        inbox: PublisherInbox,
        *,
        settings: PublisherSettings | None = None,
        writer_settings: WriterSettings | None = None,
        count: Callable[[str], None] = lambda event: None,
    ) -> None:
        """`count(event)` feeds the metrics: the writer's events, and `failed` for a round of this task."""
        self._settings = settings or PublisherSettings()
        self._writer = IndexWriter(url, member, writer_settings, count=count)
        self.upkeep = self._writer.upkeep
        self._count = count
        self._changes = _changes_of(member)
        self._load = WorkerLoad()
        self.inbox = inbox
        self._pruned_s = 0.0
        self._tidy_s = 0.0
        """When to look for fields that are too long."""
        self._rewritten_s = -math.inf
        self._published_s = time.monotonic()
        self._failure = ""
        self._closing = False
        self._ended = asyncio.Event()
        """Set while nothing runs."""
        self._ended.set()

    @property
    def connected(self) -> bool:
        return self._writer.client.up

    @property
    def problem(self) -> str | None:
        """Why the index is not up to date, or None. The worker serves anyway."""
        silent_s = time.monotonic() - self._published_s
        if silent_s < self._settings.silent_s:
            return None
        reason = self._failure or ("publishing fails" if self.connected else "no connection to Redis")
        return f"nothing published for {silent_s:.0f} s: {reason}"

    @property
    def num_held(self) -> int:
        return len(self._changes[None].held)

    async def run(self, prepare: Callable[[], Awaitable[None]] | None = None) -> None:
        """Connect, await `prepare`, then publish until cancelled or closed."""
        self._ended.clear()
        connection = asyncio.create_task(self._writer.run())
        retry_s = self._settings.retry_s
        try:
            if prepare is not None:
                await prepare()
                self._published_s = time.monotonic()
            while not self._closing:
                published = await self._round()
                await self._pause(self._settings.interval_s if published else retry_s)
                retry_s = self._settings.retry_s if published else min(2 * retry_s, self._settings.max_retry_s)
            await self._writer.retire()
        finally:
            connection.cancel()
            await asyncio.gather(connection, return_exceptions=True)
            self._ended.set()

    async def wait_connected(self, timeout_s: float) -> bool:
        """Return whether Redis answers within this time."""
        end_s = time.monotonic() + timeout_s
        while not self.connected and time.monotonic() < end_s:  # noqa: ASYNC110 - the client has no event for this
            await asyncio.sleep(_CONNECT_POLL_S)
        return self.connected

    async def close(self) -> None:
        """Leave the registry and end `run()`. Without it, the registry forgets the worker when its lease ends."""
        self._closing = True
        self.inbox.wake.set()
        await self._ended.wait()

    async def _round(self) -> bool:
        """Apply what came in and bring the index up to date. False: retry soon, also after any exception."""
        try:
            self._apply_inbox()
            if not await self._publish():
                return False
            if time.monotonic() - self._pruned_s >= self._settings.prune_s:
                self._pruned_s = time.monotonic()
                await self.upkeep.prune()
            if time.monotonic() >= self._tidy_s:
                num_fields = await self.upkeep.remove_oversized()
                self._tidy_s = time.monotonic() + max(self._settings.tidy_s, TIDY_PER_FIELD_S * num_fields)
        except Exception as error:
            self._count("failed")
            if not self._failure:
                logger.exception("publishing failed; the index is rewritten")
            self._failure = f"{type(error).__name__}: {error!s:.200}"
            self._writer.in_doubt = True
            return False
        if self._failure:
            logger.info("publishing works again")
        self._failure = ""
        self._published_s = time.monotonic()
        return True

    def _apply_inbox(self) -> None:
        """Apply the offered items. Clears `wake` first, so that a later offer wakes this task."""
        self.inbox.wake.clear()
        while self.inbox.items:
            item = self.inbox.items.popleft()
            if isinstance(item, WorkerMember):
                self._changes = _changes_of(item)
                self._writer.begin_epoch(item)
                continue
            tier, events, load = item
            self._load = load or self._load
            self._changes[tier].apply(events)

    async def _publish(self) -> bool:
        """Bring the index up to date. False: it failed, retry soon."""
        if self._closing or not self._writer.client.up:
            return False
        if self._writer.in_doubt:
            if time.monotonic() < self._rewritten_s + self._settings.rewrite_s:
                return False
            self._rewritten_s = time.monotonic()
            held, *held_in_tiers = [list(changes.held) for changes in self._changes.values()]
            if not await self._writer.rewrite(held, self._load, held_in_tiers, list(self._changes[None].held.values())):
                return False
            for changes in self._changes.values():
                changes.mark_published()
            return True
        while True:
            room, taken = _MAX_BATCH, list[SetChange]()
            for changes in self._changes.values():
                taken.append(changes.take(room))
                room -= len(taken[-1].stored) + len(taken[-1].removed)
            if not await self._writer.publish(taken, self._load):
                return False
            if not any(self._changes.values()):
                return True

    async def _pause(self, minimum_s: float) -> None:
        """Wait `minimum_s`, then until there is news or a heartbeat is due.

        Heartbeats vary in length: two fleets that share keys by mistake must not alternate in step.
        """
        heartbeat_s = self._settings.heartbeat_s * random.uniform(0.5, 1.0)
        await asyncio.sleep(minimum_s)
        with suppress(TimeoutError):
            async with asyncio.timeout(max(0.0, heartbeat_s - minimum_s)):
                if not self._writer.in_doubt:
                    await self.inbox.wake.wait()


def _changes_of(member: WorkerMember) -> dict[TierName | None, Changes]:
    """Return empty `Changes` for the pool (None), then for each tier, in the order of the index."""
    return {tier: Changes() for tier in (None, *member.tiers)}
