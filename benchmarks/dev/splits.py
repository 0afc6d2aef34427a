"""`headstart bench splits`: prefill and decode apart against mixed workers at equal hardware, in steps of tokens.

Recorded workloads on workers that fetch blocks from each other; K of N have the role "prefill". The mixed fleet has the
same objective (`--max-step-ms`). A cell is a workload, an objective in ms (0: none) and a load:

    chat    recorded conversations          load: input tokens over what the fleet can prefill
    short   the same with an eighth of each answer
    agent   sessions of a coding agent      load: times as many sessions a second
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Final

from benchmarks.dev.simulation.fleet import ReplaySettings
from benchmarks.dev.simulation.split_replay import SplitReplay
from benchmarks.dev.simulation.step_replay import TokenTimes
from benchmarks.dev.simulation.traces import (
    CODING_AGENT,
    CONVERSATION,
    CodingAgentTrace,
    ConversationTrace,
    Workload,
)
from benchmarks.dev.simulation.variants import with_rate
from benchmarks.report import Figure, Report, option_parser, publish
from server.router.cost import CostModel
from server.router.policies import POLICIES

DATA: Final = Path(__file__).parents[2] / "tests" / "data"
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


@dataclass(frozen=True, slots=True)
class Found:
    times: TokenTimes
    split_share: float


def main(argv: list[str]) -> int:
    options = options_of(argv)
    cells = [
        Cell(workload, objective_ms, load, num_prefill)
        for workload in options.workloads
        for objective_ms in options.objectives
        for load in options.loads
        for num_prefill in (0, *options.prefill)
    ]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        found = dict(zip(cells, pool.map(simulate, cells, [options] * len(cells)), strict=True))
    names = ["workers", "cache", "fetch", "weight", "half", "seed"]
    publish(Report("splits", list(_figures(found)), {name: getattr(options, name) for name in names}), options)
    return 0


def options_of(argv: Sequence[str]) -> Namespace:
    parser = option_parser("splits", __doc__ or "")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--objectives", type=float, nargs="+", default=[30.0, 50.0], metavar="MS")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--prefill", type=int, nargs="+", default=[1, 2, 4], metavar="K", help="of the workers")
    parser.add_argument("--workers", type=int, default=8, help="of all roles (default 8)")
    parser.add_argument("--cache", type=float, default=0.25, help="blocks of the fleet over distinct blocks")
    parser.add_argument("--fetch", type=float, default=20.0, metavar="X", help="blocks come at X x the prefill rate")
    parser.add_argument("--weight", type=float, default=CostModel().decode_weight, help="`CostModel.decode_weight`")
    parser.add_argument("--half", type=int, choices=(0, 1), help="only the even or the odd conversations")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    return parser.parse_args(argv)


@cache
def _workload(name: str, load: float, num_workers: int, half: int | None, seed: int) -> Workload:
    if name == "agent":
        workload = CodingAgentTrace(DATA / CODING_AGENT, half).workload(num_workers=num_workers, load=1.0, seed=seed)
        return with_rate(workload, load)
    workload = ConversationTrace(DATA / CONVERSATION, half).workload(num_workers=num_workers, load=load, seed=seed)
    if name == "chat":
        return workload
    sessions = [
        replace(
            session, requests=[replace(r, num_output_tokens=r.num_output_tokens // 8 + 2) for r in session.requests]
        )
        for session in workload.sessions
    ]
    return replace(workload, sessions=sessions)


def simulate(cell: Cell, options: Namespace) -> Found:
    workload = _workload(cell.workload, cell.load, options.workers, options.half, options.seed)
    cost = CostModel(decode_weight=options.weight)
    settings = ReplaySettings(options.workers, options.cache, seed=options.seed, shared_engine=True, cost=cost)
    objective_s = cell.objective_ms / 1000.0 if cell.objective_ms else None
    replay = SplitReplay(workload, POLICIES["headstart"], settings, objective_s, cell.num_prefill, options.fetch)
    times = replay.token_times()
    return Found(times, replay.num_splits / workload.num_requests)


def _figures(found: dict[Cell, Found]) -> Iterator[Figure]:
    for cell, each in found.items():
        mixed, times = found[replace(cell, num_prefill=0)].times, each.times
        yield Figure(f"{cell.name}.ttft_mean_s", times.outcome.ttft_mean_s, "s")
        yield Figure(f"{cell.name}.ttft_p99_s", times.outcome.ttft_p99_s, "s")
        yield Figure(f"{cell.name}.itl_p99_s", times.itl_p99_s, "s", "between two tokens of a request")
        yield Figure(f"{cell.name}.within", times.within, "", "requests within 2 s and 50 ms a token")
        if cell.num_prefill:
            yield Figure(f"{cell.name}.split_share", each.split_share, "", "requests whose prefill was apart")
            ratio = times.outcome.ttft_mean_s / mixed.outcome.ttft_mean_s
            yield Figure(f"{cell.name}.ttft_over_mixed", ratio, "x", "mean", "<= 1.01")
