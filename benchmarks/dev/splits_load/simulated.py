"""Prefill and decode apart against mixed workers at equal hardware, in steps of tokens: recorded workloads.

Workers fetch blocks from each other; K of N have the role "prefill". The mixed fleet has the same objective.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Final

from benchmarks.dev.route_load.runs import processes
from benchmarks.dev.simulation.fleet import ReplaySettings
from benchmarks.dev.simulation.split_replay import SplitReplay
from benchmarks.dev.simulation.step_replay import TokenTimes
from benchmarks.dev.simulation.traces import (
    CODING_AGENT,
    CONVERSATION,
    DATA,
    CodingAgentTrace,
    ConversationTrace,
    Workload,
)
from benchmarks.dev.simulation.variants import with_answers, with_rate
from benchmarks.report import Figure
from server.router.cost import CostModel
from server.router.policies import POLICIES

WORKLOADS: Final = ("chat", "short", "agent")


@dataclass(frozen=True, slots=True)
class Cell:
    workload: str
    objective_ms: float
    load: float
    num_prefill: int

    @property
    def name(self) -> str:
        return f"{self.workload}.{self.objective_ms:g}ms.{self.load:g}.prefill{self.num_prefill}"


def simulated_figures(options: Namespace) -> Iterator[Figure]:
    cells = [
        Cell(workload, objective_ms, load, num_prefill)
        for workload in options.workloads
        for objective_ms in options.objectives
        for load in options.loads
        for num_prefill in (0, *options.prefill)
    ]
    with processes(options.jobs) as pool:  # one job needs none
        apply = map if options.jobs == 1 else pool.map
        yield from _figures(dict(zip(cells, apply(simulate, cells, [options] * len(cells)), strict=True)))


@cache
def _workload(name: str, load: float, num_workers: int, half: int | None, seed: int) -> Workload:
    if name == "agent":
        workload = CodingAgentTrace(DATA / CODING_AGENT, half).workload(num_workers=num_workers, load=1.0, seed=seed)
        return with_rate(workload, load)
    workload = ConversationTrace(DATA / CONVERSATION, half).workload(num_workers=num_workers, load=load, seed=seed)
    return workload if name == "chat" else with_answers(workload, lambda num_tokens: num_tokens // 8 + 2)


def simulate(cell: Cell, options: Namespace) -> tuple[TokenTimes, float]:
    """Return the times, and the share of requests that were split."""
    workload = _workload(cell.workload, cell.load, options.workers, options.half, options.seed)
    settings = ReplaySettings(
        options.workers,
        options.cache,
        seed=options.seed,
        shared_engine=True,
        cost=CostModel(decode_weight=options.weight),
        fetch=options.fetch,
        copies=False,
        max_step_s=cell.objective_ms / 1000.0 if cell.objective_ms else None,
        num_prefill=cell.num_prefill,
    )
    replay = SplitReplay(workload, POLICIES["headstart"], settings)
    return replay.token_times(), replay.num_splits / workload.num_requests


def _figures(found: dict[Cell, tuple[TokenTimes, float]]) -> Iterator[Figure]:
    for cell, (times, split_share) in found.items():
        mixed, _ = found[replace(cell, num_prefill=0)]
        yield Figure(f"{cell.name}.ttft_mean_s", times.outcome.ttft_mean_s, "s")
        yield Figure(f"{cell.name}.ttft_p99_s", times.outcome.ttft_p99_s, "s")
        yield Figure(f"{cell.name}.itl_p99_s", times.itl_p99_s, "s", "between two tokens of a request")
        yield Figure(f"{cell.name}.within", times.within, "", "requests within 2 s and 50 ms a token")
        if cell.num_prefill:
            yield Figure(f"{cell.name}.split_share", split_share, "", "requests whose prefill was apart")
            ratio = times.outcome.ttft_mean_s / mixed.outcome.ttft_mean_s
            yield Figure(f"{cell.name}.ttft_over_mixed", ratio, "x", "mean", "<= 1.01")
