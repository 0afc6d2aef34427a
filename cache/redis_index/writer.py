"""The worker's side of the shared index: its own set of blocks and its own registry entry, nothing else.

Every publish is one MULTI that reads back what it changes. Any doubt about the set (an error, a lost connection,
another count, a Redis that has gone back in time) and it is written anew under the next generation, the state is
switched to it, and the old set is unlinked. A late command of an old connection then lands in a dead generation. An
entry that somebody has overwritten or deleted is put back; the set, whose count is right, stays.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from redis.exceptions import ResponseError

from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import schema
from cache.redis_index.endpoint import Endpoint
from cache.redis_index.link import Argument, Link, LinkDownError, LinkSettings, Reply
from cache.redis_index.schema import RegistryError, ReplyError
from cache.redis_index.signing import Signer, verifies_state
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
    cluster_secret: bytes = field(default=b"", repr=False)
    """Signs the entry; empty: it goes unsigned."""


class IndexWriter:
    """Needs `run()` in the event loop of its callers; one publish or rewrite at a time."""

    def __init__(
        self,
        url: str,
        member: WorkerMember,
        settings: WriterSettings | None = None,
        *,
        count: Callable[[str], None] = lambda event: None,
    ) -> None:
        """`count(event)` feeds the metrics: invalid (reply), refused (command), displaced (entry), rewritten (set)."""
        self._settings = settings = settings or WriterSettings()
        schema.check_key_part("key prefix", settings.prefix)
        endpoint = Endpoint(url, connect_timeout_s=2.0, username=settings.username, password=settings.password)
        self._count = count
        self.link = Link(
            endpoint,
            LinkSettings(stall_s=settings.timeout_s),
            on_change=self._link_changed,
            on_garbage=lambda: count("invalid"),
        )
        shard = schema.shard_of(member.worker_id, settings.num_shards)
        self._keys = schema.Keys(settings.prefix, shard)
        self._signer = Signer(settings.cluster_secret, settings.prefix, shard)
        self._member = schema.check_member(member)
        self._record = self._signed_record()
        self._generation = 0
        self._batch = 0
        self._last_state: bytes | None = None
        self._old_sets: list[bytes] = []
        self._offset_ms: float | None = None
        self._is_refused = False
        self._rewrite_failed = False
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
        self._record = self._signed_record()
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
            ("HGET", self._keys.members, worker_id),
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
        found_state, found_record = replies[:2]
        if replies[-2] != num_entries or self._has_gone_back(found_state):
            logger.debug("the index lost or gained blocks of %s: its set is written anew", worker_id)
            return False
        displaced = found_state != self._last_state or found_record != self._record
        self._last_state = state
        if displaced:
            self._count("displaced")
        if found_record != self._record and await self._transaction(self._registration()) is None:
            return False
        return self._settled(replies[-1])

    def _registration(self) -> list[_Command]:
        return [
            ("HSET", self._keys.members, self._member.worker_id, self._record),
            ("SET", self._keys.version, secrets.token_hex(8)),
        ]

    def _has_gone_back(self, found: Reply) -> bool:
        """Whether `found` is an earlier state of this very epoch: then Redis was restored, and the set with it."""
        if found == self._last_state:
            return False
        try:
            state = schema.decode_state(found)
        except RegistryError:
            return False
        if state.epoch != self._member.epoch:
            return False
        return not self._signer.enabled or verifies_state(self._signer.state_mac(self._member.worker_id), found)

    async def rewrite(self, held: Sequence[IndexEntry], load: WorkerLoad) -> bool:
        """Write a new generation of everything held, parents first, and switch to it. False: try again later."""
        if not await self._read_clock():
            return False
        self._abandon()
        # After a failure to one that nobody can foretell, and put something there before.
        self._generation += 1 + (secrets.randbelow(1 << 32) if self._rewrite_failed else 0)
        self._rewrite_failed = True
        key, ttl_ms = self._set_key(), int(self._settings.set_ttl_s * 1000)
        if not await self._fill(key, held, ttl_ms):
            return False
        worker_id = self._member.worker_id
        state = self._state(load, len(held))
        unlink: list[_Command] = [("UNLINK", *self._old_sets)] if self._old_sets else []
        replies = await self._transaction(
            [
                *self._registration(),
                ("HSET", self._keys.states, worker_id, state),
                ("PEXPIRE", key, ttl_ms),
                *unlink,
                ("SCARD", key),
                ("TIME",),
            ]
        )
        if replies is None or replies[-2] != len(held):
            return False
        self._count("rewritten")
        self._rewrite_failed = False
        self._old_sets.clear()
        self._last_state = state
        return self._settled(replies[-1])

    async def retire(self) -> None:
        """Leave the registry, unless somebody else has taken the entry over. Errors are not reported: leases end."""
        try:
            (record,) = await self.link.call(
                ("HGET", self._keys.members, self._member.worker_id), timeout_s=self._settings.timeout_s
            )
        except LinkDownError:
            return
        if record != self._record or not self._generation:
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
        if isinstance(states, ResponseError):  # a key of another type, put right at the next publish
            return 0
        try:
            entries, now_ms = schema.decode_hash(states), schema.decode_time_ms(now)
        except ReplyError as error:
            self._garbage(error)
            return 0
        limit_ms = now_ms - int(self._settings.dead_after_s * 1000)
        dead = [field for field, value in entries if _is_dead(value, limit_ms)]
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
        """SADD in chunks, a few in flight, so that lookups get their turn in between.

        Each chunk sets the TTL in its own MULTI: no set is ever without one, wherever the worker dies.
        """
        chunks = self._chunked("SADD", key, held)
        for start in range(0, len(chunks), self._settings.chunks_in_flight):
            commands: list[_Command] = []
            for chunk in chunks[start : start + self._settings.chunks_in_flight]:
                commands += [("MULTI",), chunk, ("PEXPIRE", key, ttl_ms), ("EXEC",)]
            try:
                replies = await self.link.call(*commands, timeout_s=self._settings.timeout_s)
            except LinkDownError as error:
                logger.debug("rewrite broken off: %s", error)
                return False
            for reply in replies[3::4]:
                if not isinstance(reply, list) or not all(type(result) is int for result in reply):
                    self._refused(reply)
                    return False
        return True

    async def _transaction(self, commands: list[_Command]) -> list[Reply] | None:
        """The replies of one MULTI, one a command, or None when anything at all went wrong."""
        try:
            replies = await self.link.call(("MULTI",), *commands, ("EXEC",), timeout_s=self._settings.timeout_s)
        except LinkDownError as error:
            logger.debug("not published: %s", error)
            return None
        results = replies[-1]
        if isinstance(results, list) and len(results) == len(commands):
            errors = [result for result in results if isinstance(result, ResponseError)]
            if not errors:
                return results
            self._refused(errors[0])
            await self._remove_other_types(commands, results)
            return None
        errors = [reply for reply in replies if isinstance(reply, ResponseError)]
        if errors:
            self._refused(errors[0])
        else:
            self._garbage(ReplyError(f"{schema.brief(results)} to a MULTI of {len(commands)} commands"))
        return None

    async def _remove_other_types(self, commands: list[_Command], results: list[Reply]) -> None:
        """Unlink the keys that somebody has made another type: nothing of use stands in them."""
        keys = {
            command[1]: None
            for command, result in zip(commands, results, strict=True)
            if isinstance(result, ResponseError) and str(result).startswith("WRONGTYPE")
        }
        if keys:
            with contextlib.suppress(LinkDownError):
                await self.link.call(("UNLINK", *keys), timeout_s=self._settings.timeout_s)

    def _refused(self, reply: Reply) -> None:
        self._count("refused")
        if not self._is_refused:
            self._is_refused = True
            logger.warning("Redis refuses what %s publishes: %s", self._member.worker_id, schema.brief(reply))

    def _garbage(self, error: ReplyError) -> None:
        """The reply is of another command: begin again on another connection."""
        self._count("invalid")
        self.link.distrust(str(error))

    async def _read_clock(self) -> bool:
        try:
            (now,) = await self.link.call(("TIME",), timeout_s=self._settings.timeout_s)
        except LinkDownError:
            return False
        try:
            self._offset_ms = schema.decode_time_ms(now) - time.monotonic() * 1000
        except ReplyError as error:
            self._garbage(error)
            return False
        return True

    def _settled(self, now: Reply) -> bool:
        """The publish stands. False if Redis' clock is not where we thought: then the lease written is wrong."""
        try:
            offset_ms = schema.decode_time_ms(now) - time.monotonic() * 1000
        except ReplyError as error:
            self._garbage(error)
            return False
        assert self._offset_ms is not None
        self._is_refused = False
        jumped = abs(offset_ms - self._offset_ms) > max(_MIN_JUMP_MS, 250 * self._settings.lease_s)
        self._offset_ms = offset_ms
        self.in_doubt = jumped
        return not jumped

    def _state(self, load: WorkerLoad, num_entries: int) -> bytes:
        assert self._offset_ms is not None
        now_ms = int(time.monotonic() * 1000 + self._offset_ms)
        self._batch += 1
        state = schema.encode_state(
            self._member,
            load,
            generation=self._generation,
            batch=self._batch,
            deadline_ms=now_ms + int(self._settings.lease_s * 1000),
            written_ms=now_ms,
            num_entries=num_entries,
        )
        return self._signer.sign_state(self._member.worker_id, state)

    def _signed_record(self) -> bytes:
        return self._signer.sign_member(self._member.worker_id, schema.encode_member(self._member))

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


def _is_dead(state: Reply, limit_ms: int) -> bool:
    try:
        return schema.decode_state(state).deadline_ms < limit_ms
    except RegistryError:
        return False  # perhaps a newer worker's
