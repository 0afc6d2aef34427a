"""`headstart index`: the shared prefix index, the prefixes that requests share, and how to empty a worker.

headstart index                    workers, their blocks and leases
headstart index prefixes           the prefixes that saved most tokens, as the gateway saw them
headstart index purge WORKER       the worker drops its cache and begins a new epoch, which invalidates its entries
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from typing import Any, Final

from rich.table import Column, Table

from server.cli.common import add_ops_options, ask_ops_port, plain_console
from worker.common.command_line import CommandParser

TIMEOUT_S: Final = 15.0  # for one answer of the ops port: a purge waits for the step that runs
PLAIN_COLUMNS: Final = 1000  # a pipe wraps no line
WORDS: Final = ("workers", "prefixes", "purge")
COUNTS: Final = ("blocks", "tokens", "running", "waiting")
WORKERS: Final = ("worker", "model", *COUNTS, "lease s", "age s", "tiers", "epoch", "state")
PREFIXES: Final = ("hits", "tokens", "blocks", "idle s", "model", "prefix", "workers")
_LEFT_ALIGNED: Final = {"worker", "workers", "model", "tiers", "epoch", "state", "prefix"}


def parser() -> CommandParser:
    p = CommandParser(
        prog="headstart index",
        command="index",
        description="The shared prefix index: workers and leases, the most shared prefixes, emptying a worker.",
    )
    add = p.add_argument
    add("what", nargs="?", choices=WORDS, default="workers", help=f"one of {', '.join(WORDS)} (default workers)")
    add("worker", nargs="?", help="worker whose cache `purge` empties")
    add_ops_options(p)
    add("--model", help="list only this model")
    add("--limit", type=int, default=20, metavar="N", help="`prefixes`: how many at most (default 20)")
    return p


async def run(args: argparse.Namespace) -> dict[str, Any]:
    """Return the answer as JSON. Raises CommandError, ValueError."""
    match args.what, args.worker:
        case "purge", None:
            raise ValueError("name the worker: headstart index purge WORKER")
        case "purge", worker:
            return await ask_ops_port(args, f"/workers/{worker}/purge", timeout_s=TIMEOUT_S, method="POST")
        case _, str(worker):
            raise ValueError(f"only `purge` takes a worker, got {worker!r}")
        case "prefixes", _:
            model = {} if args.model is None else {"model": args.model}
            query = {"limit": str(args.limit), **model}
            return await ask_ops_port(args, "/prefixes", timeout_s=TIMEOUT_S, params=query)
    answer = await ask_ops_port(args, "/index", timeout_s=TIMEOUT_S)
    workers = [worker for worker in answer["workers"] if args.model in (None, worker["model"])]
    return {**answer, "workers": sorted(workers, key=lambda worker: (worker["model"], worker["worker_id"]))}


def _worker_cells(worker: dict[str, Any]) -> list[str]:
    state = "lapsed" if not worker["live"] else "draining" if worker["draining"] else "live"
    numbers = (f"{worker[name]:,}" for name in COUNTS)
    times = (f"{worker[name]:.1f}" for name in ("lease_left_s", "lease_age_s"))
    tiers = ", ".join(f"{tier} {blocks:,}" for tier, blocks in worker["tier_blocks"].items()) or "-"
    return [worker["worker_id"], worker["model"], *numbers, *times, tiers, worker["epoch"], state]


def _prefix_cells(prefix: dict[str, Any]) -> list[str]:
    path = prefix["path"]
    where = path[0] if len(path) == 1 else f"{path[0]} .. {path[-1]}"
    numbers = (f"{prefix[name]:,}" for name in ("num_hits", "num_tokens", "num_blocks"))
    return [*numbers, f"{prefix['idle_s']:.1f}", prefix["model"], where, " ".join(prefix["workers"])]


def shown(what: str, answer: dict[str, Any]) -> Table | str:
    """Return the answer as a table or a sentence."""
    if what == "purge":
        return f"{answer['worker']} has dropped its cache; its epoch is now {answer.get('epoch', 'another')}"
    if not answer[what]:
        return "no prefix has been shared yet" if what == "prefixes" else "no worker is in the index"
    names, cells = (PREFIXES, _prefix_cells) if what == "prefixes" else (WORKERS, _worker_cells)
    columns = (Column(name, justify="left" if name in _LEFT_ALIGNED else "right") for name in names)
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in answer[what]:
        table.add_row(*(cell if cell.isprintable() else repr(cell) for cell in cells(row)))  # others write them, too
    return table


def main(argv: Sequence[str]) -> int:
    """Return 0. Raises CommandError: the gateway could not do it; ValueError: wrong arguments."""
    args = parser().parse_args(argv)
    answer = asyncio.run(run(args))
    if args.json:
        print(json.dumps(answer))
    else:
        plain_console(PLAIN_COLUMNS).print(shown(args.what, answer))
    return 0
