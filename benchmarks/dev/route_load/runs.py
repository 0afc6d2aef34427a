"""The replays of every policy and cell, with the constants of the reference figures."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from benchmarks.dev.simulation.replay import POOLED, Outcome, Replay, ReplaySettings
from benchmarks.dev.simulation.rivals import RIVALS
from benchmarks.dev.simulation.traces import (
    CODING_AGENT,
    CONVERSATION,
    SWE_AGENT,
    TOOL_CHAT,
    CodingAgentTrace,
    ConversationTrace,
    SweAgentTrace,
    ToolChatTrace,
    with_longer_answers,
)
from benchmarks.progress import Progress
from server.router.cost import CostModel
from server.router.policies import POLICIES

DATA: Final = Path(__file__).parents[3] / "tests" / "data"
COMPARED: Final = {**POLICIES, **RIVALS}
COUNT_PENDING: Final = frozenset({"headstart", "llm-d", "llm-d-tiers"})
"""Policies whose replays count pending blocks as cached. A gateway does so for every policy; the reference figures do
so only for these."""
REFERENCE_COST: Final = CostModel(recent_weight=0.001)
"""The constants of the reference figures, whose engine runs prefills one by one; gateways have the default."""
_CELL: Final = re.compile(r"(conv|agent|tau|swe)(\d+)_n(\d+)(?:_x(\d+))?")


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    trace: str
    cache_share: float
    num_workers: int
    answer_times: int
    """Length of answers over the recorded one."""


@dataclass(frozen=True, slots=True)
class Run:
    """One replay: everything that a worker process needs."""

    cell: Cell
    policy: str
    settings: ReplaySettings
    load: float
    half: int | None


def parse_cell(text: str) -> Cell:
    match = _CELL.fullmatch(text)
    if match is None or not int(match[2]) or not int(match[3]):
        raise ArgumentTypeError(f"cell {text!r}: use conv25_n8, agent40_n8, tau50_n8, swe10_n8_x8 and the like")
    return Cell(text, match[1], int(match[2]) / 100, int(match[3]), int(match[4] or 1))


@cache
def _trace(name: str, half: int | None) -> ConversationTrace | CodingAgentTrace | SweAgentTrace | ToolChatTrace:
    if name == "tau":
        return ToolChatTrace(DATA / TOOL_CHAT, half)
    if name == "conv":
        return ConversationTrace(DATA / CONVERSATION, half)
    if name == "swe":
        return SweAgentTrace(DATA / SWE_AGENT, half)
    return CodingAgentTrace(DATA / CODING_AGENT, half)


def execute(run: Run) -> Outcome:
    trace = _trace(run.cell.trace, run.half)
    workload = trace.workload(num_workers=run.cell.num_workers, load=run.load, seed=run.settings.seed)
    workload = with_longer_answers(workload, run.cell.answer_times)
    policy = "headstart" if run.policy == POOLED else run.policy
    return Replay(workload, COMPARED[policy], run.settings).run()


def plan(options: Namespace) -> list[Run]:
    return [
        Run(
            cell,
            policy,
            ReplaySettings(
                num_workers=cell.num_workers,
                cache_share=cell.cache_share,
                num_gateways=options.gateways,
                index_delay_s=options.index_delay,
                report_s=options.report_age,
                pooled=policy == POOLED,
                cost=CostModel() if options.engine == "shared" else REFERENCE_COST,
                count_pending=policy in COUNT_PENDING,
                seed=options.seed + spreading,
                shared_engine=options.engine == "shared",
                fetch=options.fetch,
                lower_tier=options.lower_tier,
                load=options.tier_load,
                hold_s=0.0 if policy == POOLED else options.hold,
                redis=options.index == "redis" and policy != POOLED,
            ),
            options.load,
            options.half,
        )
        for cell in options.cells
        for policy in (*options.policies, POOLED)
        for spreading in range(options.spreadings)
    ]


def processes(num_jobs: int) -> ProcessPoolExecutor:
    """Fresh processes: a fork of one with threads is not safe."""
    return ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn"))


def execute_all(runs: Sequence[Run], num_jobs: int) -> dict[tuple[str, str], list[Outcome]]:
    """Run all replays and return outcomes by (policy, cell), by spreading. Shows a progress line on a terminal."""
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    progress = Progress(len(runs))
    with processes(num_jobs) as pool:
        futures = [pool.submit(execute, run) for run in runs]
        for _ in as_completed(futures):
            progress.advance()
    for run, future in zip(runs, futures, strict=True):
        outcomes.setdefault((run.policy, run.cell.name), []).append(future.result())
    return outcomes
