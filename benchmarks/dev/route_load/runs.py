"""The replays of every policy and cell, with the constants of the reference figures."""

from __future__ import annotations

import re
from argparse import ArgumentTypeError, Namespace
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from typing import Final

from benchmarks.dev.simulation.ablation import WITHOUT
from benchmarks.dev.simulation.fleet import ReplaySettings
from benchmarks.dev.simulation.made import DocumentTrace, FanOutTrace
from benchmarks.dev.simulation.outcomes import Outcome
from benchmarks.dev.simulation.replay import Replay
from benchmarks.dev.simulation.rivals import RIVALS
from benchmarks.dev.simulation.traces import (
    CODING_AGENT,
    CONVERSATION,
    DATA,
    SWE_AGENT,
    TOOL_CHAT,
    CodingAgentTrace,
    ConversationTrace,
    SweAgentTrace,
    ToolChatTrace,
    Trace,
)
from benchmarks.dev.simulation.variants import VARIANTS
from benchmarks.progress import Progress
from server.router.policies import POLICIES

COMPARED: Final = {**POLICIES, **RIVALS, **WITHOUT}
COUNT_PENDING: Final = frozenset({"headstart", "llm-d", "llm-d-tiers", *WITHOUT})
"""Policies whose replays count pending blocks as cached. A gateway does so for every policy; the reference figures do
so only for these."""
OURS: Final = "headstart"
NUM_RIVALS: Final = 2
Outcomes = dict[tuple[str, str], list[Outcome]]
"""By policy and cell: one for each spreading."""
POOLED: Final = "pooled"
"""One cache of the same total size that every worker sees; later requests pass one that does not fit."""
POOLED1: Final = "pooled1"
"""The same with one order at each worker, as our workers have: the bound of earlier figures."""
BOUNDS: Final = (POOLED, POOLED1)
LLM_D: Final = "llm-d"
TIERS: Final = "llm-d-tiers"
"""Where nothing moves it is `LLM_D`, and runs only without that."""
SPEEDS: Final = "speeds"
WRONG: Final = "wrong"
CHURN: Final = "churn"
JOIN: Final = "join"
_CELL: Final = re.compile(r"(conv|agent|tau|swe|fan|doc)(\d+)_n(\d+)((?:_[a-z0-9.]+)*)(?:@(.+))?")
_OPTIONS: Final[Mapping[str, Callable[[str], object]]] = {
    "load": float,
    "gateways": int,
    "fetch": float,
    "lower_tier": float,
    "hold": float,
    "copies": int,
    "keys": int,
    "warm": float,
    "index": {"memory": "memory", "redis": "redis", "none": "none"}.__getitem__,
    "engine": {"fifo": "fifo", "shared": "shared"}.__getitem__,
}


@dataclass(frozen=True, slots=True)
class Cell:
    name: str
    trace: str
    cache_share: float
    num_workers: int
    variants: Sequence[str]
    options: Mapping[str, object]
    """Those of the command that the cell replaces."""


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
    variants = match[4].split("_")[1:] if match else []
    known = {*VARIANTS, SPEEDS, WRONG, CHURN, JOIN}
    if match is None or not int(match[2]) or not int(match[3]) or {*variants} - known:
        raise ArgumentTypeError(
            f"cell {text!r}: use conv25_n8, agent40_n8, tau50_n8, swe10_n8_x8, conv25_n8@gateways=4 and the like;"
            f" after the workers may come {', '.join((*VARIANTS, SPEEDS, WRONG, CHURN, JOIN))};"
            f" after @ {', '.join(_OPTIONS)}"
        )
    options: dict[str, object] = {}
    for option in match[5].split(",") if match[5] else ():
        name, _, value = option.partition("=")
        try:
            options[name] = _OPTIONS[name](value)
        except (KeyError, ValueError) as error:
            raise ArgumentTypeError(f"cell {text!r}: {option!r} is not one of {', '.join(_OPTIONS)}") from error
    return Cell(text, match[1], int(match[2]) / 100, int(match[3]), variants, options)


@cache
def _trace(name: str, half: int | None) -> Trace:
    if name == "tau":
        return ToolChatTrace(DATA / TOOL_CHAT, half)
    if name == "conv":
        return ConversationTrace(DATA / CONVERSATION, half)
    if name == "fan":
        return FanOutTrace()
    if name == "doc":
        return DocumentTrace()
    if name == "swe":
        return SweAgentTrace(DATA / SWE_AGENT, half)
    return CodingAgentTrace(DATA / CODING_AGENT, half)


def execute(run: Run) -> Outcome:
    trace = _trace(run.cell.trace, run.half)
    seed = run.settings.seed
    workload = trace.workload(num_workers=run.cell.num_workers, load=run.load, seed=seed)
    for name, change in VARIANTS.items():
        if name in run.cell.variants:
            workload = change(workload, seed)
    policy = "headstart" if run.policy in BOUNDS else run.policy
    return Replay(workload, COMPARED[policy], run.settings).run()


def plan(options: Namespace, cell: Cell, spreading: int, outcomes: Outcomes) -> list[Run]:
    """Return the cell's runs of one spreading, given the outcomes of those before."""
    given = Namespace(**{**vars(options), **cell.options})
    moves = bool(given.fetch or given.lower_tier)
    policies = [name for name in options.policies if moves or name != TIERS or LLM_D not in options.policies]
    if spreading:
        rivals = sorted(
            (name for name in policies if name != OURS), key=lambda name: outcomes[name, cell.name][0].ttft_mean_s
        )
        policies = [name for name in policies if name == OURS or name in rivals[:NUM_RIVALS]]
    return [_run(cell, policy, spreading, given) for policy in (*policies, *(() if spreading else BOUNDS))]


def _run(cell: Cell, policy: str, spreading: int, options: Namespace) -> Run:
    pooled = policy in BOUNDS
    settings = ReplaySettings(
        num_workers=cell.num_workers,
        cache_share=cell.cache_share,
        num_gateways=options.gateways,
        index_delay_s=options.index_delay,
        report_s=options.report_age,
        pooled=pooled,
        passes=policy == POOLED,
        count_pending=policy in COUNT_PENDING,
        seed=options.seed + spreading,
        shared_engine=options.engine == "shared",
        fetch=options.fetch,
        lower_tier=options.lower_tier,
        load=options.tier_load,
        hold_s=0.0 if pooled else options.hold,
        keys=bool(options.keys),
        redis=options.index == "redis" and not pooled,
        blind=options.index == "none" and not pooled,
        two_speeds=SPEEDS in cell.variants,
        wrong_rates=WRONG in cell.variants,
        death_and_join=CHURN in cell.variants,
        copies=bool(options.copies),
        join=JOIN in cell.variants,
        warm_start_s=options.warm,
    )
    return Run(cell, policy, settings, options.load, options.half)


def processes(num_jobs: int) -> ProcessPoolExecutor:
    """Fresh processes: a fork of one with threads is not safe."""
    return ProcessPoolExecutor(num_jobs, mp_context=get_context("spawn"))


def execute_all(options: Namespace, is_sure: Callable[[Outcomes, str], bool]) -> Outcomes:
    """Run all replays and return outcomes by (policy, cell), by spreading.

    The first spreading has every policy, later ones only headstart and the two best of the others. A cell gets more
    than `--spreadings` while it is not `is_sure`.
    """
    outcomes: Outcomes = {}
    cells = list(options.cells)
    with processes(options.jobs) as pool:
        for spreading in range(options.most_spreadings):
            runs = [run for cell in cells for run in plan(options, cell, spreading, outcomes)]
            progress = Progress(len(runs))
            futures = [pool.submit(execute, run) for run in runs]
            for _ in as_completed(futures):
                progress.advance()
            for run, future in zip(runs, futures, strict=True):
                outcomes.setdefault((run.policy, run.cell.name), []).append(future.result())
            if spreading + 1 >= options.spreadings:
                cells = [cell for cell in cells if not is_sure(outcomes, cell.name)]
    return outcomes
