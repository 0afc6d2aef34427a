"""The replay's plots, each a function that draws all runs on one pair of matplotlib axes."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from typing import Any, Final

from benchmarks.replay_load.client import Outcome
from benchmarks.replay_load.summary import Run, mean
from benchmarks.report import percentile

Plot = Callable[[Any, Sequence[Run]], None]


def ttft_distribution(axes: Any, runs: Sequence[Run]) -> None:
    """Time to first token: share of requests at or below it"""
    for run in runs:
        _distribution(axes, run.label, [outcome.ttft_s for outcome in run.answered])
    axes.set_xlabel("seconds")


def ttft_by_turn(axes: Any, runs: Sequence[Run]) -> None:
    """Median time to first token at each turn of a conversation"""
    for run in runs:
        turns = _by_turn(run)
        axes.plot(list(turns), [percentile([o.ttft_s for o in outcomes], 0.5) for outcomes in turns.values()], "o-")
    axes.set_xlabel("turn")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylabel("seconds")


def cached_by_turn(axes: Any, runs: Sequence[Run]) -> None:
    """Share of the prompt found in a cache, at each turn"""
    for run in runs:
        turns = _by_turn(run)
        shares = [
            mean([o.num_cached_tokens / max(1, o.num_prompt_tokens) for o in outcomes]) for outcomes in turns.values()
        ]
        axes.plot(list(turns), shares, "o-", label=run.label)
    axes.set_xlabel("turn")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.set_ylim(0, 1)


def gap_distribution(axes: Any, runs: Sequence[Run]) -> None:
    """Time between tokens: share of the gaps that were no longer"""
    for run in runs:
        _distribution(axes, run.label, [gap_s for outcome in run.answered for gap_s in outcome.gaps_s])
    axes.set_xlabel("seconds")


def requests_by_worker(axes: Any, runs: Sequence[Run]) -> None:
    """Requests that each worker took"""
    workers = sorted({outcome.worker for run in runs for outcome in run.answered if outcome.worker})
    width = 0.8 / len(runs)
    for number, run in enumerate(runs):
        counts = Counter(outcome.worker for outcome in run.answered)
        places = [i + number * width for i in range(len(workers))]
        axes.bar(places, [counts[worker] for worker in workers], width, label=run.label)
    axes.set_xticks([i + 0.4 - width / 2 for i in range(len(workers))], workers)


PLOTS: Final[tuple[Plot, ...]] = (
    ttft_distribution,
    ttft_by_turn,
    cached_by_turn,
    gap_distribution,
    requests_by_worker,
)


def title(plot: Plot) -> str:
    return (plot.__doc__ or "").strip()


def _distribution(axes: Any, label: str, values: Sequence[float]) -> None:
    ordered = sorted(values)
    axes.step(ordered, [(i + 1) / len(ordered) for i in range(len(ordered))], where="post", label=label)
    axes.set_ylim(0, 1)
    axes.set_xlim(left=0)


def _by_turn(run: Run) -> dict[int, list[Outcome]]:
    turns: dict[int, list[Outcome]] = defaultdict(list)
    for outcome in run.answered:
        turns[outcome.turn].append(outcome)
    return dict(sorted(turns.items()))
