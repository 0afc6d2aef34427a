"""One shard as a gateway reads it: its connection, the lookup, when the registry is read again, and the breaker.

A lookup passes the sets of the workers that are known; the reply says what they hold, in which state they are, and the
registry's version. Another version makes the shard read the registry again, so a new worker appears one lookup later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from redis.exceptions import NoScriptError, ResponseError

from cache.index import Candidate, WorkerMember
from cache.redis_index import schema
from cache.redis_index.endpoint import Endpoint
from cache.redis_index.link import Argument, Link, LinkDownError, LinkSettings, Reply, pack_command
from cache.redis_index.registry import KnownWorker, Registry, RegistryEntry
from cache.redis_index.script import ALL, LOOKUP, LOOKUP_SHA

logger = logging.getLogger(__name__)

MAX_WORKERS_PER_SHARD = 4000
"""Lua's unpack takes at most some 8,000 values."""
MAX_BLOCKS = 1 << 17
MAX_QUERIES = 64


@dataclass(frozen=True, slots=True)
class ReaderSettings:
    prefix: str = "headstart"
    num_shards: int = 1
    deadline_s: float = 0.025
    poll_s: float = 1.0
    """How often an idle reader looks at the registry; the same probe closes an open breaker."""
    breaker_failures: int = 3
    """After so many failures in a row lookups answer None at once, until a probe has succeeded."""
    breaker_probe_s: float = 0.25
    refresh_interval_s: float = 0.05
    """The registry is read again at most this often."""
    username: str | None = None
    password: str | None = None


@dataclass(frozen=True, slots=True)
class _Query:
    """The part of a lookup that stays the same while the registry does: the command before and after the hashes."""

    workers: tuple[KnownWorker, ...]
    head: bytes
    tail: bytes
    wants_all: bool
    """All states there are, without naming whose."""


class Shard:
    """One connection, the members behind it, and its breaker."""

    def __init__(self, url: str, number: int, settings: ReaderSettings, count: Callable[[str], None]) -> None:
        link_settings = LinkSettings(max_pending=1024)
        endpoint = Endpoint(
            url,
            connect_timeout_s=link_settings.connect_timeout_s,
            username=settings.username,
            password=settings.password,
        )
        self._settings = settings
        self._count = count
        self.link = Link(endpoint, link_settings, on_change=self._link_changed)
        self.keys = schema.Keys(settings.prefix, number)
        self._registry = Registry(count)
        self._layout = 0
        self._queries: dict[str | None, _Query] = {}
        self._version: bytes | None = None
        self._evalsha = b"EVALSHA_RO"
        self._refreshed_at = -1e9
        self._refresh_task: asyncio.Task[None] | None = None
        self._failures = 0
        self._wake_probe = asyncio.Event()
        self._names_needed = False

    # --- lookup -----------------------------------------------------------------------------------------------------

    @property
    def breaker_open(self) -> bool:
        return self._failures >= self._settings.breaker_failures

    async def lookup(self, blob: bytes, model: str | None) -> list[Candidate]:
        """Raises LinkDownError; the caller sets the deadline."""
        if self._version is None:
            await self._first_refresh()
        query = self._query(model)
        reply = (await self._submit(query, blob))[0]
        if isinstance(reply, ResponseError):
            reply = await self._again(query, blob, reply)
        return self._candidates(query, reply)

    def _submit(self, query: _Query, blob: bytes) -> asyncio.Future[list[Reply]]:
        return self.link.submit((query.head, b"$%d\r\n" % len(blob), blob, query.tail), 1)

    async def _again(self, query: _Query, blob: bytes, error: ResponseError) -> Reply:
        """A server that has not the script, or an old one without EVALSHA_RO."""
        if isinstance(error, NoScriptError):
            (loaded,) = await self.link.submit([pack_command(("SCRIPT", "LOAD", LOOKUP))], 1)
            if isinstance(loaded, ResponseError):
                raise LinkDownError(f"SCRIPT LOAD: {loaded}")
        elif self._evalsha == b"EVALSHA_RO" and "unknown command" in str(error).lower():
            self._evalsha = b"EVALSHA"
            self._queries.clear()
            query = self._query_of(query.workers)
        else:
            raise LinkDownError(f"lookup: {error}")
        (reply,) = await self._submit(query, blob)
        if isinstance(reply, NoScriptError):
            return await self._again(query, blob, reply)
        if isinstance(reply, ResponseError):
            raise LinkDownError(f"lookup: {reply}")
        return reply

    def _query(self, model: str | None) -> _Query:
        if self._layout != self._registry.layout:
            self._layout = self._registry.layout
            self._queries.clear()
        query = self._queries.get(model)
        if query is None:
            workers = self._registry.workers(model)
            if len(workers) > MAX_WORKERS_PER_SHARD:
                self._registry.complain(b"shards", f"{len(workers)} workers in one shard: configure more shards")
                del workers[MAX_WORKERS_PER_SHARD:]
            query = self._query_of(tuple(workers))
            if len(self._queries) < MAX_QUERIES:
                self._queries[model] = query
        return query

    def _query_of(self, workers: tuple[KnownWorker, ...]) -> _Query:
        sets = [self.keys.blocks(w.member.worker_id, w.member.epoch, w.generation) for w in workers]
        keys = [self.keys.states, self.keys.version, *sets]
        # A name is an argument, and costs more than a state that nobody asked for: but not one of any size and number.
        may_read_all = self._registry.only_known_states and not self._names_needed
        wants_all = may_read_all and 2 * len(workers) >= len(self._registry)
        ids = [ALL] if wants_all else [w.member.worker_id for w in workers]
        start: list[Argument] = [self._evalsha, LOOKUP_SHA, len(keys), *keys]
        _, _, head = pack_command(start).partition(b"\r\n")
        _, _, tail = pack_command(ids).partition(b"\r\n")
        return _Query(workers, b"*%d\r\n%b" % (len(start) + 1 + len(ids), head), b"\r\n" + tail, wants_all)

    def _candidates(self, query: _Query, reply: Reply) -> list[Candidate]:
        try:
            version, (seconds, microseconds), matches, states = reply
            now_ms = int(seconds) * 1000 + int(microseconds) // 1000
            if isinstance(states, ResponseError) and query.wants_all:
                self._names_needed = True  # an ACL without HVALS
                self._queries.clear()
            if not isinstance(states, list) or len(matches) != len(query.workers):
                raise ValueError(f"{len(matches)} matches of {len(query.workers)} workers, states {states!r:.80}")
        except (TypeError, ValueError) as error:
            self._registry.complain(b"reply", f"lookup gave {reply!r:.80}: {error}")
            raise LinkDownError("malformed reply") from error
        if (version or b"") != self._version:
            self._start_refresh()
        return self._registry.candidates(query.workers, matches, states, now_ms)

    # --- registry ---------------------------------------------------------------------------------------------------

    async def _first_refresh(self) -> None:
        """Nothing is known yet: wait for the one refresh that all callers share. Raises LinkDownError."""
        if self.link.up:
            await asyncio.shield(self._start_refresh())
        if self._version is None:
            raise LinkDownError("the registry has not been read")

    def _start_refresh(self) -> asyncio.Task[None]:
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.get_running_loop().create_task(self._refresh_later())
        return self._refresh_task

    async def _refresh_later(self) -> None:
        await asyncio.sleep(max(0.0, self._refreshed_at + self._settings.refresh_interval_s - time.monotonic()))
        try:
            await self._refresh()
        except LinkDownError as error:
            logger.debug("registry not read: %s", error)

    async def _refresh(self) -> None:
        """Read the registry. The version is read first: a change in between means one more refresh."""
        self._refreshed_at = time.monotonic()
        version, members, states = await self.link.call(
            ("GET", self.keys.version), ("HGETALL", self.keys.members), ("HGETALL", self.keys.states), timeout_s=2.0
        )
        self._registry.refresh(members, states)
        self._version = version if isinstance(version, bytes) else b""

    def members(self) -> list[WorkerMember]:
        return self._registry.members()

    async def entries(self) -> list[RegistryEntry]:
        """The registry now, lapsed entries included. Raises LinkDownError."""
        await self._refresh()
        (now,) = await self.link.call(("TIME",), timeout_s=2.0)
        self._registry.at(int(now[0]) * 1000 + int(now[1]) // 1000)
        return self._registry.entries()

    def seen_entries(self) -> list[RegistryEntry]:
        """The registry as the last lookup saw it: nothing is asked."""
        return self._registry.entries()

    # --- breaker and probe ------------------------------------------------------------------------------------------

    def failed(self) -> None:
        self._failures += 1
        if self._failures == self._settings.breaker_failures:
            logger.warning("lookups fail: routing without the index until Redis answers within the deadline")
            self._count("breaker_opened")
            self._wake_probe.set()

    def succeeded(self) -> None:
        if self.breaker_open:
            logger.info("Redis answers again: routing by the index")
            self._count("breaker_closed")
        self._failures = 0

    async def probe(self) -> None:
        """Look at the registry now and then; while the breaker is open, find out when to close it."""
        while True:
            interval_s = self._settings.breaker_probe_s if self.breaker_open else self._settings.poll_s
            try:
                async with asyncio.timeout(interval_s):
                    await self._wake_probe.wait()
            except TimeoutError:
                pass
            self._wake_probe.clear()
            if not self.link.up:
                continue
            started_at = time.monotonic()
            try:
                async with asyncio.timeout(2.0):
                    await self.lookup(b"", None)
            except (LinkDownError, TimeoutError):
                continue
            if time.monotonic() - started_at <= self._settings.deadline_s:
                self.succeeded()

    def _link_changed(self, up: bool) -> None:
        self._version = None
        self._queries.clear()
        self._evalsha = b"EVALSHA_RO"
        if up:
            self._wake_probe.set()
