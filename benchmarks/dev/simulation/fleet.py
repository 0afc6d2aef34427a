"""The workers of a replay, and what a replay is set to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Final

from benchmarks.dev.simulation.engine import EngineModel, SimulatedWorker
from benchmarks.dev.simulation.moving_engine import MovingWorker
from benchmarks.dev.simulation.shared_engine import SharedWorker
from benchmarks.dev.simulation.traces import Session, TraceRequest, Workload
from cache.allocators.hash import HashAllocator
from cache.records import WorkerMember
from cache.types import Epoch, WorkerId
from server.router.cost import CostModel

MODEL: Final = "simulated"
SPEEDS: Final = (4 / 3, 2 / 3)
"""Even and odd workers have these where there are two. The fleet computes as much."""
RATE_ERRORS: Final = (2.0, 1.0, 1.0, 0.5, 1.0, 1.0)
"""Those of workers, in turn, where some rates are wrong."""
RATE_DELAY_S: Final = 10.0


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    num_workers: int
    cache_share: float
    """Blocks of the whole fleet over the distinct blocks of the workload. A pool takes the longest request at least."""
    num_gateways: int = 1
    index_delay_s: float = 0.1
    report_s: float = 0.05
    pooled: bool = False
    """One pool of the same total size, seen by every worker: the bound."""
    passes: bool = False
    """At a worker, later requests pass one that does not fit."""
    cost: CostModel = field(default_factory=CostModel)
    count_pending: bool = True
    """Blocks of requests just routed count as cached."""
    warmup_share: float = 0.1
    """Share of the first requests, which meet cold caches, to leave out."""
    seed: int = 0
    shared_engine: bool = False
    """Prefills share each step, as in our workers, instead of running one by one."""
    fetch: float = 0.0
    """Rate of blocks from a peer, over the prefill rate; 0.0: none come. Shared engine only, as the next two."""
    lower_tier: float = 0.0
    """Blocks of a tier below each worker's pool, over the pool's; 0.0: there is none."""
    load: float = 20.0
    """Rate of blocks from the tier, over the prefill rate."""
    hold_s: float = 0.0
    """`--hold-s` of the gateways."""
    keys: bool = True
    """Requests name their conversation, where the clients of the workload do."""
    redis: bool = False
    """The index is a real Redis instead of its model in memory."""
    blind: bool = False
    """The index never answers: each gateway has only its own placements."""
    two_speeds: bool = False
    """Every second worker has half the speed of the others."""
    wrong_rates: bool = False
    """A third of the workers report half or twice their prefill rate, and all report it late."""
    copies: bool = True
    """Gateways copy chains to other workers on purpose."""
    join: bool = False
    """A worker joins half-way through."""
    warm_start_s: float = 0.0
    """`--warm-start-s` of the worker that joins."""
    death_and_join: bool = False
    """A worker dies after two fifths of the arrivals, and one with an empty cache joins after three fifths."""

    @property
    def moves(self) -> bool:
        """True if workers load or fetch blocks."""
        return not self.pooled and bool(self.fetch or self.lower_tier)


def _requests(sessions: Iterable[Session]) -> Iterator[TraceRequest]:
    for session in sessions:
        yield from session.requests
        yield from _requests(session.children)


class Fleet:
    """Makes the workers, one pool for all of them where they share one."""

    def __init__(self, workload: Workload, settings: ReplaySettings) -> None:
        self._settings = settings
        rate = workload.prefill_tokens_per_s
        model = EngineModel(rate, workload.block_size)
        if settings.moves:
            tier_rates = (settings.load * rate,) if settings.lower_tier else ()
            model = replace(model, fetch_tokens_per_s=settings.fetch * rate, tier_tokens_per_s=tier_rates)
        self._model = model
        num_blocks = int(workload.num_distinct_blocks * settings.cache_share)
        longest = max(len(request.block_ids) + len(request.answer_ids) for request in _requests(workload.sessions))
        self._num_worker_blocks = max(num_blocks // settings.num_workers, longest)
        self._pool = HashAllocator(num_blocks + 1, 1) if settings.pooled else None
        self._peers: dict[str, MovingWorker] = {}
        self._num_made = 0

    def make_worker(self) -> SimulatedWorker:
        """Make the next worker, with an empty cache unless the fleet shares one."""
        settings, number = self._settings, self._num_made
        self._num_made += 1
        member = WorkerMember(
            WorkerId(f"worker-{number:02}"),
            Epoch(f"{number:016x}"),
            f"http://worker-{number:02}",
            MODEL,
            "",
            "simulated",
            self._model.block_size,
            1 << 30,
            1,
            prefill_order="shared" if settings.shared_engine else "fifo",
            layout="simulated" if settings.moves else "",
            tiers=("disk",) if settings.lower_tier and settings.moves else (),
        )
        model = self._model.at_speed(SPEEDS[number % 2]) if settings.two_speeds else self._model
        cache = self._pool or HashAllocator(self._num_worker_blocks + 1, 1)
        if not settings.moves:
            kind = SharedWorker if settings.shared_engine else SimulatedWorker
            worker = kind(member, model, cache, settings.report_s, settings.passes)
            if settings.wrong_rates:
                worker.rate_error, worker.rate_delay_s = RATE_ERRORS[number % len(RATE_ERRORS)], RATE_DELAY_S
            return worker
        num_tier_blocks = int(settings.lower_tier * self._num_worker_blocks)
        tier = HashAllocator(num_tier_blocks + 1, 1) if settings.lower_tier else None
        worker = MovingWorker(member, model, cache, settings.report_s, tier=tier, peers=self._peers)
        self._peers[member.url] = worker
        return worker
