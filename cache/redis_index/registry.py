"""The workers of one shard as last read from Redis: their members and their states.

Nothing read from Redis is trusted. A value that does not decode is ignored, counted, and logged once. With a cluster
secret, so are unsigned values, old batch numbers and old epochs. The worker of an ignored value stays as it was until
its lease ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2s
from operator import itemgetter
from typing import Final

from cache.records import Candidate, WorkerLoad, WorkerMember
from cache.redis_index import schema
from cache.redis_index.client import Reply
from cache.redis_index.schema import RegistryError, Signer, StateRecord, verifies_state
from cache.types import TIERS, TierName, WorkerId

logger = logging.getLogger(__name__)

_MAX_WARNINGS: Final = 200  # bounds the memory for forged entries
_MAX_UNSIGNED: Final = 256
"""Maximum number of unsigned members kept, for workers of versions without signatures."""
_NO_STATE: Final = StateRecord(0, "", 0, 0, 0, 0, 0, WorkerLoad())


@dataclass(slots=True, eq=False)
class KnownWorker:
    """One registry entry as last read."""

    member: WorkerMember
    record: bytes
    """The member, as stored in Redis."""
    mac: blake2s
    """The begun MAC of its states."""
    state: StateRecord = _NO_STATE
    raw: bytes = b""
    """The state, as stored in Redis."""

    def entry(self, now_ms: int) -> RegistryEntry:
        state = self.state
        lease_left_s, age_s = (state.deadline_ms - now_ms) * 1e-3, (now_ms - state.written_ms) * 1e-3
        return RegistryEntry(
            self.member,
            state.load,
            state.num_entries,
            {tier: num for tier, num in zip(self.member.tiers, state.num_tier_entries, strict=False) if tier in TIERS},
            state.set_version,
            lease_left_s,
            age_s,
        )


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """One worker for `headstart index` and the dashboard, live or lapsed."""

    member: WorkerMember
    load: WorkerLoad
    num_entries: int
    num_tier_entries: dict[TierName, int]
    set_version: int
    lease_left_s: float
    age_s: float


class Registry:
    """Belongs to one shard of the index."""

    def __init__(self, count: Callable[[str], None], signer: Signer) -> None:
        """`count` counts "invalid" for each ignored value, "stale" for each valid one out of date."""
        self._count = count
        self._signer = signer
        self._is_signed = signer.enabled
        self._workers: dict[WorkerId, KnownWorker] = {}
        self._unverified: list[WorkerMember] = []
        """Unsigned members, or members of a past epoch; used only as addresses to poll."""
        self._by_epoch: dict[str, KnownWorker] = {}
        self._by_raw: dict[bytes, KnownWorker] = {}
        self._found: set[KnownWorker] = set()
        """Without a secret, the workers whose states were in Redis when they were last read."""
        self._warned: set[bytes] = set()
        self.now_ms = 0
        """Redis' clock at its last reply."""
        self.has_foreign_states = False
        """The hash of states has foreign values, of any size and number: read states by name."""
        self.has_changed = True
        """Queries are out of date: workers, set versions or foreign states have changed. The reader resets it."""

    def __len__(self) -> int:
        return len(self._workers)

    def workers(self, model: str | None) -> list[KnownWorker]:
        """Return the workers of `model`, or all."""
        return [worker for worker in self._workers.values() if model is None or worker.member.model == model]

    def members(self) -> list[WorkerMember]:
        """Return verified members first, then some unverified ones."""
        return [worker.member for worker in self._workers.values()] + self._unverified

    def entries(self) -> list[RegistryEntry]:
        """Return every worker with a state, lapsed ones included."""
        return [worker.entry(self.now_ms) for worker in self._workers.values() if worker.state is not _NO_STATE]

    def refresh(
        self,
        members: Sequence[tuple[bytes, bytes | None]],
        states: Sequence[tuple[bytes, bytes | None]],
        *,
        has_whole_states: bool = True,
    ) -> None:
        """Take the pairs of both hashes, with None for a value that is too long.

        Without `has_whole_states`, the second was read in part.
        """
        known = {worker.member.worker_id.encode(): worker for worker in self._workers.values()}
        self._unverified = []
        if len(members) > schema.MAX_MEMBERS:
            self.warn_once(b"members", f"{len(members)} members: more than {schema.MAX_MEMBERS}")
            members = [(field, record) for field, record in members if field in known]
        found = [self._member(field, record, known.get(field)) for field, record in sorted(members, key=itemgetter(0))]
        workers = [worker for worker in found if worker is not None]
        self._workers = {worker.member.worker_id: worker for worker in workers}
        self._by_epoch = {worker.member.epoch: worker for worker in workers}
        self._by_raw = {worker.raw: worker for worker in workers if worker.raw}
        read = [self._read_state(raw) for _, raw in states if raw is not None]
        self._found = {worker for worker in read if worker is not None}
        self.has_foreign_states = None in read or not has_whole_states
        self.has_changed = True

    def candidates(
        self,
        workers: Sequence[KnownWorker],
        matched: Sequence[int],
        tier_matched: Sequence[tuple[int, ...]],
        states: Iterable[Reply] | None,
        now_ms: int,
    ) -> list[Candidate]:
        """Return the live ones of `workers`. `states` come in any order, and may include those of others.

        None: they are as they were last read.
        Without a secret, a worker lives if its state was found and holds a lease. With one, the last signed lease also
        counts where the state is missing or overwritten.
        """
        self.now_ms = now_ms
        by_raw, remembers = self._by_raw, self._is_signed
        found: set[KnownWorker] = set()
        switched: set[KnownWorker] = set()
        for raw in states or ():
            worker = by_raw.get(raw)
            if worker is None and raw is not None:
                worker = self._read_state(raw, switched)
                if worker is None and not self.has_foreign_states:
                    self.has_foreign_states = self.has_changed = True
            if worker is not None and not remembers:
                found.add(worker)
        if states is None:
            found = self._found
        elif not remembers:
            self._found = self._found.difference(workers) | found
        if switched:  # their matches are of old sets
            self.has_changed = True
            matched = [0 if worker in switched else n for worker, n in zip(workers, matched, strict=True)]
            tier_matched = [
                (0,) * len(tiers) if worker in switched else tiers
                for worker, tiers in zip(workers, tier_matched, strict=True)
            ]
        return [
            Candidate(
                worker.member,
                state.load,
                in_pool,
                (now_ms - at) * 1e-3 if now_ms > (at := state.written_ms) else 0.0,
                in_tiers,
            )
            for worker, in_pool, in_tiers in zip(workers, matched, tier_matched, strict=True)
            if (state := worker.state).deadline_ms > now_ms and (remembers or worker in found)
        ]

    def warn_once(self, key: bytes, text: str) -> None:
        """Count an invalid value, and log it once per `key`."""
        self._count("invalid")
        if key not in self._warned and len(self._warned) < _MAX_WARNINGS:
            self._warned.add(key)
            logger.warning("ignored in Redis: %s", text)

    def _member(self, field: bytes, record: bytes | None, known: KnownWorker | None) -> KnownWorker | None:
        """Return the worker of `field`: the `known` one, unless the record is a valid other one."""
        if known is not None and known.record == record:
            return known
        remembered = known if self._is_signed and known is not None and known.state.deadline_ms > self.now_ms else None
        if record is None:  # it was too long to be read
            return remembered
        is_short = len(record) <= schema.MAX_MEMBER_BYTES
        is_verified = not self._is_signed or (is_short and self._signer.verifies_member(field, record))
        if not is_verified:
            self.warn_once(field, f"member {field!r:.80} is not signed with this fleet's secret for this shard")
            if len(self._unverified) >= _MAX_UNSIGNED:
                return remembered
        try:
            member = schema.decode_member(field, record)
        except RegistryError as error:
            self.warn_once(field, f"member {field!r:.80}: {error}")
            return remembered
        if not is_verified:
            self._unverified.append(member)
            return remembered
        last = member if remembered is None else remembered.member
        if member.epoch != last.epoch and member.epoch_started_ms < last.epoch_started_ms:
            self._count("stale")
            self._unverified.append(member)  # perhaps a worker whose clock went back: a poll returns its epoch
            return remembered
        if known is not None and known.member == member:
            known.record = record
            return known
        return KnownWorker(member, record, self._signer.state_mac(member.worker_id))

    def _read_state(self, raw: Reply, switched: set[KnownWorker] | None = None) -> KnownWorker | None:
        """Keep a state and return its known worker, or None; add the worker to `switched` with a new set version."""
        try:
            state = schema.decode_state(raw)
        except RegistryError as error:
            self.warn_once(b"state", f"a state: {error}")
            return None
        worker = self._by_epoch.get(state.epoch)
        if worker is None:
            return None
        if self._is_signed:
            if not verifies_state(worker.mac, raw):
                self.warn_once(b"signature", f"a state of {worker.member.worker_id} without its signature")
                return None
            if state.batch < worker.state.batch:
                self._count("stale")
                return None
        if switched is not None and state.set_version != worker.state.set_version:
            switched.add(worker)
        self._by_raw.pop(worker.raw, None)
        self._by_raw[raw] = worker
        worker.raw, worker.state = raw, state
        return worker
