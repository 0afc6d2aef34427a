"""`headstart bench route`: every policy on recorded workloads in simulated time, against the bound of one shared cache.

The router, the allocator and the index are the real code; the engine is a model (`benchmarks.simulation.engine`). A
cell is a workload, a cache size and a number of workers:

    conv25_n8   Mooncake conversations at load 0.95, the fleet's caches hold 25 % of the distinct blocks, 8 workers
    agent40_n8  coding-agent sessions, closed loop, 40 %, 8 workers
    tau60_n16   tool conversations with one system prompt, closed loop, 60 %, 16 workers
"""

from __future__ import annotations

import re
import statistics
from argparse import ArgumentTypeError, Namespace
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, fields
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Final

from benchmarks.progress import Progress
from benchmarks.report import Figure, Report, option_parser, publish
from benchmarks.simulation.replay import POOLED, Outcome, Replay, ReplaySettings
from benchmarks.simulation.rivals import RIVALS
from benchmarks.simulation.traces import (
    CODING_AGENT,
    CONVERSATION,
    TOOL_CHAT,
    CodingAgentTrace,
    ConversationTrace,
    ToolChatTrace,
)
from server.router.policies import POLICIES, CostModel

DATA: Final = Path(__file__).parent.parent / "tests" / "data"
DEFAULT_CELLS: Final = ("conv25_n8", "conv5_n8")
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
    """One replay: everything that a worker process needs to know."""

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
            goals = {"conv25_n8": (">= 0.93", "<= 1.22"), "conv5_n8": (">= 0.895", "<= 1.14")}.get(cell, ("", ""))
            listed += [
                Figure(f"headstart.{cell}.hit_over_pooled", ours.hit / bound.hit, "x", goal=goals[0]),
                Figure(f"headstart.{cell}.ttft_over_pooled", ours.ttft_mean_s / bound.ttft_mean_s, "x", goal=goals[1]),
            ]
    return listed


def _draw(outcomes: dict[tuple[str, str], list[Outcome]]) -> Any:
    def draw(axes: Any) -> None:
        means = {key: mean(runs) for key, runs in outcomes.items()}
        cells = sorted({cell for _, cell in means})
        policies = sorted({policy for policy, _ in means}, key=lambda p: means[p, cells[0]].ttft_mean_s)
        for number, cell in enumerate(cells):
            heights = [means[policy, cell].ttft_mean_s for policy in policies]
            axes.bar(
                [i + 0.8 * number / len(cells) for i in range(len(policies))], heights, 0.8 / len(cells), label=cell
            )
        axes.set_xticks([i + 0.4 for i in range(len(policies))], policies, rotation=30)
        axes.set_yscale("log")
        axes.set_ylabel("mean time to first token, s")
        axes.legend()

    return draw


def options_of(argv: list[str]) -> Namespace:
    parser = option_parser("route", __doc__ or "")
    parser.add_argument("--cells", nargs="+", type=parse_cell, default=[parse_cell(name) for name in DEFAULT_CELLS])
    parser.add_argument("--policies", nargs="+", choices=list(COMPARED), default=list(COMPARED))
    parser.add_argument("--spreadings", type=int, default=6, help="arrival orders, of which the mean is taken")
    parser.add_argument("--seed", type=int, default=0, help="of the first spreading")
    parser.add_argument("--load", type=float, default=0.95, help="gross input tokens over what the fleet can prefill")
    parser.add_argument("--half", type=int, choices=(0, 1), help="only the even or the odd sessions of each recording")
    parser.add_argument("--hold", type=float, default=0.0, metavar="S", help="--hold-s of the gateways")
    parser.add_argument("--gateways", type=int, default=1, help="each with load estimates of its own")
    parser.add_argument(
        "--engine",
        choices=("fifo", "shared"),
        default="fifo",
        help="fifo: one prefill after the other, as in the figures of reference; shared: as our workers do, where half"
        " goes to the oldest and half to the shortest other",
    )
    parser.add_argument(
        "--fetch", type=float, default=0.0, metavar="X", help="blocks come from peers at X times the prefill rate"
    )
    parser.add_argument(
        "--lower-tier", type=float, default=0.0, metavar="F", help="a tier of F times the pool below each pool"
    )
    parser.add_argument(
        "--tier-load", type=float, default=20.0, metavar="Y", help="the tier gives at Y times the prefill rate"
    )
    parser.add_argument(
        "--index", choices=("memory", "redis"), default="memory", help="redis: a real one (same figures, more time)"
    )
    parser.add_argument("--index-delay", type=float, default=0.1, metavar="S", help="how late the index is")
    parser.add_argument("--report-age", type=float, default=0.05, metavar="S", help="how often workers report")
    parser.add_argument("--jobs", type=int, default=2, help="replays at a time")
    options = parser.parse_args(argv)
    if (options.fetch or options.lower_tier) and options.engine != "shared":
        parser.error("--fetch and --lower-tier need --engine shared")
    return options


def main(argv: list[str]) -> int:
    options = options_of(argv)
    outcomes = execute_all(plan(options), options.jobs)
    names = ["spreadings", "seed", "load", "gateways", "engine", "index", "index_delay", "report_age"]
    names += ["half", "hold", "fetch", "lower_tier", "tier_load"]
    env = {name: getattr(options, name) for name in names}
    publish(Report("route", figures(outcomes), env), options, _draw(outcomes))
    return 0
