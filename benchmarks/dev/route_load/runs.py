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
    TOOL_CHAT,
    CodingAgentTrace,
    ConversationTrace,
    ToolChatTrace,
)
from benchmarks.progress import Progress
from server.router.cost import CostModel
from server.router.policies import POLICIES

DATA: Final = Path(__file__).parents[3] / "tests" / "data"
COMPARED: Final = {**POLICIES, **RIVALS}
COUNT_PENDING: Final = frozenset({"headstart", "llm-d", "llm-d-tiers"})
"""Policies whose replays count pending blocks as cached. A gateway does so for every policy; the reference figures do
so only for these."""
REFERENCE_COST: Final = CostModel(recent_weight=0.001, kv_wait_weight=0.0)
"""The constants of the reference figures, whose engine runs prefills one by one; gateways have the default."""
_CELL: Final = re.compile(r"(conv|agent|tau)(\d+)_n(\d+)")


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    trace: str
    cache_share: float
    num_workers: int


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
        raise ArgumentTypeError(f"cell {text!r}: use conv25_n8, agent40_n8, tau50_n8 and the like")
    return Cell(text, match[1], int(match[2]) / 100, int(match[3]))


@cache
def _trace(name: str, half: int | None) -> ConversationTrace | CodingAgentTrace | ToolChatTrace:
    if name == "tau":
        return ToolChatTrace(DATA / TOOL_CHAT, half)
    if name == "conv":
        return ConversationTrace(DATA / CONVERSATION, half)
    return CodingAgentTrace(DATA / CODING_AGENT, half)


def execute(run: Run) -> Outcome:
    trace = _trace(run.cell.trace, run.half)
    workload = trace.workload(num_workers=run.cell.num_workers, load=run.load, seed=run.settings.seed)
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
    """Run all replays and return outcomes by (policy, cell). Shows a progress line on a terminal."""
    outcomes: dict[tuple[str, str], list[Outcome]] = {}
    progress = Progress(len(runs))
    with processes(num_jobs) as pool:
        pending = {pool.submit(execute, run): run for run in runs}
        for future in as_completed(pending):
            run = pending[future]
            outcomes.setdefault((run.policy, run.cell.name), []).append(future.result())
            progress.advance()
    return outcomes
