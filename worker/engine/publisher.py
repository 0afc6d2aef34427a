"""Tells the shared index what this worker holds, off the engine's thread.

The engine hands over events and its load after a step and goes on; nothing here ever makes it wait. The task nets what
has come in (a block stored and dropped between two publishes is never sent), publishes at most every `interval_s`, and
renews the lease when there is nothing to say.

    engine thread: offer(events, load) -> inbox -> [event loop] held, stored, removed -> IndexWriter -> Redis

`held` mirrors the pool, so a rewrite after any doubt asks nothing of the engine; the pool's size bounds it and
everything else here, also while Redis is away.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from cache.events import BlockEvent, Cleared, Removed, Stored
from cache.hashing import index_entry
from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import IndexWriter, WriterSettings
from cache.types import IndexEntry

logger = logging.getLogger(__name__)

_MAX_BATCH: Final = 20_000
"""Entries in one MULTI: more is published by several, in order."""


@dataclass(frozen=True, slots=True)
class PublisherSettings:
    interval_s: float = 0.05
    heartbeat_s: float = 1.0
    retry_s: float = 0.1
    max_retry_s: float = 1.0
    rewrite_s: float = 0.5
    """From one rewrite of the whole set to the next, at least."""
    silent_s: float = 5.0
    """Without a publish for so long, `problem` says so."""
    prune_s: float = 600.0


class Changes:
    """What a pool holds, and how the published set differs from it. One owner; no thread safety of its own."""

    __slots__ = ("_removed", "_stored", "held")

    def __init__(self) -> None:
        self.held: dict[IndexEntry, None] = {}
        """In the order of storing, which is parents first: a parent outlives its children in the pool."""
        self._stored: dict[IndexEntry, None] = {}
        self._removed: dict[IndexEntry, None] = {}

    def apply(self, events: Sequence[BlockEvent]) -> bool:
        """Take events in order. True: the pool was cleared, and only a rewrite can follow."""
        cleared = False
        for event in events:
            match event:
                case Stored(block_hash):
                    self._store(index_entry(block_hash))
                case Removed(block_hash):
                    self._remove(index_entry(block_hash))
                case Cleared():
                    self.clear()
                    cleared = True
        return cleared

    def _store(self, entry: IndexEntry) -> None:
        if entry in self.held:
            return
        self.held[entry] = None
        if entry in self._removed:
            del self._removed[entry]
        else:
            self._stored[entry] = None

    def _remove(self, entry: IndexEntry) -> None:
        if entry not in self.held:
            return
        del self.held[entry]
        if entry in self._stored:
            del self._stored[entry]
        else:
            self._removed[entry] = None

    def clear(self) -> None:
        self.held.clear()
        self.settle()

    def settle(self) -> None:
        """The published set is what the pool holds."""
        self._stored.clear()
        self._removed.clear()

    def take(self, limit: int) -> tuple[list[IndexEntry], list[IndexEntry]]:
        """The next entries to store and to remove, at most `limit` together; they count as published."""
        removed = _take_first(self._removed, limit)
        stored = _take_first(self._stored, limit - len(removed))
        return stored, removed

    @property
    def num_published(self) -> int:
        """Entries in the published set, all that was taken included."""
        return len(self.held) - len(self._stored) + len(self._removed)

    def __bool__(self) -> bool:
        return bool(self._stored or self._removed)


class Publisher:
    """Runs in the worker's event loop; `offer` and `begin_epoch` may be called from any thread."""

    def __init__(
        self,
        url: str,
        member: WorkerMember,
        *,
        settings: PublisherSettings | None = None,
        writer_settings: WriterSettings | None = None,
        count: Callable[[str], None] = lambda event: None,
    ) -> None:
        """`count(event)` feeds the metrics: the writer's events, and failed (a round of this task)."""
        self._settings = settings or PublisherSettings()
        self._writer = IndexWriter(url, member, writer_settings, count=count)
        self._count = count
        self._changes = Changes()
        self._load = WorkerLoad()
        self._inbox: deque[tuple[Sequence[BlockEvent], WorkerLoad] | WorkerMember] = deque()
        self._wake = asyncio.Event()
        self._woken = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._pruned_at = 0.0
        self._rewritten_at = -math.inf
        self._published_at = time.monotonic()
        self._failure = ""
        self._closing = False
        self._ended = asyncio.Event()

    @property
    def connected(self) -> bool:
        return self._writer.client.up

    @property
    def in_doubt(self) -> bool:
        """The index does not say what this worker holds now, and a rewrite is due."""
        return self._writer.in_doubt

    @property
    def problem(self) -> str | None:
        """Why the index does not know what this worker holds, or None. Requests are served all the same."""
        silent_s = time.monotonic() - self._published_at
        if silent_s < self._settings.silent_s:
            return None
        reason = self._failure or ("publishing fails" if self.connected else "no connection to Redis")
        return f"nothing published for {silent_s:.0f} s: {reason}"

    @property
    def num_held(self) -> int:
        return len(self._changes.held)

    def offer(self, events: Sequence[BlockEvent], load: WorkerLoad) -> None:
        """What changed in the pool since the last call, in order, and the load now. Never blocks; any thread."""
        self._inbox.append((events, load))
        self._notify()

    def begin_epoch(self, member: WorkerMember) -> None:
        """The cache was cleared: the worker is `member`, with a new epoch and nothing held, from here on. Any thread.

        Call it in the order of `offer`: events offered before it belong to the old epoch.
        """
        self._inbox.append(member)
        self._notify()

    def _notify(self) -> None:
        loop = self._loop
        if self._woken or loop is None:
            return
        self._woken = True
        try:
            loop.call_soon_threadsafe(self._wake.set)
        except RuntimeError:  # the loop has closed: the process ends
            logger.debug("publisher is gone")

    async def run(self) -> None:
        """Publish until cancelled or closed."""
        self._loop = asyncio.get_running_loop()
        connection = self._loop.create_task(self._writer.run())
        retry_s = self._settings.retry_s
        try:
            while not self._closing:
                published = await self._round()
                retry_s = self._settings.retry_s if published else min(2 * retry_s, self._settings.max_retry_s)
                await self._pause(self._settings.interval_s if published else retry_s)
            await self._writer.retire()
        finally:
            connection.cancel()
            await asyncio.gather(connection, return_exceptions=True)
            self._loop = None
            self._ended.set()

    async def close(self) -> None:
        """Leave the registry and end `run()`. A worker that dies without it is forgotten when its lease ends."""
        self._closing = True
        self._wake.set()
        if self._loop is not None:
            await self._ended.wait()

    async def _round(self) -> bool:
        """Take what came in and bring the index up to date. False: try again soon, also after whatever was raised."""
        try:
            self._drain()
            if not await self._publish():
                return False
            await self._prune()
        except Exception as error:
            self._count("failed")
            if not self._failure:
                logger.exception("publishing failed; the index is written anew")
            self._failure = f"{type(error).__name__}: {error!s:.200}"
            self._writer.in_doubt = True
            return False
        if self._failure:
            logger.info("publishing goes on")
        self._failure = ""
        self._published_at = time.monotonic()
        return True

    def _drain(self) -> None:
        """Take over what the engine has handed in. `_woken` first, so that a later offer wakes us again."""
        self._woken = False
        self._wake.clear()
        while self._inbox:
            item = self._inbox.popleft()
            if isinstance(item, WorkerMember):
                self._changes.clear()
                self._writer.begin_epoch(item)
                continue
            events, self._load = item
            if self._changes.apply(events):
                self._writer.in_doubt = True

    async def _publish(self) -> bool:
        """Bring the index up to date. False: it could not be done, try again soon."""
        if self._closing or not self._writer.client.up:
            return False
        if self._writer.in_doubt:
            if time.monotonic() < self._rewritten_at + self._settings.rewrite_s:
                return False
            self._rewritten_at = time.monotonic()
            if not await self._writer.rewrite(list(self._changes.held), self._load):
                return False
            self._changes.settle()
            return True
        while True:
            stored, removed = self._changes.take(_MAX_BATCH)
            if not await self._writer.publish(stored, removed, self._load, self._changes.num_published):
                return False
            if not self._changes:
                return True

    async def _pause(self, minimum_s: float) -> None:
        """At least `minimum_s`, then until there is news or a heartbeat is due.

        Heartbeats vary in length: two fleets that overwrite each other's entries must not take turns for ever while
        readers always come after the same one.
        """
        heartbeat_s = self._settings.heartbeat_s * random.uniform(0.5, 1.0)
        await asyncio.sleep(minimum_s)
        try:
            async with asyncio.timeout(max(0.0, heartbeat_s - minimum_s)):
                if not self._writer.in_doubt:
                    await self._wake.wait()
        except TimeoutError:
            pass

    async def _prune(self) -> None:
        now = time.monotonic()
        if now - self._pruned_at >= self._settings.prune_s:
            self._pruned_at = now
            await self._writer.prune()


def _take_first(entries: dict[IndexEntry, None], limit: int) -> list[IndexEntry]:
    """Remove and return the first `limit` entries."""
    if len(entries) <= limit:
        taken = list(entries)
        entries.clear()
        return taken
    taken = [entry for entry, _ in zip(entries, range(limit), strict=False)]
    for entry in taken:
        del entries[entry]
    return taken
