"""`headstart bench route`: every policy on recorded workloads in simulated time, against the bound of one shared cache.

The router, the allocator and the index are the real code; the engine is a model (`benchmarks.dev.simulation.engine`). A
cell is a workload, a cache size and a number of workers:

    conv25_n8   Mooncake conversations at load 0.95, the fleet's caches hold 25 % of the distinct blocks, 8 workers
    agent40_n8  coding-agent sessions, closed loop, 40 %, 8 workers
    tau60_n16   tool conversations with one system prompt, closed loop, 60 %, 16 workers
    swe25_n8_x8 a coding agent's text, closed loop, 25 %, 8 workers, answers of 8 times the recorded length

`worst_ratio` is headstart's mean time to first token over that of the best other policy, in the worst cell.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Final

from benchmarks.dev.route_load.figures import draw, figures
from benchmarks.dev.route_load.runs import COMPARED, execute_all, parse_cell, plan
from benchmarks.report import Report, option_parser, publish

DEFAULT_CELLS: Final = ("conv25_n8", "conv5_n8")


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
    publish(Report("route", figures(outcomes), env), options, lambda axes: draw(axes, outcomes))
    return 0
