"""`headstart bench route`: every policy on recorded workloads in simulated time, against the bound of one shared cache.

The router, the allocator and the index are the real code; the engine is a model (`benchmarks.dev.simulation.engine`). A
cell is a workload, a cache size and a number of workers:

    conv25_n8   Mooncake conversations at load 0.95, the fleet's caches hold 25 % of the distinct blocks, 8 workers
    agent40_n8  coding-agent sessions, closed loop, 40 %, 8 workers
    fan150_n8   planners of 30,000 tokens, each with eight children at once; pools of 1.5 such prompts
    doc500_n8   long documents and many questions about each; pools of five documents
    tau60_n16   tool conversations with one system prompt, closed loop, 60 %, 16 workers
    swe25_n8    a coding agent's text, closed loop, 25 %, 8 workers

and, after those, what changes:

    _x8         answers of 8 times the recorded length
    _rate1.5    sessions begin 1.5 times as fast
    _kept       answers take blocks, which the conversation's next prompt finds
    _tenants    twenty tenants with Zipf weights, which share no block
    _speeds     every second worker has half the speed of the others
    _wrong      a third of the workers report half or twice their prefill rate, and all report it 10 s late
    _once       a fifth of all requests are prompts that come only once
    _batches    ten times, 64 requests with one new prompt begin at once
    _bursts     arrivals of 20 s come in 4 s
    _churn      the busiest worker dies, and later one with an empty cache joins
    _hot        a prefix of 30,000 tokens that one worker holds begins 50 requests/s for a minute
    _ramp       the same, after a minute in which the rate grows
    _join       a worker joins, after its warm start
    @load=1.5,gateways=4,fetch=20,lower_tier=4,hold=0,keys=0,copies=0,warm=0,index=none,engine=fifo
                options for this cell only

Policies `without_TERM` are headstart without one term of its cost (`benchmarks.dev.simulation.ablation`).
`worst_ratio` is headstart's mean time to first token over the best other policy's, where its lower bound is highest.
A cell gets more spreadings until its bounds are .1 apart. `--deep` adds loads, gateways, pools and fetching.
"""

from __future__ import annotations

from argparse import Namespace
from typing import Final

from benchmarks.dev.route_load.figures import draw, figures, is_sure, overview
from benchmarks.dev.route_load.predictions import prediction_figures, room_table
from benchmarks.dev.route_load.runs import CHURN, COMPARED, OURS, execute_all, parse_cell
from benchmarks.report import Report, option_parser, publish

DEFAULT_CELLS: Final = (
    *("conv25_n8", "conv5_n8", "conv25_n8_x8", "conv25_n8_batches", "conv25_n8_bursts", "conv25_n8_churn"),
    *("fan120_n8@load=0.3", "fan150_n8@load=0.5", "fan200_n8@load=0.8", "fan300_n8@load=0.8", "doc500_n8@load=0.5"),
    *("fan150_n8@load=0.5,gateways=4", "fan150_n8@load=0.5,engine=fifo", "agent40_n8_speeds", "conv25_n8_speeds"),
    *("tau60_n4", "tau60_n16", "agent40_n8", "agent40_n16", "swe25_n8_x8"),
)
DEEP_CELLS: Final = (
    *("conv25_n8@load=0.3", "conv25_n8@load=0.6", "conv25_n8@load=1.5", "conv25_n8@gateways=4", "conv25_n8@hold=0"),
    *("conv25_n8@fetch=20", "conv25_n8_churn@fetch=20", "conv25_n8_kept", "conv25_n8_tenants", "conv25_n64"),
    *("conv5_n8@gateways=4", "conv5_n8@lower_tier=4", "tau60_n16@gateways=4", "tau60_n16@fetch=20"),
    *("agent40_n8@gateways=4", "agent40_n8@fetch=20", "agent40_n8_rate1.5", "agent40_n8@keys=0", "tau60_n16@keys=0"),
    *("swe25_n8_rate1.5@gateways=4", "swe25_n16", "conv25_n8@engine=fifo", "agent40_n8@engine=fifo"),
    *(f"fan{pool}_n8@load={load}" for pool in (120, 150, 200, 300) for load in (0.3, 0.5, 0.8)),
)
DEFAULT_POLICIES: Final = ("headstart", "llm-d", "llm-d-tiers", "dynamo", "sglang")
"""`llm-d-tiers` differs from `llm-d` only where workers load or fetch blocks, and runs only there."""


def options_of(argv: list[str]) -> Namespace:
    parser = option_parser("route", __doc__ or "")
    parser.add_argument("--cells", nargs="+", type=parse_cell, default=[parse_cell(name) for name in DEFAULT_CELLS])
    parser.add_argument("--deep", action="store_true", help="more cells; under 90 minutes")
    parser.add_argument("--policies", nargs="+", choices=list(COMPARED), default=list(DEFAULT_POLICIES))
    parser.add_argument("--spreadings", type=int, default=3, help="the least arrival orders of which the mean is taken")
    parser.add_argument("--most-spreadings", type=int, default=8, metavar="N", help="the most, where bounds are wide")
    parser.add_argument("--seed", type=int, default=0, help="of the first spreading")
    parser.add_argument("--load", type=float, default=0.95, help="gross input tokens over what the fleet can prefill")
    parser.add_argument("--half", type=int, choices=(0, 1), help="only the even or the odd sessions of each recording")
    parser.add_argument("--hold", type=float, default=3.0, metavar="S", help="--hold-s of the gateways")
    parser.add_argument("--keys", type=int, choices=(0, 1), default=1, help="agents name their conversations")
    parser.add_argument("--gateways", type=int, default=1, help="each with load estimates of its own")
    parser.add_argument(
        "--engine",
        choices=("fifo", "shared"),
        default="shared",
        help="shared: as our workers do, where half goes to the oldest prefill and half to the shortest other;"
        " fifo: one prefill after the other, as behind an adapter",
    )
    parser.add_argument(
        "--fetch", type=float, default=0.0, metavar="X", help="blocks come from peers at X times the prefill rate"
    )
    parser.add_argument("--copies", type=int, choices=(0, 1), default=1, help="gateways copy hot chains on purpose")
    parser.add_argument(
        "--warm", type=float, default=5.0, metavar="S", help="--warm-start-s of the worker that joins (cells _join)"
    )
    parser.add_argument(
        "--lower-tier", type=float, default=0.0, metavar="F", help="a tier of F times the pool below each pool"
    )
    parser.add_argument(
        "--tier-load", type=float, default=20.0, metavar="Y", help="the tier gives at Y times the prefill rate"
    )
    parser.add_argument(
        "--index",
        choices=("memory", "redis", "none"),
        default="memory",
        help="redis: a real one (same figures, more time); none: it never answers",
    )
    parser.add_argument("--index-delay", type=float, default=0.1, metavar="S", help="how late the index is")
    parser.add_argument("--report-age", type=float, default=0.05, metavar="S", help="how often workers report")
    parser.add_argument("--jobs", type=int, default=2, help="replays at a time")
    options = parser.parse_args(argv)
    if options.deep:
        options.cells = [*options.cells, *map(parse_cell, DEEP_CELLS)]
    for cell in options.cells:
        given = {**vars(options), **cell.options}
        if (given["fetch"] or given["lower_tier"]) and given["engine"] != "shared":
            parser.error("--fetch and --lower-tier need --engine shared")
        if CHURN in cell.variants and options.index == "redis":
            parser.error(f"{cell.name}: --index redis has no deaths of workers")
    return options


def main(argv: list[str]) -> int:
    options = options_of(argv)
    outcomes = execute_all(options, is_sure)
    ours = {cell: runs for (policy, cell), runs in outcomes.items() if policy == OURS}
    print(f"{overview(outcomes)}\n\n{room_table(ours)}\n")
    names = ["spreadings", "seed", "load", "gateways", "engine", "index", "index_delay", "report_age"]
    names += ["half", "hold", "keys", "fetch", "lower_tier", "tier_load"]
    env = {name: getattr(options, name) for name in names}
    report = Report("route", [*figures(outcomes), *prediction_figures(ours)], env)
    publish(report, options, lambda axes: draw(axes, outcomes))
    return 0
