"""Figures of the replays with their goals, and their plot."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Final, NamedTuple

from benchmarks.dev.route_load.runs import BOUNDS, OURS, POOLED, POOLED1
from benchmarks.dev.simulation.growth import Growth
from benchmarks.dev.simulation.outcomes import Outcome, Predictions
from benchmarks.report import Figure

GOALS: Final = {"conv25_n8": 1.05, "conv5_n8": 1.02, "tau60_n16": 1.25, "agent40_n8": 1.42}
"""By cell: the most time to first token of `headstart` over that of `pooled1`."""
MIN_P99_REQUESTS: Final = 2000
"""With fewer requests in a cell, p95 is compared instead of p99."""
NUM_DRAWS: Final = 1000
MAX_HALF_WIDTH: Final = 0.05
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
        ours, bound, bound1 = outcomes[OURS, cell][0], means[POOLED, cell], means[POOLED1, cell]  # of one spreading
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
    """Return headstart's TTFT over the best rival's: mean and tail by cell, and the worst of each.

    The ratio is that of means over paired spreadings, between the bounds of 95 % of the ratios of redrawn pairs.
    """
    means = {key: mean(runs) for key, runs in outcomes.items()}
    ratios: dict[str, Ratio] = {}
    tails: dict[str, float] = {}
    listed: list[Figure] = []
    for policy, cell in outcomes:
        compared = {key: value for key, value in means.items() if len(outcomes[key]) == len(outcomes[policy, cell])}
        rival = best_policy(compared, cell, without=(*BOUNDS, OURS)) if policy == OURS else None
        if rival is None:
            continue
        ours, theirs = outcomes[OURS, cell], outcomes[rival, cell]
        ratio = ratios[cell] = ratio_of([each.ttft_mean_s for each in ours], [each.ttft_mean_s for each in theirs])
        name = "p99" if means[OURS, cell].num_requests >= MIN_P99_REQUESTS else "p95"
        over = [getattr(means[each, cell], f"ttft_{name}_s") for each in (OURS, rival)]
        tails[cell] = over[0] / over[1]
        note = f"{ratio.lower:.3f} to {ratio.upper:.3f} of {len(ours)} spreadings, over {rival}"
        listed += [
            Figure(f"headstart.{cell}.ttft_over_rival", ratio.value, "x", note),
            Figure(f"headstart.{cell}.{name}_over_rival", tails[cell], "x", f"over {rival}"),
        ]
    if ratios:
        worst = max(ratios, key=lambda cell: ratios[cell].lower)
        worst_tail = max(tails, key=tails.__getitem__)
        geometric = statistics.geometric_mean([ratio.value for ratio in ratios.values()])
        bounds = f"{ratios[worst].lower:.3f} to {ratios[worst].upper:.3f}: {worst}"
        listed += [
            Figure("mean_ratio", geometric, "x", "geometric mean over the cells", goal="<= 1"),
            Figure(
                "worst_ratio", ratios[worst].value, "x", bounds, "lower bound <= 1.02", met=ratios[worst].lower <= 1.02
            ),
            Figure("worst_tail_ratio", tails[worst_tail], "x", worst_tail, goal="<= 1.05"),
        ]
    return listed


class Ratio(NamedTuple):
    """A ratio of means, and the bounds of 95 %."""

    value: float
    lower: float
    upper: float

    @property
    def half_width(self) -> float:
        return (self.upper - self.lower) / 2


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Return the ratio of means of pairs. The bounds come from pairs drawn again, always in the same way."""
    rng, num = random.Random(0), len(ours)
    drawn = []
    for _ in range(NUM_DRAWS):
        at = rng.choices(range(num), k=num)
        drawn.append(sum([ours[i] for i in at]) / sum([theirs[i] for i in at]))
    drawn.sort()
    return Ratio(sum(ours) / sum(theirs), drawn[int(0.025 * NUM_DRAWS)], drawn[int(0.975 * NUM_DRAWS)])


def is_sure(outcomes: Outcomes, cell: str) -> bool:
    """Return whether the ratio of the cell to both of its rivals is known within `MAX_HALF_WIDTH`."""
    ours = [each.ttft_mean_s for each in outcomes.get((OURS, cell), ())]
    return all(
        ratio_of(ours, [each.ttft_mean_s for each in runs]).half_width <= MAX_HALF_WIDTH
        for (policy, name), runs in outcomes.items()
        if name == cell and policy != OURS and len(runs) == len(ours)
    )


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
