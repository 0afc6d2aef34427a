"""Results of a replay: times to first token, and what the router predicted for each request."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple, Self

from benchmarks.dev.simulation.growth import Growth
from benchmarks.report import percentile
from server.router.cost import WorkerView

NUM_DECILES = 11
"""Classes of the pool's fill with the request: ten tenths, and more than the pool."""


class Move(NamedTuple):
    """A request that did not go to the worker that holds most of its prompt, as the router predicted it."""

    saved_queue_s: float
    """Shorter wait than at the holder, for prefills and for room."""
    added_prefill_s: float


@dataclass(slots=True, eq=False)
class Observed:
    """One request: predicted when it was placed, and what came."""

    fill: float
    """Share of the pool that it and running requests would hold."""
    predicted_wait_s: float
    """For room."""
    price_s: float
    """The price of the blocks that it would evict."""
    prompt_s: float
    """The prefill of its whole prompt."""
    move: Move | None
    actual_wait_s: float = 0.0

    @classmethod
    def of(cls, chosen: WorkerView, workers: Sequence[WorkerView], num_prompt_tokens: int) -> Self:
        prompt_s = num_prompt_tokens / chosen.prefill_tokens_per_s
        return cls(chosen.kv_usage, chosen.kv_wait_s, chosen.eviction_s, prompt_s, move_of(chosen, workers))


def move_of(chosen: WorkerView, workers: Sequence[WorkerView]) -> Move | None:
    """Return the move, from the holder with the shortest wait; None if the chosen worker holds as much."""
    longest = max(worker.cached_tokens for worker in workers)
    if chosen.cached_tokens >= longest:
        return None
    holder = min((w for w in workers if w.cached_tokens == longest), key=lambda worker: worker.predicted_ttft_s)
    added_s = chosen.prefill_s + chosen.fetch_s - holder.prefill_s - holder.fetch_s
    return Move(holder.wait_s - chosen.wait_s, added_s)


@dataclass(slots=True)
class Decile:
    """Sums over the requests of one tenth of the pool's fill."""

    num_requests: int = 0
    predicted_s: float = 0.0
    actual_s: float = 0.0
    num_unwaited: int = 0
    """Those that did not wait for room."""
    predicted_unwaited_s: float = 0.0
    price: float = 0.0
    """Prices of evictions, over the prefill of the prompt."""

    def add(self, request: Observed) -> None:
        self.num_requests += 1
        self.predicted_s += request.predicted_wait_s
        self.actual_s += request.actual_wait_s
        self.price += request.price_s / request.prompt_s
        if request.actual_wait_s == 0.0:
            self.num_unwaited += 1
            self.predicted_unwaited_s += request.predicted_wait_s


@dataclass(slots=True)
class Moves:
    """Sums over the requests that left a holder."""

    num_requests: int = 0
    num_losing: int = 0
    """Those whose shorter wait is below the prefill that they add."""
    saved_queue_s: float = 0.0
    added_prefill_s: float = 0.0

    def add(self, move: Move) -> None:
        self.num_requests += 1
        self.num_losing += move.saved_queue_s < move.added_prefill_s
        self.saved_queue_s += move.saved_queue_s
        self.added_prefill_s += move.added_prefill_s


@dataclass(frozen=True, slots=True)
class Predictions:
    """Sums over every request of a replay, warm-up included."""

    deciles: Sequence[Decile] = field(default_factory=lambda: [Decile() for _ in range(NUM_DECILES)])
    moves: Moves = field(default_factory=Moves)

    def add(self, request: Observed) -> None:
        self.deciles[min(NUM_DECILES - 1, max(0, math.ceil(10 * request.fill) - 1))].add(request)
        if request.move is not None:
            self.moves.add(request.move)


def merged(listed: Iterable[Predictions]) -> Predictions:
    """Return the sums of several replays."""
    total = Predictions()
    for each in listed:
        _add_up(total.moves, each.moves)
        for ours, theirs in zip(total.deciles, each.deciles, strict=True):
            _add_up(ours, theirs)
    return total


def _add_up(total: Decile | Moves, more: Decile | Moves) -> None:
    for each in fields(total):
        setattr(total, each.name, getattr(total, each.name) + getattr(more, each.name))


@dataclass(frozen=True, slots=True)
class Outcome:
    hit: float
    """Prompt tokens found cached over all prompt tokens."""
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p90_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    max_over_mean_busy: float
    predicted_over_actual_p50: float
    """The time from the decision to the first token, as predicted, over what it took: the median."""
    num_requests: float
    """Without the warm-up."""
    predictions: Predictions = field(default_factory=Predictions, compare=False)
    growth: Growth = field(default_factory=Growth, compare=False)

    @classmethod
    def of(
        cls,
        *,
        ttft_s: Iterable[float],
        num_cached_tokens: int,
        num_prompt_tokens: int,
        busy_s: Sequence[float],
        predicted_over_actual: Iterable[float],
        observed: Iterable[Observed],
        growth: Growth,
    ) -> Outcome:
        predictions = Predictions()
        for request in observed:
            predictions.add(request)
        ordered = sorted(ttft_s)
        return cls(
            hit=num_cached_tokens / num_prompt_tokens,
            ttft_mean_s=sum(ordered) / len(ordered),
            ttft_p50_s=percentile(ordered, 0.5),
            ttft_p90_s=percentile(ordered, 0.9),
            ttft_p95_s=percentile(ordered, 0.95),
            ttft_p99_s=percentile(ordered, 0.99),
            max_over_mean_busy=max(busy_s) / (sum(busy_s) / len(busy_s)),
            predicted_over_actual_p50=percentile(predicted_over_actual, 0.5),
            num_requests=float(len(ordered)),
            predictions=predictions,
            growth=growth,
        )
