"""Each part of the cost left out: what it is worth in every cell."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import msgspec

from benchmarks.dev.simulation.fleet import ReplaySettings
from benchmarks.dev.simulation.outcomes import Outcome
from benchmarks.report import Figure
from server.router.cost import CostModel, WorkerView

WITHOUT: Final = "without"
"""The option of a cell."""


@dataclass(frozen=True, slots=True)
class _WithoutTerm(CostModel):
    """The cost without a term of each worker."""

    term: str = ""

    def cost_s(self, worker: WorkerView) -> float:
        return CostModel.cost_s(self, msgspec.structs.replace(worker, **{self.term: 0.0}))


@dataclass(frozen=True, slots=True)
class _WithoutIdle(CostModel):
    """An idle best match costs what any other worker does."""

    def idle_best_cost_s(self, best: WorkerView, workers: Sequence[WorkerView]) -> float:
        return self.cost_s(best)


def _change(cost: CostModel, settings: ReplaySettings) -> ReplaySettings:
    return replace(settings, cost=cost)


ABLATIONS: Final[Mapping[str, Callable[[ReplaySettings], ReplaySettings]]] = {
    **{
        term: partial(_change, _WithoutTerm(term=term))
        for term in ("queue_s", "num_displaced", "eviction_s", "decode_s")
    },
    "beta": partial(_change, CostModel(max_beta=0.0)),
    "recent": partial(_change, CostModel(assigned_weight=0.0)),
    "idle": partial(_change, _WithoutIdle()),
    "pending": lambda settings: replace(settings, count_pending=False),
    "keys": lambda settings: replace(settings, keys=False),
}


def ablated(cell: str, part: str) -> str:
    """Return the name of the cell without a part of the cost."""
    return f"{cell}{',' if '@' in cell else '@'}{WITHOUT}={part}"


def ablation_figures(outcomes: Mapping[str, Sequence[Outcome]]) -> list[Figure]:
    """Return the mean time to first token without each part over that of the whole cost, by cell."""
    means_s = {cell: statistics.fmean([outcome.ttft_mean_s for outcome in runs]) for cell, runs in outcomes.items()}
    return [
        Figure(f"{WITHOUT}_{part}.{cell}", means_s[without] / whole_s, "x")
        for cell, whole_s in means_s.items()
        for part in ABLATIONS
        if (without := ablated(cell, part)) in means_s
    ]


def ablation_table(listed: Sequence[Figure]) -> str:
    """Return a line for each cell, and a column for each part of the cost."""
    rows: dict[str, dict[str, float]] = {}
    for figure in listed:
        part, cell = figure.name.removeprefix(f"{WITHOUT}_").split(".", 1)
        rows.setdefault(cell, {})[part] = figure.value
    lines = ["mean TTFT without it".ljust(32) + "".join(f"{part:>15}" for part in ABLATIONS)]
    lines += [
        cell.ljust(32) + "".join(f"{row[part]:15.3f}" if part in row else " " * 15 for part in ABLATIONS)
        for cell, row in rows.items()
    ]
    return "\n".join(lines)
