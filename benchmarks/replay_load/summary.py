"""Outcomes as figures: what the replay prints, plots and compares."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.replay_load.client import Outcome
from benchmarks.report import Figure, percentile


@dataclass(frozen=True, slots=True)
class Objective:
    """A request counts for goodput when it met both."""

    ttft_s: float
    time_per_token_s: float

    def met_by(self, outcome: Outcome) -> bool:
        per_token_s = outcome.time_per_token_s
        return (
            outcome.error is None
            and outcome.ttft_s <= self.ttft_s
            and (per_token_s is None or per_token_s <= self.time_per_token_s)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Run:
    """All that came back from one target."""

    label: str
    outcomes: Sequence[Outcome]
    num_turns: int
    """Turns of all conversations, sent or not: after a failure the rest of a conversation is not sent."""
    duration_s: float

    @property
    def answered(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    @property
    def errors(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is not None]

    @property
    def cached_share(self) -> float:
        num_prompt_tokens = sum(outcome.num_prompt_tokens for outcome in self.answered)
        return sum(outcome.num_cached_tokens for outcome in self.answered) / max(1, num_prompt_tokens)


def mean(values: Sequence[float]) -> float:
    return statistics.fmean(values) if values else 0.0


def figures(runs: Sequence[Run], objective: Objective) -> list[Figure]:
    """Return the table of each run, then of every later one against the first."""
    listed = [figure for run in runs for figure in _of_run(run, objective)]
    for run in runs[1:]:
        listed += _ratios(runs[0], run)
    return listed


def _of_run(run: Run, objective: Objective) -> list[Figure]:
    answered = run.answered
    ttfts_s = [outcome.ttft_s for outcome in answered]
    per_token_s = [time_s for outcome in answered if (time_s := outcome.time_per_token_s) is not None]
    gaps_s = [gap_s for outcome in answered for gap_s in outcome.gaps_s]
    num_good = sum(map(objective.met_by, run.outcomes))
    promised = f"TTFT <= {objective.ttft_s:g} s, {objective.time_per_token_s:g} s a token"
    rows = [
        ("requests", len(answered), "", "answered to the end"),
        ("errors", len(run.errors), "", "refused, failed, or ended early"),
        ("not_sent", run.num_turns - len(run.outcomes), "", "turns after a failure"),
        ("duration_s", run.duration_s, "s", ""),
        ("ttft_mean_s", mean(ttfts_s), "s", "time to first token"),
        ("ttft_p50_s", percentile(ttfts_s, 0.5), "s", ""),
        ("ttft_p90_s", percentile(ttfts_s, 0.9), "s", ""),
        ("ttft_p99_s", percentile(ttfts_s, 0.99), "s", ""),
        ("time_per_token_mean_s", mean(per_token_s), "s", "after the first token"),
        ("token_gap_p99_s", percentile(gaps_s, 0.99), "s", "between two events of a stream"),
        ("requests_per_s", len(answered) / run.duration_s, "/s", ""),
        ("goodput_per_s", num_good / run.duration_s, "/s", promised),
        ("output_tokens_per_s", sum(o.num_output_tokens for o in answered) / run.duration_s, "/s", ""),
        ("prompt_tokens", sum(outcome.num_prompt_tokens for outcome in answered), "", ""),
        ("cached_tokens", sum(outcome.num_cached_tokens for outcome in answered), "", "as `usage` reports"),
        ("cached_share", run.cached_share, "", "of the prompt tokens"),
    ]
    return [Figure(f"{run.label}.{name}", value, unit, note) for name, value, unit, note in rows]


def _ratios(first: Run, other: Run) -> list[Figure]:
    name = f"{first.label}_over_{other.label}"
    ttfts = [mean([outcome.ttft_s for outcome in run.answered]) for run in (first, other)]
    cached = [sum(outcome.num_cached_tokens for outcome in run.answered) for run in (first, other)]
    return [
        Figure(f"{name}.ttft_mean", ttfts[0] / ttfts[1] if ttfts[1] else 0.0, "x", "less is better"),
        Figure(f"{name}.cached_tokens", cached[0] / cached[1] if cached[1] else 0.0, "x", "more is better"),
    ]
