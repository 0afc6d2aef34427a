"""The state of a gateway, its workers and the shared index, as JSON values."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any, Final

import msgspec

from cache.records import Candidate, WorkerMember
from cache.redis_index import RedisDownError, RedisIndex, RegistryEntry
from cache.types import GatewayId
from server.app import Lifecycle
from server.errors import NotFoundError, UnavailableError
from server.metrics import GatewayMetrics
from server.ops.prefix_tree import PrefixTree, SharedPrefix
from server.router.router import Router
from server.workers.fleet import Fleet, NoIndex, state_of

RATE_WINDOW_S: Final = 5.0
QUANTILE_WINDOW_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Totals:
    """Counters at one moment, growing since the process began."""

    at_s: float
    num_decisions: int
    prompt_tokens: float
    cached_tokens: float
    """Prompt tokens that workers found cached."""
    output_tokens: float
    in_flight: float
    ttft_counts: tuple[float, ...]
    """Cumulative, one per bucket."""


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """Reads the parts of one gateway. Nothing but `index_report` waits."""

    gateway_id: GatewayId
    policy: str
    fleet: Fleet
    router: Router
    index: RedisIndex | NoIndex
    metrics: GatewayMetrics
    lifecycle: Lifecycle
    num_streamed_tokens: Callable[[], int]
    """Output tokens of open requests, which `metrics` does not count yet."""
    prefix_tree: PrefixTree

    def about(self) -> dict[str, Any]:
        """Return what never changes."""
        return {"version": version("headstart"), "gateway": self.gateway_id, "policy": self.policy}

    def candidates(self) -> list[Candidate]:
        """Return the live workers of every model."""
        models = {worker.model for worker in self.fleet.workers()}
        return [candidate for model in sorted(models) for candidate in self.fleet.candidates(model, None)]

    def workers(self) -> dict[str, Any]:
        """Return every live worker: its registration, and its load as last reported."""
        workers = [
            {**asdict(each.member), "load": msgspec.structs.asdict(each.load), "load_age_s": each.load_age_s}
            for each in self.candidates()
        ]
        return {"workers": workers, "index": self.router.index_state()}

    def worker_rows(self) -> list[dict[str, Any]]:
        """Return a row for every worker, lost ones included, by model and name."""
        live = {candidate.member.worker_id: candidate for candidate in self.candidates()}
        registry = self.index.seen_entries() if isinstance(self.index, RedisIndex) else []
        entries = {(entry.member.worker_id, entry.member.epoch): entry for entry in registry}
        members = sorted(self.fleet.workers(), key=lambda member: (member.model, _natural(member.worker_id)))
        return [
            self._row(member, live.get(member.worker_id), entries.get((member.worker_id, member.epoch)))
            for member in members
        ]

    def _row(self, member: WorkerMember, candidate: Candidate | None, entry: RegistryEntry | None) -> dict[str, Any]:
        state, load = "lost", None
        if candidate is not None:
            state = state_of(candidate, self.fleet.broken())
            load = {
                "running": candidate.load.num_running,
                "waiting": candidate.load.num_waiting,
                "queued_s": sum(candidate.load.queued_prefill_s.values()),
                "prefill_tokens_per_s": candidate.load.prefill_tokens_per_s,
                "blocks": candidate.load.num_blocks,
                "free_blocks": candidate.load.num_free_blocks,
                "age_s": candidate.load_age_s,
            }
        return {
            "worker": member.worker_id,
            "model": member.model,
            "epoch": member.epoch,
            "url": member.url,
            "numerics": member.numerics,
            "block_size": member.block_size,
            "max_model_len": member.max_model_len,
            "state": state,
            "hit_rate": self.router.scorer.hit_rate(member.worker_id),
            "lease_left_s": None if entry is None else entry.lease_left_s,
            "published_blocks": None if entry is None else entry.num_entries,
            "load": load,
        }

    def index_state(self) -> dict[str, Any]:
        """Return the health of the shared index and of each of its shards."""
        shards = self.index.health() if isinstance(self.index, RedisIndex) else []
        return {**self.router.index_state(), "shards": [asdict(shard) for shard in shards]}

    async def index_report(self) -> dict[str, Any]:
        """Read the registry. Raises NotFoundError without a Redis, UnavailableError when it does not answer."""
        if not isinstance(self.index, RedisIndex):
            raise NotFoundError("This gateway has no Redis (--redis URL), so there is no shared index.")
        try:
            return {"workers": [index_row(entry) for entry in await self.index.entries()]}
        except RedisDownError as error:
            raise UnavailableError(f"Redis does not answer: {error}.") from error

    def prefixes(self, limit: int, model: str | None = None) -> list[SharedPrefix]:
        """Return the prefixes that saved most tokens at live workers."""
        return self.prefix_tree.top(self.fleet.live_workers(model), limit)

    def totals(self, num_decisions: int) -> Totals:
        metrics = self.metrics
        return Totals(
            at_s=time.monotonic(),
            num_decisions=num_decisions,
            prompt_tokens=metrics.prompt_tokens.sum(),
            cached_tokens=metrics.cached_tokens.sum(),
            output_tokens=metrics.output_tokens.sum() + self.num_streamed_tokens(),
            in_flight=metrics.num_in_flight,
            ttft_counts=metrics.ttft_s.cumulative(),
        )

    def traffic(self) -> Traffic:
        return Traffic(self.metrics.ttft_s.bounds)


def index_row(entry: RegistryEntry) -> dict[str, Any]:
    """Return one worker of the registry, live or lapsed, and the number of blocks that it holds."""
    member, load = entry.member, entry.load
    return {
        "worker_id": member.worker_id,
        "model": member.model,
        "url": member.url,
        "epoch": member.epoch,
        "generation": entry.generation,
        "blocks": entry.num_entries,
        "tokens": entry.num_entries * member.block_size,
        "lease_left_s": round(entry.lease_left_s, 3),
        "lease_age_s": round(entry.age_s, 3),
        "live": entry.lease_left_s > 0,
        "draining": load.draining,
        "running": load.num_running,
        "waiting": load.num_waiting,
    }


class Traffic:
    """Rates and quantiles of the last seconds, from totals added at a steady pace."""

    def __init__(self, ttft_bounds_s: Sequence[float]) -> None:
        self._bounds_s = ttft_bounds_s
        self._samples: deque[Totals] = deque()

    def add(self, totals: Totals) -> dict[str, Any]:
        """Return the numbers of now; None where nothing was measured."""
        samples = self._samples
        samples.append(totals)
        while totals.at_s - samples[0].at_s > QUANTILE_WINDOW_S:
            samples.popleft()
        near = next(sample for sample in samples if totals.at_s - sample.at_s <= RATE_WINDOW_S)
        far, elapsed_s = samples[0], totals.at_s - near.at_s
        prompt_tokens = totals.prompt_tokens - far.prompt_tokens
        counts = [now - then for now, then in zip(totals.ttft_counts, far.ttft_counts, strict=True)]

        def rate(name: str) -> float | None:
            amount: float = getattr(totals, name) - getattr(near, name)
            return max(0.0, amount) / elapsed_s if elapsed_s > 0.0 else None

        return {
            "window_s": totals.at_s - far.at_s,
            "in_flight": totals.in_flight,
            "decisions_per_s": rate("num_decisions"),
            "output_tokens_per_s": rate("output_tokens"),
            "prompt_tokens_per_s": rate("prompt_tokens"),
            "prompt_tokens": prompt_tokens,
            "hit_rate": min(1.0, (totals.cached_tokens - far.cached_tokens) / prompt_tokens) if prompt_tokens else None,
            "ttft_p50_s": quantile(0.5, self._bounds_s, counts),
            "ttft_p95_s": quantile(0.95, self._bounds_s, counts),
        }


def quantile(q: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Interpolate within a bucket, as Prometheus does. `counts` are cumulative, the last bound is inf."""
    if not counts or counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    lower, below = 0.0, 0.0
    for bound, count in zip(bounds, counts, strict=True):
        if count >= rank:
            if bound == float("inf") or count == below:
                return lower
            return lower + (bound - lower) * (rank - below) / (count - below)
        lower, below = bound, count
    return lower


def _natural(name: str) -> tuple[str, int]:
    """Sort worker-2 before worker-10."""
    prefix = name.rstrip("0123456789")
    return prefix, int(name[len(prefix) :] or -1)
