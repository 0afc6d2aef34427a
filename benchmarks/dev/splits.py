"""`headstart bench splits`: prefill and decode apart, in simulated steps of tokens and between real workers.

simulation  recorded workloads; K of N workers have the role "prefill", against N mixed ones of the same objective:
    chat    recorded conversations          load: input tokens over what the fleet can prefill
    short   the same with an eighth of each answer
    agent   sessions of a coding agent      load: times as many sessions a second
real        prompts next to decodes: at one worker with all threads; at two mixed ones, with half of them each; and at
            two of which one computes the prompts. The answers are the same
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from benchmarks.dev.splits_load.real import real_figures
from benchmarks.dev.splits_load.simulated import WORKLOADS, simulated_figures
from benchmarks.report import Figure, Report, option_parser, publish
from server.router.cost import CostModel


def main(argv: list[str]) -> int:
    options = options_of(argv)
    figures: list[Figure] = []
    if options.only != "real":
        figures += simulated_figures(options)
    if options.only != "simulation":
        figures += real_figures(options)
    names = ["workers", "cache", "fetch", "weight", "half", "seed", "prompt_tokens", "decodes", "rounds", "threads"]
    publish(Report("splits", figures, {name: getattr(options, name) for name in names}), options)
    return 0


def options_of(argv: Sequence[str]) -> Namespace:
    parser = option_parser("splits", "Prefill and decode apart.")
    parser.add_argument("--only", choices=("simulation", "real"), help="one of the two parts")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--objectives", type=float, nargs="+", default=[30.0, 50.0], metavar="MS", help="0: none")
    parser.add_argument("--loads", type=float, nargs="+", default=[0.5, 0.8])
    parser.add_argument("--prefill", type=int, nargs="+", default=[1, 2, 4], metavar="K", help="of the workers")
    parser.add_argument("--workers", type=int, default=8, help="of all roles (default 8)")
    parser.add_argument("--cache", type=float, default=0.25, help="blocks of the fleet over distinct blocks")
    parser.add_argument("--fetch", type=float, default=20.0, metavar="X", help="blocks come at X x the prefill rate")
    parser.add_argument("--weight", type=float, default=CostModel().decode_weight, help="`CostModel.decode_weight`")
    parser.add_argument("--half", type=int, choices=(0, 1), help="only the even or the odd conversations")
    parser.add_argument("--seed", type=int, default=0, help="of the arrivals")
    parser.add_argument("--jobs", type=int, default=1, help="processes (default 1)")
    parser.add_argument("--model", default="", help="as of `headstart worker` (default: the model that is installed)")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="of each real prompt (default 1024)")
    parser.add_argument("--decodes", type=int, default=4, help="real sequences that decode (default 4)")
    parser.add_argument("--rounds", type=int, default=7, help="real prompts of each kind (default 7)")
    parser.add_argument("--threads", type=int, default=2, help="of all real workers together (default 2)")
    return parser.parse_args(argv)
