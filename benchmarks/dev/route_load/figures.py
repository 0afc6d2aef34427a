"""Figures of the replays with their goals, and their plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from benchmarks.dev.simulation.replay import POOLED, Outcome
from benchmarks.report import Figure

GOALS: Final = {"conv25_n8": (">= 0.93", "<= 1.22"), "conv5_n8": (">= 0.895", "<= 1.14")}
"""By cell: hits and time to first token of `headstart`, each over those of one shared cache."""

OURS: Final = "headstart"
T_95: Final = (math.inf, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""One-sided 95 % quantiles of Student's t, by degrees of freedom; the last stands for more."""


def mean(outcomes: Iterable[Outcome]) -> Outcome:
    listed = list(outcomes)
    return Outcome(*(statistics.fmean(getattr(o, field.name) for o in listed) for field in fields(Outcome)))


def figures(outcomes: dict[tuple[str, str], list[Outcome]]) -> list[Figure]:
    """Hit, TTFT and balance of every policy and cell, then what matters: headstart against the bound and rivals."""
    listed: list[Figure] = []
    means = {key: mean(runs) for key, runs in outcomes.items()}
    best = {cell: best_policy(means, cell) for _, cell in means}
    for (policy, cell), outcome in sorted(means.items(), key=lambda item: (item[0][1], item[1].ttft_mean_s)):
        name = f"{policy}.{cell}"
        listed += [
            Figure(f"{name}.hit", outcome.hit, "", "prompt tokens found cached"),
            Figure(f"{name}.ttft_mean_s", outcome.ttft_mean_s, "s", "the best policy" if policy == best[cell] else ""),
            Figure(f"{name}.ttft_p50_s", outcome.ttft_p50_s, "s"),
            Figure(f"{name}.ttft_p90_s", outcome.ttft_p90_s, "s"),
            Figure(f"{name}.ttft_p99_s", outcome.ttft_p99_s, "s"),
            Figure(f"{name}.max_over_mean_busy", outcome.max_over_mean_busy),
            Figure(f"{name}.predicted_over_actual_p50", outcome.predicted_over_actual_p50, "x"),
        ]
    for cell in sorted({cell for _, cell in means}):
        ours, bound = means.get((OURS, cell)), means[POOLED, cell]
        if ours is not None:
            goals = GOALS.get(cell, ("", ""))
            listed += [
                Figure(f"headstart.{cell}.hit_over_pooled", ours.hit / bound.hit, "x", goal=goals[0]),
                Figure(f"headstart.{cell}.ttft_over_pooled", ours.ttft_mean_s / bound.ttft_mean_s, "x", goal=goals[1]),
            ]
    return [*listed, *ratio_figures(outcomes)]


def best_policy(means: Mapping[tuple[str, str], Outcome], cell: str, without: Sequence[str] = (POOLED,)) -> str | None:
    """Return the policy of the lowest mean TTFT in the cell; None if there is none."""
    policies = [policy for policy, name in means if name == cell and policy not in without]
    return min(policies, key=lambda policy: means[policy, cell].ttft_mean_s, default=None)


def ratio_figures(outcomes: Mapping[tuple[str, str], Sequence[Outcome]]) -> list[Figure]:
    """Return headstart's mean TTFT over the best rival's by cell, and the worst: lower 95 % bounds of pairs."""
    means = {key: mean(runs) for key, runs in outcomes.items()}
    ratios: dict[str, tuple[float, str]] = {}
    for policy, cell in outcomes:
        rival = best_policy(means, cell, without=(POOLED, OURS)) if policy == OURS else None
        if rival is not None:
            pairs = zip(outcomes[OURS, cell], outcomes[rival, cell], strict=True)
            ratios[cell] = lower_bound([ours.ttft_mean_s / theirs.ttft_mean_s for ours, theirs in pairs]), rival
    listed = [
        Figure(f"headstart.{cell}.ttft_over_rival", ratio, "x", f"lower bound, over {rival}")
        for cell, (ratio, rival) in ratios.items()
    ]
    if ratios:
        worst = max(ratios, key=lambda cell: ratios[cell][0])
        listed.append(Figure("worst_ratio", ratios[worst][0], "x", worst, goal="<= 1.02"))
    return listed


def lower_bound(values: Sequence[float]) -> float:
    """Return the lower 95 % bound of the mean; of one value, the value itself."""
    if len(values) == 1:
        return values[0]
    quantile = T_95[min(len(values), len(T_95)) - 1]
    return statistics.fmean(values) - quantile * statistics.stdev(values) / math.sqrt(len(values))


def draw(axes: Any, outcomes: dict[tuple[str, str], list[Outcome]]) -> None:
    """Draw the mean time to first token of each policy, a colour for each cell."""
    means = {key: mean(runs) for key, runs in outcomes.items()}
    cells = sorted({cell for _, cell in means})
    policies = sorted({policy for policy, _ in means}, key=lambda p: means[p, cells[0]].ttft_mean_s)
    for number, cell in enumerate(cells):
        heights = [means[policy, cell].ttft_mean_s for policy in policies]
        axes.bar([i + 0.8 * number / len(cells) for i in range(len(policies))], heights, 0.8 / len(cells), label=cell)
    axes.set_xticks([i + 0.4 for i in range(len(policies))], policies, rotation=30)
    axes.set_yscale("log")
    axes.set_ylabel("mean time to first token, s")
    axes.legend()
