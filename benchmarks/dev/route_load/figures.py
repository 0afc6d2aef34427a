"""Figures of the replays with their goals, and their plot."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import fields
from typing import Any, Final

from benchmarks.dev.simulation.replay import POOLED, Outcome
from benchmarks.report import Figure

GOALS: Final = {"conv25_n8": (">= 0.93", "<= 1.22"), "conv5_n8": (">= 0.895", "<= 1.14")}
"""By cell: hits and time to first token of `headstart`, each over those of one shared cache."""


def mean(outcomes: Iterable[Outcome]) -> Outcome:
    listed = list(outcomes)
    return Outcome(*(statistics.fmean(getattr(o, field.name) for o in listed) for field in fields(Outcome)))


def figures(outcomes: dict[tuple[str, str], list[Outcome]]) -> list[Figure]:
    """Hit, TTFT and balance of every policy and cell, then what matters: headstart against the bound."""
    listed: list[Figure] = []
    means = {key: mean(runs) for key, runs in outcomes.items()}
    for (policy, cell), outcome in sorted(means.items(), key=lambda item: (item[0][1], item[1].ttft_mean_s)):
        name = f"{policy}.{cell}"
        listed += [
            Figure(f"{name}.hit", outcome.hit, "", "prompt tokens found cached"),
            Figure(f"{name}.ttft_mean_s", outcome.ttft_mean_s, "s"),
            Figure(f"{name}.ttft_p50_s", outcome.ttft_p50_s, "s"),
            Figure(f"{name}.ttft_p90_s", outcome.ttft_p90_s, "s"),
            Figure(f"{name}.ttft_p99_s", outcome.ttft_p99_s, "s"),
            Figure(f"{name}.max_over_mean_busy", outcome.max_over_mean_busy),
            Figure(f"{name}.predicted_over_actual_p50", outcome.predicted_over_actual_p50, "x"),
        ]
    for cell in sorted({cell for _, cell in means}):
        ours, bound = means.get(("headstart", cell)), means[POOLED, cell]
        if ours is not None:
            goals = GOALS.get(cell, ("", ""))
            listed += [
                Figure(f"headstart.{cell}.hit_over_pooled", ours.hit / bound.hit, "x", goal=goals[0]),
                Figure(f"headstart.{cell}.ttft_over_pooled", ours.ttft_mean_s / bound.ttft_mean_s, "x", goal=goals[1]),
            ]
    return listed


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
