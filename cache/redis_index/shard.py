"""One shard as a gateway reads it: its connection, the lookup, when the registry is read again, and the breaker.

A lookup passes the sets of the workers that are known; the reply says what they hold, in which state they are, and the
registry's version. Another version makes the shard read the registry again, so a new worker appears one lookup later.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from redis.exceptions import NoScriptError, ResponseError

from cache.records import Candidate, WorkerMember
from cache.redis_index import schema
from cache.redis_index.endpoint import Endpoint
from cache.redis_index.link import Argument, Link, LinkDownError, LinkSettings, Reply, pack_command
from cache.redis_index.registry import KnownWorker, Registry, RegistryEntry
from cache.redis_index.schema import ReplyError, brief
from cache.redis_index.script import ALL, LOOKUP, LOOKUP_SHA
from cache.redis_index.signing import Signer
from cache.types import HASH_BYTES

logger = logging.getLogger(__name__)

MAX_WORKERS_PER_SHARD = 4000
"""Lua's unpack takes at most some 8,000 values."""
MAX_BLOCKS = 1 << 17
MAX_QUERIES = 64
_MAX_TRIES = 4
"""A lookup may find EVALSHA_RO unknown and then, twice, the script."""


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
    """The registry is read again at most this often, and for a tenth of the time,"""
    max_refresh_age_s: float = 5.0
    """and at least this often, whatever its version says: what was read may have been wrong."""
    username: str | None = None
    password: str | None = None
    cluster_secret: bytes = field(default=b"", repr=False)
    """Only entries signed with it count. Empty: all that decode."""


@dataclass(frozen=True, slots=True)
class _Query:
    """The part of a lookup that stays the same while the registry does: the command before and after the hashes."""

    workers: tuple[KnownWorker, ...]
    evalsha: bytes
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
        self.link = Link(endpoint, link_settings, on_change=self._link_changed, on_garbage=lambda: count("invalid"))
        self.keys = schema.Keys(settings.prefix, number)
        self._registry = Registry(count, Signer(settings.cluster_secret, settings.prefix, number))
        self._layout = 0
        self._queries: dict[str | None, _Query] = {}
        self._version: bytes | None = None
        self._evalsha = b"EVALSHA_RO"
        self._seen_version = b""
        self._refreshed_at = -1e9
        self._pause_s = settings.refresh_interval_s
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
        for _ in range(_MAX_TRIES):
            (reply,) = await self._submit(query, blob)
            if not isinstance(reply, ResponseError):
                return self._candidates(query, len(blob) // HASH_BYTES, reply)
            query = await self._repaired(query, reply)
        raise LinkDownError(f"lookup: {brief(reply)}")

    def _submit(self, query: _Query, blob: bytes) -> asyncio.Future[list[Reply]]:
        return self.link.submit((query.head, b"$%d\r\n" % len(blob), blob, query.tail), 1)

    async def _repaired(self, query: _Query, error: ResponseError) -> _Query:
        """Help a server that has not the script, or an old one without EVALSHA_RO. Raises LinkDownError for others.

        Many lookups may be in flight when the first of them learns it.
        """
        if isinstance(error, NoScriptError):
            (loaded,) = await self.link.submit([pack_command(("SCRIPT", "LOAD", LOOKUP))], 1)
            if isinstance(loaded, ResponseError):
                raise LinkDownError(f"SCRIPT LOAD: {loaded}")
            return query
        if query.evalsha == b"EVALSHA_RO" and "unknown command" in str(error).lower():
            if self._evalsha == b"EVALSHA_RO":
                self._evalsha = b"EVALSHA"
                self._queries.clear()
            return self._query_of(query.workers)
        raise LinkDownError(f"lookup: {error}")

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
        head = b"*%d\r\n%b" % (len(start) + 1 + len(ids), head)
        return _Query(workers, self._evalsha, head, b"\r\n" + tail, wants_all)

    def _candidates(self, query: _Query, num_blocks: int, reply: Reply) -> list[Candidate]:
        try:
            version, now, matches, states = reply
            now_ms = schema.decode_time_ms(now)
            if len(matches) != len(query.workers) or (matches and not 0 <= min(matches) <= max(matches) <= num_blocks):
                raise ReplyError(f"{brief(matches)} for {len(query.workers)} workers and {num_blocks} blocks")
            if isinstance(states, ResponseError):
                states = self._without_states(query, states)
            elif not isinstance(states, list):
                raise ReplyError(f"states are {brief(states)}")
        except (TypeError, ValueError) as error:
            self._registry.complain(b"reply", f"lookup gave {brief(reply)}: {error}")
            self.link.distrust("a lookup's reply was none")
            raise LinkDownError("malformed reply") from error
        self._seen_version = version if type(version) is bytes else b""
        if self._seen_version != self._version:
            self._start_refresh()
        return self._registry.candidates(query.workers, matches, states, now_ms)

    def _without_states(self, query: _Query, error: ResponseError) -> list[Reply]:
        """The key of the states has another type, or an ACL forbids HVALS: ask for them by name from now on."""
        if query.wants_all:
            self._names_needed = True
            self._queries.clear()
        else:
            self._registry.complain(b"states", f"the states cannot be read: {error}")
        return []

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
        await asyncio.sleep(max(0.0, self._refreshed_at + self._pause_s - time.monotonic()))
        try:
            await self._refresh()
        except LinkDownError as error:
            logger.debug("registry not read: %s", error)

    async def _refresh(self) -> None:
        """Read the registry. Its version is what a lookup saw before: a change in between means one more refresh."""
        version = self._seen_version
        members, states = await self.link.call(
            ("HGETALL", self.keys.members), ("HGETALL", self.keys.states), timeout_s=2.0
        )
        begun_at = time.monotonic()
        try:
            self._registry.refresh(self._hash(members), self._hash(states))
        except ReplyError as error:
            self._registry.complain(b"reply", f"the registry is {error}")
            self.link.distrust("the registry's reply was none")
            raise LinkDownError("malformed reply") from error
        finally:
            self._refreshed_at = time.monotonic()
            self._pause_s = max(self._settings.refresh_interval_s, 10 * (self._refreshed_at - begun_at))
        self._version = version

    def _hash(self, reply: Reply) -> list[tuple[bytes, bytes]]:
        """Raises ReplyError. A key of another type is an empty hash, until a worker has put it right."""
        if isinstance(reply, ResponseError):
            self._registry.complain(b"type", f"the registry cannot be read: {reply}")
            return []
        return schema.decode_hash(reply)

    def members(self) -> list[WorkerMember]:
        return self._registry.members()

    async def entries(self) -> list[RegistryEntry]:
        """The registry now, lapsed entries included. Raises LinkDownError."""
        await self._refresh()
        (now,) = await self.link.call(("TIME",), timeout_s=2.0)
        try:
            self._registry.at(schema.decode_time_ms(now))
        except ReplyError as error:
            self.link.distrust("TIME's reply was none")
            raise LinkDownError("malformed reply") from error
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

    def broke(self, error: Exception) -> None:
        """Reading has raised what it should not: count it, log it once, and begin again on another connection."""
        self._registry.complain(b"reading", f"reading raised {type(error).__name__}: {error!s:.200}")
        logger.debug("reading raised", exc_info=error)
        self.link.distrust("reading failed")

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
            if time.monotonic() - self._refreshed_at > self._settings.max_refresh_age_s:
                self._start_refresh()
            started_at = time.monotonic()
            try:
                async with asyncio.timeout(2.0):
                    await self.lookup(b"", None)
            except (LinkDownError, TimeoutError):
                continue
            except Exception as error:
                self.broke(error)
                continue
            if time.monotonic() - started_at <= self._settings.deadline_s:
                self.succeeded()

    def _link_changed(self, up: bool) -> None:
        self._version = None
        self._queries.clear()
        self._evalsha = b"EVALSHA_RO"
        self._names_needed = False
        if up:
            self._wake_probe.set()
