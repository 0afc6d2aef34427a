"""The worker's side of the shared index: its own set of blocks and its own registry entry, nothing else.

Every publish is one MULTI that ends by reading back what it changed. Any doubt (an error, a lost connection, another
count, an entry that is not the one written last) and the set is written anew under the next generation, the member is
switched to it, and the old set is unlinked. A late command of an old connection then lands in a dead generation.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

from redis.exceptions import ResponseError

from cache.index import WorkerLoad, WorkerMember
from cache.redis_index import schema
from cache.redis_index.endpoint import Endpoint
from cache.redis_index.link import Argument, Link, LinkDownError, LinkSettings, Reply
from cache.types import IndexEntry

logger = logging.getLogger(__name__)

_Command = Sequence[Argument]
_MIN_JUMP_MS = 250.0
"""A slow reply looks like a jump of Redis' clock; so much is no doubt."""


@dataclass(frozen=True, slots=True)
class WriterSettings:
    prefix: str = "headstart"
    num_shards: int = 1
    lease_s: float = 6.0
    set_ttl_s: float = 120.0
    timeout_s: float = 2.0
    chunk: int = 1000
    """Entries per SADD: what Redis does at one go while lookups wait."""
    chunks_in_flight: int = 8
    dead_after_s: float = 3600.0
    username: str | None = None
    password: str | None = None


class IndexWriter:
    """Needs `run()` in the event loop of its callers; one publish or rewrite at a time."""

    def __init__(self, url: str, member: WorkerMember, settings: WriterSettings | None = None) -> None:
        self._settings = settings = settings or WriterSettings()
        schema.check_key_part("key prefix", settings.prefix)
        endpoint = Endpoint(url, connect_timeout_s=2.0, username=settings.username, password=settings.password)
        self.link = Link(endpoint, LinkSettings(stall_s=settings.timeout_s), on_change=self._link_changed)
        self._keys = schema.Keys(settings.prefix, schema.shard_of(member.worker_id, settings.num_shards))
        self._member = schema.check_member(member)
        self._generation = 0
        self._batch = 0
        self._last_state: bytes | None = None
        self._old_sets: list[bytes] = []
        self._offset_ms: float | None = None
        self.in_doubt = True
        """The set must be rewritten before anything else is published."""

    async def run(self) -> None:
        """Keep the connection; ends only by cancellation."""
        await self.link.run()

    @property
    def member(self) -> WorkerMember:
        return self._member

    def begin_epoch(self, member: WorkerMember) -> None:
        """From the next rewrite on the worker is `member`: its old epoch's set is unlinked then."""
        if member.worker_id != self._member.worker_id:
            raise ValueError(f"worker_id {member.worker_id!r}: this writer is {self._member.worker_id!r}")
        self._abandon()
        self._member = schema.check_member(member)
        self.in_doubt = True

    async def publish(
        self, stored: Sequence[IndexEntry], removed: Sequence[IndexEntry], load: WorkerLoad, num_entries: int
    ) -> bool:
        """One MULTI. `stored` parents first, `removed` children first, `num_entries` held afterwards.

        False: there is doubt, and `rewrite` must follow.
        """
        assert not self.in_doubt
        key, worker_id = self._set_key(), self._member.worker_id
        state = self._state(load, num_entries)
        changes: list[_Command] = [*self._chunked("SADD", key, stored), *self._chunked("SREM", key, removed)]
        commands: list[_Command] = [
            ("HGET", self._keys.states, worker_id),
            ("HEXISTS", self._keys.members, worker_id),
            *changes,
            ("PEXPIRE", key, int(self._settings.set_ttl_s * 1000)),
            ("HSET", self._keys.states, worker_id, state),
            ("SCARD", key),
            ("TIME",),
        ]
        self.in_doubt = True  # until the reply has said otherwise
        replies = await self._transaction(commands)
        if replies is None:
            return False
        if replies[0] != self._last_state or replies[1] != 1 or replies[-2] != num_entries:
            logger.info("the index lost or gained something of %s: it is written anew", worker_id)
            return False
        self._last_state = state
        return self._settled(replies[-1])

    async def rewrite(self, held: Sequence[IndexEntry], load: WorkerLoad) -> bool:
        """Write a new generation of everything held, parents first, and switch to it. False: try again later."""
        if not await self._read_clock():
            return False
        self._abandon()
        self._generation += 1
        key, ttl_ms = self._set_key(), int(self._settings.set_ttl_s * 1000)
        if not await self._fill(key, held, ttl_ms):
            return False
        worker_id = self._member.worker_id
        state = self._state(load, len(held))
        unlink: list[_Command] = [("UNLINK", *self._old_sets)] if self._old_sets else []
        replies = await self._transaction(
            [
                ("HSET", self._keys.members, worker_id, schema.encode_member(self._member)),
                ("HSET", self._keys.states, worker_id, state),
                ("SET", self._keys.version, secrets.token_hex(8)),
                ("PEXPIRE", key, ttl_ms),
                *unlink,
                ("SCARD", key),
                ("TIME",),
            ]
        )
        if replies is None or replies[-2] != len(held):
            return False
        self._old_sets.clear()
        self._last_state = state
        return self._settled(replies[-1])

    async def retire(self) -> None:
        """Leave the registry, unless somebody else has taken the entry over. Errors are not reported: leases end."""
        try:
            (state,) = await self.link.call(
                ("HGET", self._keys.states, self._member.worker_id), timeout_s=self._settings.timeout_s
            )
        except LinkDownError:
            return
        if state is None or state != self._last_state:
            return
        worker_id = self._member.worker_id
        await self._transaction(
            [
                ("HDEL", self._keys.members, worker_id),
                ("HDEL", self._keys.states, worker_id),
                ("SET", self._keys.version, secrets.token_hex(8)),
                ("UNLINK", self._set_key(), *self._old_sets),
            ]
        )
        self.in_doubt = True

    async def prune(self) -> int:
        """Remove members whose lease ended an hour ago. A revived one finds its entry gone and writes it anew."""
        try:
            states, now = await self.link.call(
                ("HGETALL", self._keys.states), ("TIME",), timeout_s=self._settings.timeout_s
            )
        except LinkDownError:
            return 0
        if not isinstance(states, list) or not isinstance(now, list):
            return 0
        limit_ms = _milliseconds(now) - int(self._settings.dead_after_s * 1000)
        dead = [field for field, value in zip(states[::2], states[1::2], strict=True) if _is_dead(value, limit_ms)]
        dead = [field for field in dead if field != self._member.worker_id.encode()][:1000]
        if dead:
            await self._transaction(
                [
                    ("HDEL", self._keys.members, *dead),
                    ("HDEL", self._keys.states, *dead),
                    ("SET", self._keys.version, secrets.token_hex(8)),
                ]
            )
            logger.info("removed %d dead members from the registry", len(dead))
        return len(dead)

    async def _fill(self, key: bytes, held: Sequence[IndexEntry], ttl_ms: int) -> bool:
        """SADD in chunks, a few in flight, so that lookups get their turn in between."""
        group = self._settings.chunk * self._settings.chunks_in_flight
        for start in range(0, len(held), group):
            commands = [*self._chunked("SADD", key, held[start : start + group]), ("PEXPIRE", key, ttl_ms)]
            try:
                replies = await self.link.call(*commands, timeout_s=self._settings.timeout_s)
            except LinkDownError as error:
                logger.debug("rewrite broken off: %s", error)
                return False
            if any(isinstance(reply, ResponseError) for reply in replies):
                logger.warning("the index refused entries of %s: %s", self._member.worker_id, replies[0])
                return False
        return True

    async def _transaction(self, commands: list[_Command]) -> list[Reply] | None:
        """The replies of one MULTI, or None when anything at all went wrong."""
        try:
            replies = await self.link.call(("MULTI",), *commands, ("EXEC",), timeout_s=self._settings.timeout_s)
        except LinkDownError as error:
            logger.debug("not published: %s", error)
            return None
        results = replies[-1]
        errors = [reply for reply in replies if isinstance(reply, ResponseError)]
        if not isinstance(results, list):
            logger.warning(
                "Redis refused a publish of %s: %s", self._member.worker_id, errors[0] if errors else results
            )
            return None
        if any(isinstance(result, ResponseError) for result in results):
            logger.warning("Redis refused part of a publish of %s", self._member.worker_id)
            return None
        return results

    async def _read_clock(self) -> bool:
        try:
            (now,) = await self.link.call(("TIME",), timeout_s=self._settings.timeout_s)
        except LinkDownError:
            return False
        if not isinstance(now, list):
            return False
        self._offset_ms = _milliseconds(now) - time.monotonic() * 1000
        return True

    def _settled(self, now: Reply) -> bool:
        """The publish stands. False if Redis' clock is not where we thought: then the lease written is wrong."""
        offset_ms = _milliseconds(now) - time.monotonic() * 1000
        assert self._offset_ms is not None
        jumped = abs(offset_ms - self._offset_ms) > max(_MIN_JUMP_MS, 250 * self._settings.lease_s)
        self._offset_ms = offset_ms
        self.in_doubt = jumped
        return not jumped

    def _state(self, load: WorkerLoad, num_entries: int) -> bytes:
        assert self._offset_ms is not None
        now_ms = int(time.monotonic() * 1000 + self._offset_ms)
        self._batch += 1
        return schema.encode_state(
            self._member,
            load,
            generation=self._generation,
            batch=self._batch,
            deadline_ms=now_ms + int(self._settings.lease_s * 1000),
            written_ms=now_ms,
            num_entries=num_entries,
        )

    def _set_key(self) -> bytes:
        return self._keys.blocks(self._member.worker_id, self._member.epoch, self._generation)

    def _abandon(self) -> None:
        """The current generation is to be unlinked at the next switch; what is forgotten here ends by its TTL."""
        if self._generation:
            key = self._set_key()
            if key not in self._old_sets:
                self._old_sets.append(key)
            del self._old_sets[:-100]

    def _chunked(self, command: str, key: bytes, entries: Sequence[IndexEntry]) -> list[_Command]:
        size = self._settings.chunk
        return [(command, key, *entries[start : start + size]) for start in range(0, len(entries), size)]

    def _link_changed(self, up: bool) -> None:
        self.in_doubt = True


def _milliseconds(now: Reply) -> int:
    return int(now[0]) * 1000 + int(now[1]) // 1000


def _is_dead(state: Reply, limit_ms: int) -> bool:
    try:
        return schema.decode_state(state).deadline_ms < limit_ms
    except (schema.RegistryError, TypeError):
        return False  # perhaps a newer worker's
