"""The worker's side of the shared index: it writes only its own sets of blocks and its own registry entry.

Every publish is one MULTI that also reads back. A set is in doubt after an error, a lost connection, a wrong set size,
or a restored backup. Then the worker writes a new version of all sets, switches its state to it, and unlinks the old
sets. A late command of an old connection writes to a key that no reader uses.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from cache.records import WorkerLoad, WorkerMember
from cache.redis_index import schema
from cache.redis_index.client import Argument, Command, RedisClient, Reply, Transactions
from cache.redis_index.connection import ClientSettings, WriterSettings
from cache.redis_index.schema import RegistryError, ReplyError, Signer, verifies_state
from cache.redis_index.upkeep import RegistryUpkeep, new_version, removal
from cache.types import IndexEntry

logger = logging.getLogger(__name__)

_MIN_JUMP_MS: Final = 250.0
"""Smaller jumps of Redis' clock are ignored: a late reply looks like one."""
_MAX_OLD_SETS: Final = 100
"""Sets to be unlinked at the next switch; further sets end by their TTL."""


class SetChange(NamedTuple):
    """A change of one set."""

    stored: Sequence[IndexEntry]
    """Parents first."""
    removed: Sequence[IndexEntry]
    """Children first."""
    num_entries: int
    """The size of the set afterwards."""
    stops: Sequence[int] = ()
    """In a pool with ends: after how many blocks a hit stops that matches up to each of `stored`."""


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
        self.run = self.client.run
        shard = schema.shard_of(member.worker_id, settings.num_shards)
        self._keys = schema.Keys(settings.prefix, shard)
        self._signer = Signer(settings.cluster_secret, settings.prefix, shard)
        self._describe(member)
        self._transactions = Transactions(self.client, settings.timeout_s, member.worker_id, count)
        self.upkeep = RegistryUpkeep(
            self.client, self._transactions, self._keys, self._signer, member.worker_id, settings, count
        )
        self._set_version = 0
        self._batch = 0
        self._set_keys: list[bytes] = []
        """`Keys.sets` of the current version. Empty before the first rewrite."""
        self._old_sets: deque[bytes] = deque(maxlen=_MAX_OLD_SETS)
        self._last_state: bytes | None = None
        self._offset_ms: float | None = None
        """Redis' clock minus the local clock."""
        self._rewrite_failed = False
        self.in_doubt = True
        """The sets must be rewritten before anything else is published."""

    def begin_epoch(self, member: WorkerMember) -> None:
        """Replace the member. The next rewrite unlinks the old epoch's sets."""
        self._describe(member)
        self.in_doubt = True

    async def publish(self, changes: Sequence[SetChange], load: WorkerLoad) -> bool:
        """Publish changes in one MULTI, and restore an entry that others have overwritten.

        `changes` has one for each of `Keys.sets`. False: the sets are in doubt, and `rewrite` must follow.
        """
        assert not self.in_doubt
        worker_id, ttl_ms = self.member.worker_id, int(self._settings.set_ttl_s * 1000)
        num_held = [change.num_entries for change in changes]
        state = self._state(load, num_held)
        commands: list[Command] = [("HGET", self._keys.states, worker_id), ("HGET", self._keys.members, worker_id)]
        for key, change in zip(self._set_keys, changes, strict=True):
            commands += self._stored(key, change.stored, change.stops)
            commands += self._chunked("HDEL" if self._is_hash(key) else "SREM", key, change.removed)
            commands.append(("PEXPIRE", key, ttl_ms))
        commands.append(("HSET", self._keys.states, worker_id, state))
        commands += self._sizes()
        commands.append(("TIME",))
        self.in_doubt = True  # until the reply has arrived
        replies = await self._transactions.run(commands)
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
        if found_record != self._record and await self._transactions.run(self._registration()) is None:
            return False
        return self._settle(replies[-1])

    def _has_gone_back(self, found: Reply) -> bool:
        """Return whether `found` is an earlier state of this epoch, so that Redis was restored from a backup."""
        if found == self._last_state:
            return False
        try:
            state = schema.decode_state(found)
        except RegistryError:
            return False
        is_verified = not self._signer.enabled or verifies_state(self._signer.state_mac(self.member.worker_id), found)
        return state.epoch == self.member.epoch and is_verified

    async def rewrite(
        self,
        held: Sequence[IndexEntry],
        load: WorkerLoad,
        others: Sequence[Sequence[IndexEntry]] = (),
        stops: Sequence[int] = (),
    ) -> bool:
        """Write a new version of all sets, parents first, and switch to it. False: try again later.

        `held` is for the first of `Keys.sets`, with its `stops` if the member has ends; `others` are for the rest.
        """
        failed: list[Command] = [("UNLINK", *self._set_keys)] if self._rewrite_failed else []  # else memory runs out
        replies = await self._transactions.ask(("TIME",), *failed)
        if replies is None or not self._take_clock(replies[0]):
            return False
        self._old_sets.extend(self._set_keys)
        # After a failure, choose an unpredictable one: another process may own this key.
        self._set_version += 1 + (secrets.randbelow(1 << 32) if self._rewrite_failed else 0)
        self._rewrite_failed = True
        worker_id, ttl_ms = self.member.worker_id, int(self._settings.set_ttl_s * 1000)
        self._set_keys = self._keys.sets(self.member, self._set_version)
        num_held = [len(entries) for entries in (held, *others)]
        for key, entries in zip(self._set_keys, (held, *others), strict=True):
            if not await self._fill(key, self._stored(key, entries, stops), ttl_ms):
                return False
        state = self._state(load, num_held)
        unlink: list[Command] = [("UNLINK", *self._old_sets)] if self._old_sets else []
        replies = await self._transactions.run(
            [
                *self._registration(),
                ("HSET", self._keys.states, worker_id, state),
                *(("PEXPIRE", key, ttl_ms) for key in self._set_keys),
                *unlink,
                *self._sizes(),
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
        """Leave the registry, unless another process has replaced the entry. Ignores errors: the lease ends anyway."""
        worker_id = self.member.worker_id
        replies = await self._transactions.ask(("HGET", self._keys.members, worker_id))
        if replies is None or replies[0] != self._record or not self._set_keys:
            return
        await self._transactions.run([*removal(self._keys, [worker_id]), ("UNLINK", *self._set_keys, *self._old_sets)])
        self.in_doubt = True

    # --- commands ---------------------------------------------------------------------------------------------------

    def _registration(self) -> list[Command]:
        return [("HSET", self._keys.members, self.member.worker_id, self._record), new_version(self._keys)]

    def _chunked(self, command: str, key: bytes, words: Sequence[Argument], num_per_entry: int = 1) -> list[Command]:
        size = self._settings.chunk * num_per_entry
        return [(command, key, *words[start : start + size]) for start in range(0, len(words), size)]

    def _stored(self, key: bytes, entries: Sequence[IndexEntry], stops: Sequence[int]) -> list[Command]:
        """Return the commands that store entries in a set, or with their `stops` in a hash."""
        if not self._is_hash(key):
            return self._chunked("SADD", key, entries)
        return self._chunked("HSET", key, [word for pair in zip(entries, stops, strict=True) for word in pair], 2)

    def _is_hash(self, key: bytes) -> bool:
        return self.member.ends in schema.KNOWN_ENDS and key == self._set_keys[0]

    def _sizes(self) -> list[Command]:
        """Return the commands that read how many entries each of `_set_keys` has."""
        return [("HLEN" if self._is_hash(key) else "SCARD", key) for key in self._set_keys]

    async def _fill(self, key: bytes, chunks: Sequence[Command], ttl_ms: int) -> bool:
        """Run the chunks, a few at a time, so that lookups run in between.

        Each chunk sets the TTL in its own MULTI: no set is ever without one, even if the worker dies.
        """
        size = self._settings.chunks_in_flight
        for start in range(0, len(chunks), size):
            sent = [self._transactions.run([chunk, ("PEXPIRE", key, ttl_ms)]) for chunk in chunks[start : start + size]]
            if None in await asyncio.gather(*sent):
                return False
        return True

    def _connection_changed(self, up: bool) -> None:
        self.in_doubt = True

    # --- state ------------------------------------------------------------------------------------------------------

    def _take_clock(self, now: Reply) -> bool:
        """Read Redis' clock from a reply of TIME. False: it is none."""
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
        self._transactions.accepted()
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
