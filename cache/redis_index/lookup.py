"""The gateway's side of the shared index: one round trip per routing decision, within a deadline, or None.

A lookup passes the sets of the known workers. The reply has their matches, their states, and the registry's version.
A new version makes the shard read the registry again, so a new worker appears one lookup later.

The states of a large fleet are most of a reply, and workers write them every 50 ms. So its lookups leave them out while
they are younger, and a read next to the lookups renews them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

from redis.exceptions import NoScriptError, ResponseError

from cache.records import Candidate, WorkerMember
from cache.redis_index import schema
from cache.redis_index.client import RedisClient, RedisDownError, Reply, pack
from cache.redis_index.connection import ClientSettings, IndexSettings
from cache.redis_index.hashes import HashReader, HashReading
from cache.redis_index.registry import KnownWorker, Registry, RegistryEntry
from cache.redis_index.schema import ReplyError, Signer, brief
from cache.redis_index.script import LOOKUP, Query, make_query
from cache.types import HASH_BYTES, BlockHash

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_WORKERS_PER_SHARD: Final = 4000
"""Lua's unpack takes some 8,000 values at most."""
MAX_BLOCKS: Final = 1 << 17  # 2 MiB of hashes in a command
MAX_ALL_STATES: Final = 64
"""Lookups among at most this many workers always read their states."""
_MAX_QUERIES: Final = 64  # bounds the packed queries, of which each model has one
_MAX_TRIES: Final = 4
"""A lookup fails once at a server without EVALSHA_RO, and twice at one that loses the script."""
_TIMEOUT_S: Final = 2.0
"""For reads of the registry."""
_NUM_ROUNDS: Final = 4
"""Rounds of the event loop that a reply takes from the socket to the task that waits for it."""


@dataclass(frozen=True, slots=True)
class ReaderSettings(IndexSettings):
    deadline_s: float = 0.025
    poll_s: float = 1.0
    """Interval of an idle reader's checks of the registry; the same probe closes an open breaker."""
    breaker_failures: int = 3
    """Failures in a row until lookups return None at once. A successful probe ends that."""
    breaker_probe_s: float = 0.25
    refresh_interval_s: float = 0.05
    """Minimum interval between two reads of the registry, which take a tenth of the time at most."""
    states_age_s: float = 0.05
    """Age at which the states of a large fleet are read again. A lookup reads them itself at twice the age."""
    max_refresh_age_s: float = 5.0
    """Maximum interval between two reads, whatever its version: a reply may have been wrong."""


class RedisIndex:
    """`cache.records.PrefixIndex` over Redis. Needs `run()` in the event loop of its callers."""

    def __init__(
        self, url: str, settings: ReaderSettings | None = None, *, count: Callable[[str], None] = lambda event: None
    ) -> None:
        """`count(event)` feeds the metrics: timeout, down, skipped, invalid, stale, breaker_opened, breaker_closed."""
        settings = settings or ReaderSettings()
        schema.check_key_part("key prefix", settings.prefix)
        self._count = count
        self.shards = [Shard(url, number, settings, count) for number in range(settings.num_shards)]

    async def run(self) -> None:
        """Keep the connections and the registry; end only by cancellation."""
        async with asyncio.TaskGroup() as group:
            for shard in self.shards:
                group.create_task(shard.client.run())
                group.create_task(shard.probe())

    async def lookup(
        self, hashes: Sequence[BlockHash], model: str | None = None, num_tokens: int = 0
    ) -> list[Candidate] | None:
        """See `PrefixIndex`. Read the shards in parallel; those that fail contribute no candidate."""
        blob = b"".join(hashes[:MAX_BLOCKS])
        assert len(blob) % HASH_BYTES == 0
        open_shards = [shard for shard in self.shards if not shard.breaker_open]
        if len(open_shards) < len(self.shards):
            self._count("skipped")
        if len(open_shards) == 1:
            return await open_shards[0].lookup_in_time(blob, model, num_tokens)
        answers = await asyncio.gather(*(shard.lookup_in_time(blob, model, num_tokens) for shard in open_shards))
        answered = [answer for answer in answers if answer is not None]
        return [candidate for answer in answered for candidate in answer] if answered else None

    def members(self) -> list[WorkerMember]:
        """Return the registry as last read, lapsed leases included; empty before the first read."""
        return [member for shard in self.shards for member in shard.registry.members()]

    async def entries(self) -> list[RegistryEntry]:
        """Read the registry. Raises RedisDownError."""
        for shard in self.shards:
            await shard.refresh()
        return self.seen_entries()

    def seen_entries(self) -> list[RegistryEntry]:
        """Return the registry as lookups last read it, at most `poll_s` ago while Redis answers."""
        return [entry for shard in self.shards for entry in shard.registry.entries()]

    def health(self) -> list[dict[str, str | bool]]:
        """Return the state of the connection to each shard as JSON values. Addresses are without a password."""
        return [
            {"redis": shard.client.label, "connected": shard.client.up, "breaker_open": shard.breaker_open}
            for shard in self.shards
        ]


class Shard:
    """One connection, its registry, and its circuit breaker."""

    def __init__(self, url: str, number: int, settings: ReaderSettings, count: Callable[[str], None]) -> None:
        self._settings = settings
        self._count = count
        client_settings = ClientSettings(settings.username, settings.password, max_pending=1024)
        self.client = RedisClient(url, client_settings, count=count, on_change=self._connection_changed)
        self.keys = schema.Keys(settings.prefix, number)
        self._hashes = HashReader(self.client, self.keys, _TIMEOUT_S)
        self.registry = Registry(count, Signer(settings.cluster_secret, settings.prefix, number))
        self._queries: dict[str | None, Query] = {}
        self._evalsha = b"EVALSHA_RO"
        self._hvals_refused = False
        self._version: bytes | None = None
        self._seen_version = b""
        self._refreshed_at = -1e9
        self._pause_s = settings.refresh_interval_s
        self._refresh_task: asyncio.Task[None] | None = None
        self._states_task: asyncio.Task[None] | None = None
        self._states_at = -1e9
        """When a lookup last asked for the states of all workers."""
        self._num_failures = 0
        self._failed_at = -1e9
        self._wake_probe = asyncio.Event()

    # --- lookup -----------------------------------------------------------------------------------------------------

    async def lookup_in_time(self, blob: bytes, model: str | None, num_tokens: int = 0) -> list[Candidate] | None:
        """Look up within the deadline, or return None and count a failure."""
        candidates = await self.in_time(partial(self.lookup, blob, model, num_tokens))
        if candidates is not None:
            self.succeeded()
        return candidates

    async def in_time(self, ask: Callable[[], Awaitable[T | None]]) -> T | None:
        """Return what Redis answers within the deadline, or None and count a failure."""
        begun_at = time.monotonic()
        try:
            async with asyncio.timeout(None) as limit:
                timer = LoopTimer(self._settings.deadline_s, lambda: limit.reschedule(0.0))
                try:
                    return await ask()
                finally:
                    timer.cancel()
        except (TimeoutError, RedisDownError) as error:
            logger.debug("lookup failed: %r", error)
            self._count("timeout" if isinstance(error, TimeoutError) else "down")
        except Exception:  # an error here must cost prefix hits, never a request
            logger.exception("lookup failed")
            self._count("invalid")
        self.failed(begun_at)
        return None

    async def lookup(
        self, blob: bytes, model: str | None, num_tokens: int = 0, *, reads_states: bool = False
    ) -> list[Candidate]:
        """Look up the joined hashes of a prompt. Raises only RedisDownError.

        The caller sets the deadline. Without one, the client still ends a wait of `stall_s` for a reply.
        Without `reads_states`, states that are young enough are not read.
        """
        num_blocks = len(blob) // HASH_BYTES
        if self._version is None and self.client.up:
            await asyncio.shield(self._start_refresh())
        if self._version is None:
            raise RedisDownError("the registry has not been read")
        for _ in range(_MAX_TRIES):
            query = self._query(model)
            has_states = reads_states or self._needs_states(query)
            head, tail = query.with_states if has_states else query.without_states
            begun_at = time.monotonic()
            is_whole = any(size * num_blocks == num_tokens for size in query.block_sizes)
            sent = blob + b"\0" if is_whole else blob
            (reply,) = await self.client.submit((head, b"$%d\r\n" % len(sent), sent, tail), 1)
            if not isinstance(reply, ResponseError):
                if has_states and (model is None or query.has_all_states):
                    self._states_at = begun_at
                return self._candidates(query, num_blocks, reply, has_states=has_states)
            await self._prepare_server(reply)
        raise RedisDownError(f"lookup: {brief(reply)}")

    def _needs_states(self, query: Query) -> bool:
        """Return whether a lookup must read the states, and start to read old ones next to it."""
        age_s = time.monotonic() - self._states_at
        if len(query.workers) <= MAX_ALL_STATES or age_s >= 2 * self._settings.states_age_s:
            return True
        if age_s >= self._settings.states_age_s and (self._states_task is None or self._states_task.done()):
            self._states_task = asyncio.get_running_loop().create_task(self._read_states())
        return False

    async def _read_states(self) -> None:
        with suppress(RedisDownError):
            await self.lookup(b"", None, reads_states=True)

    async def _prepare_server(self, error: ResponseError) -> None:
        """Load the missing script, or use EVALSHA on an old server. Raises RedisDownError for another error.

        Other lookups may be waiting for the same reply.
        """
        if isinstance(error, NoScriptError):
            (loaded,) = await self.client.submit([pack([("SCRIPT", "LOAD", LOOKUP)])], 1)
            if isinstance(loaded, ResponseError):
                raise RedisDownError(f"SCRIPT LOAD: {loaded}")
        elif "unknown command" in str(error).lower():
            self._evalsha = b"EVALSHA"
            self._queries.clear()
        else:
            raise RedisDownError(f"lookup: {error}")

    def _query(self, model: str | None) -> Query:
        if self.registry.has_changed or len(self._queries) > _MAX_QUERIES:
            self.registry.has_changed = False
            self._queries.clear()
        if model not in self._queries:
            self._queries[model] = self._make_query(self.registry.workers(model))
        return self._queries[model]

    def _make_query(self, workers: list[KnownWorker]) -> Query:
        if len(workers) > MAX_WORKERS_PER_SHARD:
            self.registry.warn_once(b"shards", f"{len(workers)} workers in one shard: configure more shards")
            del workers[MAX_WORKERS_PER_SHARD:]
        # Reading by name costs more than reading unneeded states. But foreign values may be of any size and number.
        has_foreign_states = self.registry.has_foreign_states
        by_name = self._hvals_refused or has_foreign_states or 2 * len(workers) < len(self.registry)
        return make_query(self._evalsha, self.keys, workers, by_name=by_name, guarded=has_foreign_states)

    def _candidates(self, query: Query, num_blocks: int, reply: Reply, *, has_states: bool = True) -> list[Candidate]:
        try:
            version, now, matches, states = reply
            now_ms = schema.decode_time_ms(now)
            matched, tier_matched = query.split(matches, num_blocks)
            if isinstance(states, ResponseError):  # their key has another type, or an ACL forbids HVALS
                if self._hvals_refused:
                    self.registry.warn_once(b"states", f"the states cannot be read: {states}")
                self._hvals_refused = True  # read them by name until the next connection
                self._queries.clear()
                states = []
            if not isinstance(states, list):
                raise ReplyError(f"states are {brief(states)}")
            read = states if has_states else None
            candidates = self.registry.candidates(query.workers, matched, tier_matched, read, now_ms)
        except Exception as error:  # anything that such a reply may raise
            raise self._malformed(f"a lookup gave {brief(reply)}", error) from error
        self._seen_version = version if type(version) is bytes else b""
        if self._seen_version != self._version:
            self._start_refresh()
        return candidates

    def _malformed(self, what: str, error: Exception) -> RedisDownError:
        """Reconnect, and count a reply that does not match its command."""
        logger.debug("malformed reply", exc_info=error)
        self.client.reconnect(f"malformed reply: {what}: {type(error).__name__}: {error!s:.200}")
        return RedisDownError("malformed reply")

    # --- registry ---------------------------------------------------------------------------------------------------

    def _start_refresh(self) -> asyncio.Task[None]:
        """Return the one refresh that all callers share."""
        if self._refresh_task is None or self._refresh_task.done():
            self._refresh_task = asyncio.get_running_loop().create_task(self._refresh_later())
        return self._refresh_task

    async def _refresh_later(self) -> None:
        await asyncio.sleep(max(0.0, self._refreshed_at + self._pause_s - time.monotonic()))
        try:
            await self.refresh()
        except RedisDownError as error:
            logger.debug("registry not read: %s", error)

    async def refresh(self) -> None:
        """Read the registry. Raises RedisDownError.

        The version is from an earlier lookup: a change since then causes one more refresh.
        """
        version = self._seen_version
        names = [worker.member.worker_id.encode() for worker in self.registry.workers(None)]
        try:
            (members, states), now = await self._hashes.read(self._hashes.members, self._hashes.states, known=names)
        except ReplyError as error:
            raise self._malformed("the registry", error) from error
        started_at = time.monotonic()
        try:
            self.registry.now_ms = schema.decode_time_ms(now)
            pairs = self._pairs(members, b"members"), self._pairs(states, b"state")
            self.registry.refresh(*pairs, has_whole_states=states.is_whole)
        except Exception as error:  # anything that such a reply may raise
            raise self._malformed("the registry", error) from error
        finally:
            self._refreshed_at = time.monotonic()
            self._pause_s = max(self._settings.refresh_interval_s, 10 * (self._refreshed_at - started_at))
        self._version = version

    def _pairs(self, reading: HashReading, kind: bytes) -> Sequence[tuple[bytes, bytes | None]]:
        """Return what was read, and warn about the rest."""
        if reading.error is not None:
            self.registry.warn_once(b"type", f"the registry cannot be read: {reading.error}")
        if not reading.is_whole:
            self.registry.warn_once(kind, "the registry has values that are far too long: they are not read")
        return reading.pairs

    # --- breaker and probe ------------------------------------------------------------------------------------------

    @property
    def breaker_open(self) -> bool:
        return self._num_failures >= self._settings.breaker_failures

    def failed(self, begun_at: float) -> None:
        """Count the failure of a lookup, which may open the breaker.

        Lookups that waited together for one late reply are one failure. But where they end late themselves, this
        process lacks time: then each counts, as decisions without the index take less of it.
        """
        now = time.monotonic()
        if begun_at < self._failed_at and now - begun_at < 2.0 * self._settings.deadline_s:
            return
        self._failed_at = now
        self._num_failures += 1
        if self._num_failures == self._settings.breaker_failures:
            logger.warning("lookups fail: routing without the index until Redis answers within the deadline")
            self._count("breaker_opened")
            self._wake_probe.set()

    def succeeded(self) -> None:
        if self.breaker_open:
            logger.info("Redis answers again: routing by the index")
            self._count("breaker_closed")
        self._num_failures = 0

    async def probe(self) -> None:
        """Check the registry every `poll_s`, and close an open breaker when Redis answers."""
        while True:
            interval_s = self._settings.breaker_probe_s if self.breaker_open else self._settings.poll_s
            with suppress(TimeoutError):
                async with asyncio.timeout(interval_s):
                    await self._wake_probe.wait()
            self._wake_probe.clear()
            if not self.client.up:
                continue
            if time.monotonic() - self._refreshed_at > self._settings.max_refresh_age_s:
                self._start_refresh()
            started_at = time.monotonic()
            try:
                await self.lookup(b"", None, reads_states=True)
            except RedisDownError:
                continue
            except Exception:
                logger.exception("the probe of the index failed")
                continue
            if time.monotonic() - started_at <= self._settings.deadline_s:
                self.succeeded()

    def _connection_changed(self, up: bool) -> None:
        self._version = None  # the next refresh drops the queries
        self._evalsha = b"EVALSHA_RO"
        self._hvals_refused = False
        if up:
            self._wake_probe.set()


class LoopTimer:
    """Calls `on_end` after `seconds`, once the running event loop has read what came in this time.

    A loop that had no core for a while runs its timers first. Without some more rounds it would drop answers that came
    in time. They take at most the same time again.
    """

    __slots__ = ("_handle", "_loop", "_on_end", "_seconds")

    def __init__(self, seconds: float, on_end: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._on_end = on_end
        self._handle: asyncio.Handle = self._loop.call_later(seconds, self._begin_rounds)

    def cancel(self) -> None:
        self._handle.cancel()

    def _begin_rounds(self) -> None:
        self._handle = self._loop.call_soon(self._next_round, _NUM_ROUNDS - 1, self._loop.time() + self._seconds)

    def _next_round(self, num_left: int, latest_s: float) -> None:
        if num_left and self._loop.time() < latest_s:
            self._handle = self._loop.call_soon(self._next_round, num_left - 1, latest_s)
        else:
            self._on_end()
