"""Figures of the replays with their goals, and their plot."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final

from benchmarks.dev.route_load.runs import BOUNDS, POOLED, POOLED1
from benchmarks.dev.simulation.growth import Growth
from benchmarks.dev.simulation.outcomes import Outcome, Predictions
from benchmarks.report import Figure

GOALS: Final = {"conv25_n8": 1.05, "conv5_n8": 1.02, "tau60_n16": 1.25, "agent40_n8": 1.42}
"""By cell: the most time to first token of `headstart` over that of `pooled1`."""
OURS: Final = "headstart"
MIN_P99_REQUESTS: Final = 2000
"""With fewer requests in a cell, p95 is compared instead of p99."""
T_95: Final = (math.inf, 6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833)
"""One-sided 95 % quantiles of Student's t, by degrees of freedom; the last stands for more."""
Outcomes = Mapping[tuple[str, str], Sequence[Outcome]]
"""By policy and cell: one for each spreading."""


def mean(outcomes: Iterable[Outcome]) -> Outcome:
    """Return the mean of each figure, without predictions."""
    listed = list(outcomes)
    means = {
        each.name: statistics.fmean(getattr(o, each.name) for o in listed)
        for each in fields(Outcome)
        if each.name not in ("predictions", "growth")
    }
    growth = {each.name: statistics.fmean(getattr(o.growth, each.name) for o in listed) for each in fields(Growth)}
    return replace(listed[0], **means, predictions=Predictions(), growth=Growth(**growth))


def figures(outcomes: Outcomes) -> list[Figure]:
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
            Figure(f"{name}.ttft_p95_s", outcome.ttft_p95_s, "s"),
            Figure(f"{name}.ttft_p99_s", outcome.ttft_p99_s, "s"),
            Figure(f"{name}.max_over_mean_busy", outcome.max_over_mean_busy),
            Figure(f"{name}.predicted_over_actual_p50", outcome.predicted_over_actual_p50, "x"),
        ]
        growth = {each.name: getattr(outcome.growth, each.name) for each in fields(Growth)}
        listed += [Figure(f"{name}.{key}", value) for key, value in growth.items() if value and not math.isnan(value)]
    for cell in sorted({cell for policy, cell in means if policy == OURS}):
        ours, bound, bound1 = means[OURS, cell], means[POOLED, cell], means[POOLED1, cell]
        goal = f"<= {GOALS[cell]}" if cell in GOALS else ""
        listed += [
            Figure(f"headstart.{cell}.hit_over_pooled", ours.hit / bound.hit, "x"),
            Figure(f"headstart.{cell}.ttft_over_pooled", ours.ttft_mean_s / bound.ttft_mean_s, "x"),
            Figure(f"headstart.{cell}.ttft_over_pooled1", ours.ttft_mean_s / bound1.ttft_mean_s, "x", goal=goal),
        ]
    return [*listed, *ratio_figures(outcomes)]


def best_policy(means: Mapping[tuple[str, str], Outcome], cell: str, without: Sequence[str] = BOUNDS) -> str | None:
    """Return the policy of the lowest mean TTFT in the cell; None if there is none."""
    policies = [policy for policy, name in means if name == cell and policy not in without]
    return min(policies, key=lambda policy: means[policy, cell].ttft_mean_s, default=None)


def ratio_figures(outcomes: Outcomes) -> list[Figure]:
    """Return headstart's TTFT over the best rival's by cell, mean and tail, and the worst of each.

    Spreadings are compared in pairs. Means have the lower 95 % bound; tails have the mean of the pairs.
    """
    means = {key: mean(runs) for key, runs in outcomes.items()}
    ratios: dict[str, float] = {}
    tails: dict[str, float] = {}
    listed: list[Figure] = []
    for policy, cell in outcomes:
        rival = best_policy(means, cell, without=(*BOUNDS, OURS)) if policy == OURS else None
        if rival is None:
            continue
        pairs = list(zip(outcomes[OURS, cell], outcomes[rival, cell], strict=True))
        quotients = [ours.ttft_mean_s / theirs.ttft_mean_s for ours, theirs in pairs]
        ratios[cell] = lower_bound(quotients)
        tail = "p99" if means[OURS, cell].num_requests >= MIN_P99_REQUESTS else "p95"
        name = f"ttft_{tail}_s"
        tails[cell] = statistics.fmean(getattr(ours, name) / getattr(theirs, name) for ours, theirs in pairs)
        listed += [
            Figure(f"headstart.{cell}.ttft_over_rival_mean", statistics.fmean(quotients), "x", f"over {rival}"),
            Figure(f"headstart.{cell}.ttft_over_rival", ratios[cell], "x", f"lower bound, over {rival}"),
            Figure(f"headstart.{cell}.{tail}_over_rival", tails[cell], "x", f"over {rival}"),
        ]
    if ratios:
        worst, worst_tail = max(ratios, key=ratios.__getitem__), max(tails, key=tails.__getitem__)
        listed += [
            Figure("worst_ratio", ratios[worst], "x", worst, goal="<= 1.02"),
            Figure("worst_tail_ratio", tails[worst_tail], "x", worst_tail, goal="<= 1.05"),
        ]
    return listed


def overview(outcomes: Outcomes) -> str:
    """Return a table of mean TTFT in seconds, a line for each cell; `*` marks the best policy."""
    means = {key: mean(runs) for key, runs in outcomes.items()}
    cells, policies = list(dict.fromkeys(c for _, c in means)), list(dict.fromkeys(p for p, _ in means))
    width = max(len(cell) for cell in cells) + 2
    lines = ["mean TTFT, s".ljust(width) + "".join(f"{policy:>13}" for policy in policies)]
    for cell in cells:
        best, line = best_policy(means, cell), cell.ljust(width)
        for policy in policies:
            shown = f"{means[policy, cell].ttft_mean_s:.4g}" if (policy, cell) in means else ""
            line += f"{shown + ('*' if policy == best else ' '):>13}"
        lines.append(line)
    return "\n".join(lines)


def lower_bound(values: Sequence[float]) -> float:
    """Return the lower 95 % bound of the mean; of one value, the value itself."""
    if len(values) == 1:
        return values[0]
    quantile = T_95[min(len(values), len(T_95)) - 1]
    return statistics.fmean(values) - quantile * statistics.stdev(values) / math.sqrt(len(values))


def draw(axes: Any, outcomes: Outcomes) -> None:
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
