"""`headstart bench bodies`: the cost of generated bodies, each of which is refused or served within two bounds.

A real gateway for each context, over workers without a model; one request at a time. Its memory peaks at most at twice
the body and 64 MB above what it was. No step holds its loop for 150 ms of processor time.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final

from benchmarks.dev.bodies_load.generated import MAX_BYTES, Body, bodies
from benchmarks.dev.gateway_load.processes import free_ports, started, until_ready
from benchmarks.dev.limits import SPARE_BYTES, Case, Measured, Site, measure
from benchmarks.report import Figure, Report, option_parser, to_json
from worker.common.command_line import module_command

MAX_HELD_S: Final = 0.15
REQUEST_TIMEOUT_S: Final = 300.0
_MB: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Done:
    """A body, and what it did to the gateway of one context."""

    context: int
    number: int
    body: Body
    measured: Measured

    @property
    def over_bytes(self) -> int:
        """Memory above the bound."""
        return self.measured.grown_bytes - 2 * self.measured.body_bytes - SPARE_BYTES

    @property
    def failed(self) -> bool:
        status = self.measured.status
        return self.over_bytes > 0 or self.measured.loop_s >= MAX_HELD_S or status == 0 or status >= 500


def start(stack: ExitStack, contexts: Sequence[int]) -> list[Site]:
    """Start a gateway for each context."""
    command = [*module_command("benchmarks.dev.bodies_load.worker"), *map(str, contexts)]
    workers = stack.enter_context(started(command, None, stdout=subprocess.PIPE))
    assert workers.stdout is not None
    sites = []
    for _ in contexts:
        urls = workers.stdout.readline().split()
        port, ops_port = free_ports(2)
        command = [*module_command("benchmarks.dev.bodies_load.gateway"), "--port", str(port)]
        command += ["--ops-port", str(ops_port), "--workers", *urls, "--log-level", "error", "--drain-grace-s", "1"]
        gateway = stack.enter_context(started(command, None))
        sites.append(Site(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{ops_port}", gateway, urls[0], workers))
    return sites


async def run(sites: Sequence[Site], contexts: Sequence[int], chosen: Sequence[tuple[int, Body]]) -> list[Done]:
    """Send every body to the gateway of every context."""
    done = []
    for site in sites:
        await until_ready(site.url, num_workers=2)
        warm = Case("warm", "/v1/completions", lambda: b'{"model":"bench","prompt":"Hi","max_tokens":1}')
        await measure(site, warm, REQUEST_TIMEOUT_S)
    for number, body in chosen:
        for site, context in zip(sites, contexts, strict=True):
            case = Case(body.kind, body.path, lambda body=body: body.data)  # type: ignore[misc]
            each = Done(context, number, body, await measure(site, case, REQUEST_TIMEOUT_S))
            done.append(each)
            if each.failed:
                print(f"above a bound: {row(each)}", flush=True)
    return done


def row(done: Done) -> str:
    measured = done.measured
    allowed = (2 * measured.body_bytes + SPARE_BYTES) / _MB
    return (
        f"{done.body.path:26}{measured.case:38}{done.context:>7}{done.number:>6}{measured.status:>5}"
        f"{measured.body_bytes / _MB:9.2f}{measured.grown_bytes / _MB:9.1f}{allowed:7.0f}{measured.loop_s * 1e3:8.0f}"
    )


def table(done: Sequence[Done]) -> str:
    """Return a row a kind: the body nearest to its memory bound, with the longest hold of the loop."""
    head = (
        f"{'route':26}{'text':38}{'context':>7}{'body':>6}{'':>5}{'body MB':>9}{'peak MB':>9}{'of MB':>7}{'loop ms':>8}"
    )
    nearest: dict[tuple[str, str], Done] = {}
    longest: dict[tuple[str, str], float] = {}
    for each in done:
        key = each.body.path, each.measured.case
        if key not in nearest or each.over_bytes > nearest[key].over_bytes:
            nearest[key] = each
        longest[key] = max(longest.get(key, 0.0), each.measured.loop_s)
    rows = [
        f"{row(each)[:-8]}{longest[key] * 1e3:8.0f}"
        for key, each in sorted(nearest.items(), key=lambda item: -item[1].over_bytes)
    ]
    return "\n".join([head, *rows])


def main(argv: Sequence[str]) -> int:
    parser = option_parser("bodies", "What generated bodies of every route cost the gateway.")
    parser.add_argument("--count", type=int, default=1000, help="bodies, each at every context (default 1000)")
    parser.add_argument("--seed", type=int, default=1, help="of the bodies (default 1)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 131_072], help="default 8192 131072")
    parser.add_argument("--max-bytes", type=int, default=MAX_BYTES, help=f"of a body (default {MAX_BYTES})")
    parser.add_argument("--only", type=int, nargs="+", metavar="NUMBER", help="only these bodies of them")
    options = parser.parse_args(argv)
    done = asyncio.run(_measured(options))
    print(table(done))
    failed = sum(each.failed for each in done)
    print(f"\n{len(done)} requests, {failed} above a bound")
    if options.json:
        print(to_json(_report(done, failed)), flush=True)
    return 1 if failed else 0


async def _measured(options: argparse.Namespace) -> list[Done]:
    made = enumerate(bodies(options.seed, options.count, options.max_bytes))
    chosen = [(number, body) for number, body in made if options.only is None or number in options.only]
    with ExitStack() as stack:
        return await run(start(stack, options.contexts), options.contexts, chosen)


def _report(done: Sequence[Done], failed: int) -> Report:
    return Report(
        "bodies",
        [
            Figure("requests", len(done)),
            Figure("above_a_bound", failed),
            Figure("most_over_bytes", max(each.over_bytes for each in done), "B"),
            Figure("longest_loop_s", max(each.measured.loop_s for each in done), "s"),
        ],
    )
