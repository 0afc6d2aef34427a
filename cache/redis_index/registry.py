"""The workers of one shard as Redis last showed them: their members and their states.

Nothing read from Redis is trusted. What does not decode is ignored, counted, and logged once. With a cluster secret
the same holds for what is not signed with it, for a batch number that is passed, and for an epoch older than one that
was seen: such a value changes nothing, and the worker it stands for stays as it was known until its lease ends.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cache.records import Candidate, WorkerLoad, WorkerMember
from cache.redis_index import schema
from cache.redis_index.link import Reply
from cache.redis_index.schema import RegistryError
from cache.redis_index.signing import Signer, verifies_state
from cache.types import WorkerId

logger = logging.getLogger(__name__)

_MAX_COMPLAINTS = 200
MAX_UNSIGNED = 256
"""Members without a signature that are kept: workers of a version before signatures have none."""


class KnownWorker:
    """One registry entry as last read, with what its last state said."""

    __slots__ = (
        "batch",
        "deadline_ms",
        "generation",
        "load",
        "lookup",
        "mac",
        "member",
        "raw",
        "record",
        "state",
        "written_ms",
    )

    def __init__(self, member: WorkerMember, record: bytes, signer: Signer) -> None:
        self.member = member
        self.record = record
        """The member as it stood in Redis."""
        self.mac = signer.state_mac(member.worker_id)
        self.generation = 0
        self.batch = 0
        self.raw = b""
        self.state: schema.State | None = None
        self.load = WorkerLoad()
        self.deadline_ms = 0
        self.written_ms = 0
        self.lookup = 0
        """The last lookup that found its state."""

    def take(self, raw: bytes, state: schema.State) -> None:
        self.raw, self.state, self.load, self.batch = raw, state, state.load, state.batch
        self.deadline_ms, self.written_ms = state.deadline_ms, state.written_ms


@dataclass(frozen=True, slots=True)
class RegistryEntry:
    """What `headstart index` shows of one worker."""

    member: WorkerMember
    load: WorkerLoad
    num_entries: int
    generation: int
    lease_left_s: float
    age_s: float


class Registry:
    """Owned by one `Shard`."""

    def __init__(self, count: Callable[[str], None], signer: Signer) -> None:
        """`count` hears "invalid" for each entry that was ignored, "stale" for each genuine one out of date."""
        self._count = count
        self._signer = signer
        self._is_signed = signer.enabled
        self._workers: dict[WorkerId, KnownWorker] = {}
        self._unsigned: list[WorkerMember] = []
        """Members that prove nothing, because they are unsigned or of a past epoch: addresses to ask, at most."""
        self._by_epoch: dict[str, KnownWorker] = {}
        self._by_state: dict[bytes, KnownWorker] = {}
        """By the state last read of each, as it stood in Redis."""
        self._only_known_states = False
        self._num_lookups = 0
        self._now_ms = 0
        self._complained: set[bytes] = set()
        self.layout = 0
        """Another number once queries made before are out of date: other workers, generations, or strangers."""

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def only_known_states(self) -> bool:
        """Nothing stands beside the workers' states, as far as was seen: they may be read without naming them."""
        return self._only_known_states

    def workers(self, model: str | None) -> list[KnownWorker]:
        return [worker for worker in self._workers.values() if model is None or worker.member.model == model]

    def members(self) -> list[WorkerMember]:
        """Genuine members first, then some that prove nothing (`_unsigned`)."""
        return [worker.member for worker in self._workers.values()] + self._unsigned

    def entries(self) -> list[RegistryEntry]:
        """Lapsed ones included, as of the last reply of which `at` or `candidates` was told the time."""
        return [
            RegistryEntry(
                worker.member,
                worker.load,
                state.num_entries,
                state.generation,
                (state.deadline_ms - self._now_ms) * 1e-3,
                (self._now_ms - state.written_ms) * 1e-3,
            )
            for worker in self._workers.values()
            if (state := worker.state) is not None
        ]

    def at(self, now_ms: int) -> None:
        """Redis' clock now."""
        self._now_ms = now_ms

    def refresh(self, members: Sequence[tuple[bytes, bytes]], states: Sequence[tuple[bytes, bytes]]) -> None:
        """Take the pairs of both hashes."""
        self.layout += 1
        self._take_members(members)
        self._only_known_states = True
        for _, raw in states:
            if self._read_state(raw, set()) is None:
                self._only_known_states = False

    def candidates(
        self, workers: Sequence[KnownWorker], matches: Sequence[int], states: Iterable[Reply], now_ms: int
    ) -> list[Candidate]:
        """Those of `workers` that live. `states` in any order, perhaps of others too.

        Without a secret a worker lives whose state was found with a lease. With one, the last signed lease counts
        also where its state is missing or overwritten.
        """
        self._now_ms = now_ms
        self._num_lookups = lookup = self._num_lookups + 1
        by_state = self._by_state
        switched: set[KnownWorker] = set()
        for raw in states:
            try:
                worker = by_state.get(raw) or self._read_state(raw, switched)
            except TypeError:  # a list cannot be looked up
                worker = self._read_state(b"", switched)
            if worker is not None:
                worker.lookup = lookup
            elif raw is not None and self._only_known_states:
                self._only_known_states = False
                self.layout += 1
        if switched:  # what was found is not of the set that counts now
            self.layout += 1
            matches = [0 if worker in switched else n for worker, n in zip(workers, matches, strict=True)]
        remembers = self._is_signed
        return [
            Candidate(
                worker.member, worker.load, matched, (now_ms - at) * 1e-3 if now_ms > (at := worker.written_ms) else 0.0
            )
            for worker, matched in zip(workers, matches, strict=True)
            if worker.deadline_ms > now_ms and (remembers or worker.lookup == lookup)
        ]

    def complain(self, key: bytes, text: str) -> None:
        """Count it, and log it once a `key`."""
        self._count("invalid")
        if key not in self._complained and len(self._complained) < _MAX_COMPLAINTS:
            self._complained.add(key)
            logger.warning("ignored in Redis: %s", text)

    def _take_members(self, members: Sequence[tuple[bytes, bytes]]) -> None:
        known = {worker.member.worker_id.encode(): worker for worker in self._workers.values()}
        self._unsigned = []
        if len(members) > schema.MAX_MEMBERS:
            self.complain(b"members", f"{len(members)} members: more than {schema.MAX_MEMBERS}")
            members = [(field, record) for field, record in members if field in known]
        workers: dict[WorkerId, KnownWorker] = {}
        for field, record in sorted(members):
            worker = self._member(field, record, known.get(field))
            if worker is not None:
                workers[worker.member.worker_id] = worker
        self._workers = workers
        self._by_epoch = {worker.member.epoch: worker for worker in workers.values()}
        self._by_state = {worker.raw: worker for worker in workers.values() if worker.raw}

    def _member(self, field: bytes, record: bytes, known: KnownWorker | None) -> KnownWorker | None:
        """The worker that stands in `field`: what was known of it, where the record proves nothing else."""
        if known is not None and known.record == record:
            return known
        remembered = known if self._is_signed and known is not None and known.deadline_ms > self._now_ms else None
        is_genuine = not self._is_signed or self._signer.verifies_member(field, record)
        if not is_genuine:
            self.complain(field, f"member {field!r:.80} is not signed with this fleet's secret for this place")
            if len(self._unsigned) >= MAX_UNSIGNED:
                return remembered
        try:
            member = schema.decode_member(field, record)
        except RegistryError as error:
            self.complain(field, f"member {field!r:.80}: {error}")
            return remembered
        if not is_genuine:
            self._unsigned.append(member)
            return remembered
        if remembered is not None and _precedes(member, remembered.member):
            self._count("stale")
            self._unsigned.append(member)  # or a worker whose clock went back: it says itself which epoch it has
            return remembered
        if known is not None and known.member == member:
            known.record = record
            return known
        return KnownWorker(member, record, self._signer)

    def _read_state(self, raw: Reply, switched: set[KnownWorker]) -> KnownWorker | None:
        """The known worker of which this is the state, which is kept; a new generation adds it to `switched`."""
        if raw is None:
            return None
        try:
            state = schema.decode_state(raw)
        except RegistryError as error:
            self.complain(b"state", f"a state: {error}")
            return None
        worker = self._by_epoch.get(state.epoch)
        if worker is None:
            return None
        if self._is_signed:
            if not verifies_state(worker.mac, raw):
                self.complain(b"signature", f"a state of {worker.member.worker_id} without its signature")
                return None
            if state.batch < worker.batch:
                self._count("stale")
                return None
        self._by_state.pop(worker.raw, None)
        worker.take(raw, state)
        self._by_state[raw] = worker
        if state.generation != worker.generation:
            worker.generation = state.generation
            switched.add(worker)
        return worker


def _precedes(member: WorkerMember, known: WorkerMember) -> bool:
    return member.epoch != known.epoch and member.epoch_started_ms < known.epoch_started_ms
