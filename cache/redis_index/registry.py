"""What a gateway knows of one shard's workers: their members and their states, as Redis last told them.

Nothing read from Redis is trusted: what does not decode is ignored, counted, and logged once.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cache.index import Candidate, WorkerLoad, WorkerMember
from cache.redis_index import schema
from cache.redis_index.link import Reply
from cache.redis_index.schema import RegistryError
from cache.types import WorkerId

logger = logging.getLogger(__name__)

_MAX_COMPLAINTS = 1000


class KnownWorker:
    """One registry entry as last read, with what its last state said."""

    __slots__ = ("deadline_ms", "generation", "load", "lookup", "member", "raw", "state", "written_ms")

    def __init__(self, member: WorkerMember) -> None:
        self.member = member
        self.generation = 0
        self.raw: bytes | None = None
        self.state: schema.State | None = None
        self.load = WorkerLoad()
        self.deadline_ms = 0
        self.written_ms = 0
        self.lookup = 0
        """The last lookup that found its state."""

    def take(self, raw: bytes, state: schema.State) -> None:
        self.raw, self.state, self.load = raw, state, state.load
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

    def __init__(self, count: Callable[[str], None]) -> None:
        """`count` hears "invalid" whenever something was ignored."""
        self._count = count
        self._workers: dict[WorkerId, KnownWorker] = {}
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
        return [worker.member for worker in self._workers.values()]

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

    def refresh(self, members: Reply, states: Reply) -> None:
        """Take both hashes as HGETALL gives them."""
        self.layout += 1
        self._take_members(members)
        self._only_known_states = isinstance(states, list)
        for raw in states[1::2] if isinstance(states, list) else ():
            if self._read_state(raw, set()) is None:
                self._only_known_states = False

    def candidates(
        self, workers: Sequence[KnownWorker], matches: Sequence[int], states: Iterable[bytes | None], now_ms: int
    ) -> list[Candidate]:
        """Those of `workers` that live. `states` in any order, perhaps of others too."""
        self._now_ms = now_ms
        self._num_lookups = lookup = self._num_lookups + 1
        by_state = self._by_state
        switched: set[KnownWorker] = set()
        for raw in states:
            worker = by_state.get(raw) or self._read_state(raw, switched)  # type: ignore[arg-type]
            if worker is not None:
                worker.lookup = lookup
            elif raw is not None and self._only_known_states:
                self._only_known_states = False
                self.layout += 1
        if switched:  # what was found is not of the set that counts now
            self.layout += 1
            matches = [0 if worker in switched else n for worker, n in zip(workers, matches, strict=True)]
        return [
            Candidate(
                worker.member, worker.load, matched, (now_ms - at) * 1e-3 if now_ms > (at := worker.written_ms) else 0.0
            )
            for worker, matched in zip(workers, matches, strict=True)
            if worker.lookup == lookup and worker.deadline_ms > now_ms
        ]

    def complain(self, key: bytes, text: str) -> None:
        """Count it, and log it once a `key`."""
        self._count("invalid")
        if key not in self._complained and len(self._complained) < _MAX_COMPLAINTS:
            self._complained.add(key)
            logger.warning("ignored in Redis: %s", text)

    def _take_members(self, reply: Reply) -> None:
        if not isinstance(reply, list) or len(reply) > 2 * schema.MAX_MEMBERS:
            self.complain(b"members", f"registry is {reply!r:.80}")
            reply = []
        workers: dict[WorkerId, KnownWorker] = {}
        for field, value in sorted(zip(reply[::2], reply[1::2], strict=True)):
            try:
                member = schema.decode_member(field, value)
            except RegistryError as error:
                self.complain(field, f"member {field!r:.80}: {error}")
                continue
            known = self._workers.get(member.worker_id)
            workers[member.worker_id] = known if known is not None and known.member == member else KnownWorker(member)
        self._workers = workers
        self._by_epoch = {worker.member.epoch: worker for worker in workers.values()}
        self._by_state = {worker.raw: worker for worker in workers.values() if worker.raw is not None}

    def _read_state(self, raw: bytes | None, switched: set[KnownWorker]) -> KnownWorker | None:
        """The known worker of which this is the state, which is kept; a new generation adds it to `switched`."""
        if raw is None:
            return None
        try:
            state = schema.decode_state(raw)
        except (RegistryError, TypeError) as error:
            self.complain(b"state", f"a state: {error}")
            return None
        worker = self._by_epoch.get(state.epoch)
        if worker is None:
            return None
        if worker.raw is not None:
            self._by_state.pop(worker.raw, None)
        worker.take(raw, state)
        self._by_state[raw] = worker
        if state.generation != worker.generation:
            worker.generation = state.generation
            switched.add(worker)
        return worker
