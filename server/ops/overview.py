"""The state of a gateway, its workers and the shared index: as JSON values, and as gauges."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final

import msgspec
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from cache.records import Candidate, WorkerMember
from cache.redis_index import RedisDownError, RedisIndex, RegistryEntry
from cache.types import WorkerId
from server.app import PublicApi
from server.errors import NotFoundError, UnavailableError
from server.metrics import GatewayMetrics
from server.ops.prefix_tree import SharedPrefix, top
from server.ops.workers_needed import WorkersNeeded
from server.router.copies import Copies
from server.router.decisions import DecisionLog, explained
from server.router.index_accuracy import IndexAccuracy
from server.router.router import Router
from server.router.types import RouteRequest
from server.usage.day import DayHistory
from server.usage.totals import UsageTotals
from server.workers.fleet import Fleet, NoIndex

REFUSED: Final = "refused"
_NO_REPORT: Final = dict.fromkeys(("numerics", "revision", "hit_rate", "lease_left_s", "published_blocks", "load"))
STATES: Final = ("serving", "standby", "learning", "draining", "broken")


@dataclass(frozen=True, eq=False)
class Overview(Collector):
    """Reads the parts of one gateway. Only `explain` and `index_report` wait."""

    api: PublicApi
    router: Router
    decisions: DecisionLog
    accuracy: IndexAccuracy
    copies: Copies
    needs: WorkersNeeded
    index: RedisIndex | NoIndex
    usage: UsageTotals
    day: DayHistory
    grafana_url: str = ""

    @property
    def metrics(self) -> GatewayMetrics:
        return self.api.services.requests.metrics

    @property
    def fleet(self) -> Fleet:
        return self.router.fleet

    def workers(self, *, with_digests: bool = False) -> dict[str, Any]:
        """Return every live worker, with its registration, state and last reported load, and the refused ones.

        Without `chat_probes`, a digest for each class of prompts, unless they are asked for.
        """
        workers, broken = [], self.fleet.broken()
        for each in self._live_workers():
            state, reason = self._state(each, broken)
            about = {"revision": self.api.services.models.revision(each.member), "state": state, "reason": reason}
            load = {"load": msgspec.structs.asdict(each.load), "load_age_s": each.load_age_s}
            workers.append({**asdict(each.member), **load, **about})
        for url, member, reason in self.fleet.refused():
            about = {"worker_id": "", "epoch": "", "url": url} if member is None else asdict(member)
            workers.append({**about, "load": None, "state": _refusal_state(member), "reason": reason})
        for row in () if with_digests else workers:
            row.pop("chat_probes", None)
        return {"workers": workers, "index": self._index_health()}

    def _state(self, candidate: Candidate, broken: Container[WorkerId]) -> tuple[str, str]:
        """Return the state of a live worker, and why it gets no new requests."""
        if candidate.load.draining or candidate.member.worker_id in broken:
            return "draining" if candidate.load.draining else "broken", candidate.load.problem
        return self.api.services.models.state_of(candidate.member)

    def worker_rows(self) -> list[dict[str, Any]]:
        """Return a row for every worker, by model and name, the lost and the refused ones included."""
        broken = self.fleet.broken()
        live = {candidate.member.worker_id: candidate for candidate in self._live_workers()}
        registry = self.index.seen_entries() if isinstance(self.index, RedisIndex) else []
        entries = {(entry.member.worker_id, entry.member.epoch): entry for entry in registry}
        members = sorted(self.fleet.workers(), key=lambda member: (member.model, _natural_key(member.worker_id)))
        rows = [
            self._row(member, live.get(member.worker_id), entries.get((member.worker_id, member.epoch)), broken)
            for member in members
        ]
        known = {row["worker"] for row in rows}
        for url, member, reason in self.fleet.refused():
            row = _NO_REPORT | {"worker": url, "model": "", "epoch": "", "url": url}
            if member is not None:
                row |= {"worker": member.worker_id, "model": member.model, "epoch": member.epoch}
            if row["worker"] not in known:
                rows.append(row | {"state": _refusal_state(member), "reason": reason})
        return rows

    def _row(
        self,
        member: WorkerMember,
        candidate: Candidate | None,
        entry: RegistryEntry | None,
        broken: Container[WorkerId],
    ) -> dict[str, Any]:
        load = None
        if candidate is not None:
            load = {
                "running": candidate.load.num_running,
                "waiting": candidate.load.num_waiting,
                "queued_s": sum(candidate.load.queued_prefill_s.values()),
                "prefill_tokens_per_s": 0.0 if candidate.load.is_rate_unsure else candidate.load.prefill_tokens_per_s,
                "prefill_fixed_s": candidate.load.prefill_fixed_s,
                "blocks": candidate.load.num_blocks,
                "free_blocks": candidate.load.num_free_blocks,
                "age_s": candidate.load_age_s,
            }
        state, reason = ("lost", "") if candidate is None else self._state(candidate, broken)
        return {
            "worker": member.worker_id,
            "model": member.model,
            "epoch": member.epoch,
            "url": member.url,
            "numerics": member.numerics,
            "revision": self.api.services.models.revision(member),
            "block_size": member.block_size,
            "max_model_len": member.max_model_len,
            "state": state,
            "reason": reason,
            "hit_rate": self.router.scorer.loads.hit_rate(member.worker_id),
            "lease_left_s": None if entry is None else entry.lease_left_s,
            "published_blocks": None if entry is None else entry.num_entries,
            "load": load,
        }

    def disrupted(self) -> dict[tuple[str, str], float]:
        """Return the number of refused, failed and moved requests since the start, by outcome and reason."""
        return {
            **self.day.turned_away,
            ("moved", "went on elsewhere"): self.metrics.resumed.sum(),
            ("moved", "began again elsewhere"): self.metrics.restarted.sum(),
        }

    def workers_needed(self) -> dict[str, int]:
        """Return the workers that each model needs, where that is known."""
        numbers = {model: self.needs.needed(model) for model in self._models()}
        return {model: number for model, number in numbers.items() if number is not None}

    def index_state(self) -> dict[str, Any]:
        """Return the health of the shared index and of each of its shards."""
        shards = self.index.health() if isinstance(self.index, RedisIndex) else []
        return {**self._index_health(), "shards": shards}

    def _index_health(self) -> dict[str, Any]:
        return self.accuracy.state(lookup_failed=self.router.lookup_failed)

    async def explain(self, request: RouteRequest) -> dict[str, Any]:
        """Return how the router would score each worker, and which it would choose. Places nothing."""
        decision = await self.router.decide(request, dry_run=True)
        return {
            "policy": self.router.policy,
            "index": "answered" if decision.index_answered else "no answer: own recent placements used",
            "prompt_tokens": request.num_prompt_tokens,
            "prompt_blocks": len(request.hashes),
            "choice": [worker.member.worker_id for worker in decision.best],
            "copy": self.copies.planner.explain(decision),
            "workers": [explained(worker, self.router.scorer) for worker in decision.workers],
        }

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
        return top(self.router.scorer.ledger, self.fleet.live_workers(model), limit)

    def _live_workers(self) -> list[Candidate]:
        """Return the live workers of every model."""
        return [candidate for model in self._models() for candidate in self.fleet.candidates(model, None)]

    def _models(self) -> list[str]:
        return sorted({worker.model for worker in self.fleet.workers()})

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield gauges of the fleet as this gateway sees it, computed at the scrape: no request pays for it."""
        blind, num_outstanding = self._index_health()["blind"], self.router.scorer.loads.num_outstanding()
        yield _gauge("headstart_index_blind", "1 while routing goes without the shared index.", value=blind)
        num_inexact = sum(worker.ends not in ("", "exact") for worker in self.fleet.workers())
        yield _gauge(
            "headstart_index_inexact_workers",
            "Workers with window or state layers whose rule for cache hits no engine has confirmed.",
            value=num_inexact,
        )
        yield _gauge(
            "headstart_requests_booked", "Requests of this gateway that are at workers.", value=num_outstanding
        )
        needed = _gauge(
            "headstart_workers_needed",
            "Workers that the model needs for the work of all gateways: scale by the maximum over gateways.",
            "model",
        )
        for model, number in self.workers_needed().items():
            needed.add_metric((model,), number)
        yield needed
        yield from self._model_gauges()

    def _model_gauges(self) -> Iterator[GaugeMetricFamily]:
        """Yield the gauges of the workers and queues of each model, those without a live worker included.

        The `vllm:` gauges are those of the Gateway API inference extension, which sees the gateway as the model server.
        """
        workers = _gauge("headstart_workers", "Live workers by state, and refused ones.", "model", "state")
        waiting = _gauge("vllm:num_requests_waiting", "Sequences that wait.", "model_name")
        running = _gauge("vllm:num_requests_running", "Sequences that run.", "model_name")
        usage = _gauge("vllm:kv_cache_usage_perc", "Used part of the KV pools.", "model_name")
        pools = _gauge("vllm:cache_config_info", "The KV pools.", "model_name", "block_size", "num_gpu_blocks")
        prefill = _gauge(
            "headstart_waiting_prefill_seconds",
            "Prefill seconds of all gateways that wait at the model's workers: scale by it.",
            "model",
        )
        held = _gauge("headstart_held_requests", "Requests that wait at this gateway for a worker.", "model")
        held_s = _gauge("headstart_held_prefill_seconds", "Prefill seconds that wait at this gateway.", "model")
        states = Counter(
            ("" if each is None else each.model, _refusal_state(each)) for _, each, _ in self.fleet.refused()
        )
        broken = self.fleet.broken()
        for model in self._models():
            candidates = self.fleet.candidates(model, None)
            states.update(dict.fromkeys([(model, state) for state in STATES], 0))
            states.update([(model, self._state(candidate, broken)[0]) for candidate in candidates])
            loads = [candidate.load for candidate in candidates]
            held_prefills_s = self.router.queue.prefills_s(model)
            held.add_metric((model,), len(held_prefills_s))
            held_s.add_metric((model,), sum(held_prefills_s))
            waiting.add_metric((model,), len(held_prefills_s) + sum(load.num_waiting for load in loads))
            running.add_metric((model,), sum(load.num_running for load in loads))
            prefill.add_metric((model,), sum(sum(load.queued_prefill_s.values()) for load in loads))
            num_blocks, num_free_tokens = Counter[int](), 0
            for candidate in candidates:
                num_blocks[candidate.member.block_size] += candidate.load.num_blocks
                num_free_tokens += candidate.member.block_size * candidate.load.num_free_blocks
            num_tokens = sum(size * number for size, number in num_blocks.items())
            usage.add_metric((model,), 1.0 - num_free_tokens / num_tokens if num_tokens else 0.0)
            for block_size, number in sorted(num_blocks.items()):
                pools.add_metric((model, str(block_size), str(number)), 1.0)
        for labels, number in states.items():
            workers.add_metric(labels, number)
        yield from (workers, waiting, running, usage, pools, prefill, held, held_s)


def index_row(entry: RegistryEntry) -> dict[str, Any]:
    """Return one worker of the registry, live or lapsed, with the blocks in its pool and tiers."""
    member, load = entry.member, entry.load
    return {
        "worker_id": member.worker_id,
        "model": member.model,
        "url": member.url,
        "epoch": member.epoch,
        "generation": entry.set_version,
        "blocks": entry.num_entries,
        "tokens": entry.num_entries * member.block_size,
        "tier_blocks": entry.num_tier_entries,
        "lease_left_s": round(entry.lease_left_s, 3),
        "lease_age_s": round(entry.age_s, 3),
        "live": entry.lease_left_s > 0,
        "draining": load.draining,
        "running": load.num_running,
        "waiting": load.num_waiting,
    }


def _refusal_state(member: WorkerMember | None) -> str:
    return "unreachable" if member is None else REFUSED


def _natural_key(name: str) -> tuple[str, int]:
    """Return a sort key that puts worker-2 before worker-10."""
    prefix = name.rstrip("0123456789")
    return prefix, int(name[len(prefix) :] or -1)


def _gauge(name: str, text: str, *labels: str, value: float | None = None) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value, labels or None)
