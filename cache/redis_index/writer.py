"""The worker's side of the shared index: its own sets of blocks and its own registry entry, nothing else.

The pool has a set, and so has each tier below it. Every publish is one MULTI that also reads back. After any doubt
about a set, the worker writes a new version of all, switches its state to it, and unlinks the old one. Doubts are an
error, a lost connection, a wrong count, and a Redis that has gone back in time. A late command of an old connection
writes to a key that no reader knows any more.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from redis.exceptions import ResponseError

from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import schema
from cache.redis_index.client import Argument, RedisClient, RedisDownError, Reply
from cache.redis_index.connection import ClientSettings, WriterSettings
from cache.redis_index.hashes import HashLimit, is_too_large, read_hashes, registry_hashes, size_commands
from cache.redis_index.registry import Registry, RegistryEntry
from cache.redis_index.schema import RegistryError, ReplyError, Signer, verifies_state
from cache.types import IndexEntry

logger = logging.getLogger(__name__)

_Command = Sequence[Argument]
_MIN_JUMP_MS: Final = 250.0
"""Jumps of Redis' clock below this are ignored: a late reply looks like one."""
MAX_FOREIGN_BYTES: Final = 64 << 10
"""Longer names and values are no worker's, whatever its version: they are removed."""
_MAX_OLD_SETS: Final = 100
"""Sets to be unlinked at the next switch; those beyond end by their TTL."""


class SetChange(NamedTuple):
    """A change of the set of the pool, or of a tier's."""

    stored: Sequence[IndexEntry]
    """Parents first."""
    removed: Sequence[IndexEntry]
    """Children first."""
    num_entries: int
    """Held afterwards."""


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
        self._count = count
        client_settings = ClientSettings(settings.username, settings.password, stall_s=settings.timeout_s)
        self.client = RedisClient(url, client_settings, count=count, on_change=self._connection_changed)
        shard = schema.shard_of(member.worker_id, settings.num_shards)
        self._keys = schema.Keys(settings.prefix, shard)
        self._hashes = registry_hashes(self._keys)
        self._unreadable: set[bytes] = set()
        """Hashes whose names did not come: they are too long, or the connection broke."""
        self._signer = Signer(settings.cluster_secret, settings.prefix, shard)
        self._describe(member)
        self._set_version = 0
        self._batch = 0
        self._set_keys: list[bytes] = []
        """The keys of the current version: the pool, then the tiers. Empty before the first rewrite."""
        self._old_sets: deque[bytes] = deque(maxlen=_MAX_OLD_SETS)
        self._last_state: bytes | None = None
        self._offset_ms: float | None = None
        """Redis' clock less ours."""
        self._is_refused = False
        self._rewrite_failed = False
        self.in_doubt = True
        """The sets must be rewritten before anything else is published."""

    async def run(self) -> None:
        """Keep the connection; end only by cancellation."""
        await self.client.run()

    def begin_epoch(self, member: WorkerMember) -> None:
        """Use `member` from now on. The next rewrite unlinks the old epoch's sets."""
        if member.worker_id != self.member.worker_id:
            raise ValueError(f"worker_id {member.worker_id!r}: this writer is {self.member.worker_id!r}")
        self._describe(member)
        self.in_doubt = True

    async def publish(
        self,
        stored: Sequence[IndexEntry],
        removed: Sequence[IndexEntry],
        load: WorkerLoad,
        num_entries: int,
        tiers: Sequence[SetChange] = (),
    ) -> bool:
        """Publish changes in one MULTI, and put back an entry that others have overwritten.

        `stored`, `removed` and `num_entries` are the pool's `SetChange`; `tiers` has one for each of the member's
        tiers. False: there is doubt, and `rewrite` must follow.
        """
        assert not self.in_doubt
        worker_id, ttl_ms = self.member.worker_id, int(self._settings.set_ttl_s * 1000)
        changes = [SetChange(stored, removed, num_entries), *tiers]
        num_held = [change.num_entries for change in changes]
        state = self._state(load, num_held)
        commands: list[_Command] = [("HGET", self._keys.states, worker_id), ("HGET", self._keys.members, worker_id)]
        for key, change in zip(self._set_keys, changes, strict=True):
            commands += self._chunked("SADD", key, change.stored)
            commands += self._chunked("SREM", key, change.removed)
            commands.append(("PEXPIRE", key, ttl_ms))
        commands.append(("HSET", self._keys.states, worker_id, state))
        commands += [("SCARD", key) for key in self._set_keys]
        commands.append(("TIME",))
        self.in_doubt = True  # until the reply has settled it
        replies = await self._transaction(commands)
        if replies is None:
            return False
        found_state, found_record = replies[:2]
        if replies[-1 - len(num_held) : -1] != num_held or self._has_gone_back(found_state):
            logger.debug("the index lost or gained blocks of %s: rewriting its sets", worker_id)
            return False
        displaced = found_state != self._last_state or found_record != self._record
        self._last_state = state
        if displaced:
            self._count("displaced")
        if found_record != self._record and await self._transaction(self._registration()) is None:
            return False
        return self._settle(replies[-1])

    def _has_gone_back(self, found: Reply) -> bool:
        """Return whether `found` is an earlier state of this epoch: then Redis was restored, and the set with it."""
        if found == self._last_state:
            return False
        try:
            state = schema.decode_state(found)
        except RegistryError:
            return False
        is_genuine = not self._signer.enabled or verifies_state(self._signer.state_mac(self.member.worker_id), found)
        return state.epoch == self.member.epoch and is_genuine

    async def rewrite(
        self, held: Sequence[IndexEntry], load: WorkerLoad, tiers: Sequence[Sequence[IndexEntry]] = ()
    ) -> bool:
        """Write a new version of everything held, parents first, and switch to it. False: try again later.

        `held` is the pool's; `tiers` has what each of the member's tiers holds.
        """
        replies = await self._ask(("TIME",))
        if replies is None or not self._take_clock(replies[0]):
            return False
        self._old_sets.extend(self._set_keys)
        # After a failure, choose an unpredictable one: someone may have put a foreign key in our way.
        self._set_version += 1 + (secrets.randbelow(1 << 32) if self._rewrite_failed else 0)
        self._rewrite_failed = True
        worker_id, ttl_ms = self.member.worker_id, int(self._settings.set_ttl_s * 1000)
        self._set_keys = [
            self._keys.blocks(worker_id, self.member.epoch, self._set_version, tier)
            for tier in (None, *self.member.tiers)
        ]
        num_held = []
        for key, entries in zip(self._set_keys, (held, *tiers), strict=True):
            if not await self._fill(key, entries, ttl_ms):
                return False
            num_held.append(len(entries))
        state = self._state(load, num_held)
        unlink: list[_Command] = [("UNLINK", *self._old_sets)] if self._old_sets else []
        replies = await self._transaction(
            [
                *self._registration(),
                ("HSET", self._keys.states, worker_id, state),
                *(("PEXPIRE", key, ttl_ms) for key in self._set_keys),
                *unlink,
                *(("SCARD", key) for key in self._set_keys),
                ("TIME",),
            ]
        )
        if replies is None or replies[-1 - len(num_held) : -1] != num_held:
            return False
        self._count("rewritten")
        self._rewrite_failed = False
        self._old_sets.clear()
        self._last_state = state
        return self._settle(replies[-1])

    async def retire(self) -> None:
        """Leave the registry, unless another process has taken the entry over. Ignore errors: leases end."""
        worker_id = self.member.worker_id
        replies = await self._ask(("HGET", self._keys.members, worker_id))
        if replies is None or replies[0] != self._record or not self._set_keys:
            return
        await self._transaction([*self._removal([worker_id]), ("UNLINK", *self._set_keys, *self._old_sets)])
        self.in_doubt = True

    async def workers(self) -> list[RegistryEntry]:
        """Return the registry of this worker's shard; empty when it cannot be read."""
        registry = Registry(self._count, self._signer)
        try:
            (members, states), now = await read_hashes(self.client, self._hashes, (), self._settings.timeout_s)
            registry.now_ms = schema.decode_time_ms(now)
            registry.refresh(members.pairs, states.pairs)
        except (RedisDownError, ReplyError) as error:
            logger.debug("the registry cannot be read: %s", error)
        return registry.entries()

    async def prune(self) -> int:
        """Remove members with a lease that ended an hour ago. A revived worker writes a new entry."""
        try:
            (states,), now = await read_hashes(self.client, self._hashes[1:], (), self._settings.timeout_s)
            now_ms = schema.decode_time_ms(now)
        except RedisDownError as error:
            logger.debug("not pruned: %s", error)
            return 0
        except ReplyError as error:
            self.client.reconnect(str(error))
            return 0
        limit_ms = now_ms - int(self._settings.dead_after_s * 1000)
        own = self.member.worker_id.encode()
        dead = [field for field, value in states.pairs if field != own and _is_dead(value, limit_ms)][:1000]
        if dead:
            await self._transaction(self._removal(dead))
            logger.info("removed %d dead members from the registry", len(dead))
        return len(dead)

    async def remove_oversized(self) -> int:
        """Remove fields that are far too long from the registry. Return how many fields it has.

        A hash whose names alone are too much to read is unlinked whole: each worker puts its own entry back.
        """
        sizes = await self._ask(*(command for limit in self._hashes for command in size_commands(limit)))
        num_fields = 0
        for at, limit in enumerate(self._hashes if sizes is not None else ()):
            assert sizes is not None
            num_fields += sizes[2 * at] if type(sizes[2 * at]) is int else 0
            if is_too_large(limit, *sizes[2 * at : 2 * at + 2]):
                await self._shorten(limit)
        return num_fields

    async def _shorten(self, limit: HashLimit) -> None:
        key = limit.key
        if key in self._unreadable:
            self._unreadable.discard(key)
            await self._transaction([("UNLINK", key), *self._news()])
            logger.warning("removed %s: its names were too long to be read", key.decode())
            return
        self._unreadable.add(key)  # unless its names come
        replies = await self._ask(("HKEYS", key))
        if replies is None:
            return
        self._unreadable.discard(key)
        names = [name for name in replies[0] if type(name) is bytes] if isinstance(replies[0], list) else []
        lengths = await self._ask(*(("HSTRLEN", key, name) for name in names)) if names else None
        if lengths is None:
            return
        sizes = [length if type(length) is int else 0 for length in lengths]
        long = [name for name, size in zip(names, sizes, strict=True) if max(size, len(name)) > MAX_FOREIGN_BYTES]
        if long:
            await self._transaction([("HDEL", key, *long[:1000]), *self._news()])
            logger.warning("removed %d fields that were far too long from %s", len(long), key.decode())

    # --- commands ---------------------------------------------------------------------------------------------------

    def _registration(self) -> list[_Command]:
        return [
            ("HSET", self._keys.members, self.member.worker_id, self._record),
            *self._news(),
        ]

    def _news(self) -> list[_Command]:
        """Return what makes readers read the registry again."""
        return [("SET", self._keys.version, secrets.token_hex(8))]

    def _removal(self, worker_ids: Sequence[Argument]) -> list[_Command]:
        return [
            ("HDEL", self._keys.members, *worker_ids),
            ("HDEL", self._keys.states, *worker_ids),
            *self._news(),
        ]

    def _chunked(self, command: str, key: bytes, entries: Sequence[IndexEntry]) -> list[_Command]:
        size = self._settings.chunk
        return [(command, key, *entries[start : start + size]) for start in range(0, len(entries), size)]

    async def _fill(self, key: bytes, held: Sequence[IndexEntry], ttl_ms: int) -> bool:
        """SADD in chunks, a few at a time, so that lookups get their turn in between.

        Each chunk sets the TTL in its own MULTI: no set is ever without one, wherever the worker dies.
        """
        chunks, size = self._chunked("SADD", key, held), self._settings.chunks_in_flight
        for start in range(0, len(chunks), size):
            sent = [self._transaction([chunk, ("PEXPIRE", key, ttl_ms)]) for chunk in chunks[start : start + size]]
            if None in await asyncio.gather(*sent):
                return False
        return True

    async def _transaction(self, commands: list[_Command]) -> list[Reply] | None:
        """Return the replies of one MULTI, one per command, or None after any error."""
        replies = await self._ask(("MULTI",), *commands, ("EXEC",))
        if replies is None:
            return None
        results = replies[-1]
        if not isinstance(results, list) or len(results) != len(commands):
            refusals = [reply for reply in replies if isinstance(reply, ResponseError)]
            if refusals:
                self._refused(refusals[0])
            else:
                self.client.reconnect(f"{schema.brief(results)} to a MULTI of {len(commands)} commands")
            return None
        errors = [result for result in results if isinstance(result, ResponseError)]
        if not errors:
            return results
        self._refused(errors[0])
        is_other_type = [isinstance(r, ResponseError) and str(r).startswith("WRONGTYPE") for r in results]
        if any(is_other_type):  # such keys hold nothing of use
            await self._ask(("UNLINK", *{command[1] for command in itertools.compress(commands, is_other_type)}))
        return None

    async def _ask(self, *commands: _Command) -> list[Reply] | None:
        """Return one reply per command, or None without a connection or in time."""
        try:
            return await self.client.call(*commands, timeout_s=self._settings.timeout_s)
        except RedisDownError as error:
            logger.debug("not published: %s", error)
            return None

    def _refused(self, reply: Reply) -> None:
        self._count("refused")
        if not self._is_refused:
            self._is_refused = True
            logger.warning("Redis refuses what %s publishes: %s", self.member.worker_id, schema.brief(reply))

    def _connection_changed(self, up: bool) -> None:
        self.in_doubt = True

    # --- state ------------------------------------------------------------------------------------------------------

    def _take_clock(self, now: Reply) -> bool:
        """Note Redis' clock. False: the reply is not one of TIME."""
        try:
            self._offset_ms = schema.decode_time_ms(now) - time.monotonic() * 1000
        except ReplyError as error:
            self.client.reconnect(str(error))
            return False
        return True

    def _settle(self, now: Reply) -> bool:
        """End the doubt about a publish. False if Redis' clock has jumped: then the lease written is wrong."""
        before_ms = self._offset_ms
        if not self._take_clock(now):
            return False
        assert before_ms is not None
        assert self._offset_ms is not None
        self._is_refused = False
        self.in_doubt = abs(self._offset_ms - before_ms) > max(_MIN_JUMP_MS, 250 * self._settings.lease_s)
        return not self.in_doubt

    def _state(self, load: WorkerLoad, num_held: Sequence[int]) -> bytes:
        assert self._offset_ms is not None
        now_ms = int(time.monotonic() * 1000 + self._offset_ms)
        self._batch += 1
        state = schema.encode_state(
            self.member,
            load,
            tuple(num_held[1:]),
            set_version=self._set_version,
            batch=self._batch,
            deadline_ms=now_ms + int(self._settings.lease_s * 1000),
            written_ms=now_ms,
            num_entries=num_held[0],
        )
        return self._signer.sign_state(self.member.worker_id, state)

    def _describe(self, member: WorkerMember) -> None:
        schema.check_key_part("worker_id", member.worker_id)
        schema.check_key_part("epoch", member.epoch)
        self.member = member
        self._record = self._signer.sign_member(member.worker_id, schema.encode_member(member))


def _is_dead(state: Reply, limit_ms: int) -> bool:
    try:
        return schema.decode_state(state).deadline_ms < limit_ms
    except RegistryError:
        return False  # perhaps a newer worker's
