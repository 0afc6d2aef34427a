"""`headstart doctor`: checks this machine for a gateway, workers or both, in the order in which the parts start.

`python -m worker.doctor` checks model, memory, device and kernel in a process of its own, because it loads torch. With
--engine-url, `python -m worker.adapter doctor` checks another engine instead.
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
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

import msgspec
from packaging.requirements import Requirement
from rich.console import Console
from rich.text import Text

from cache.redis_index import ClientSettings, RedisDownError, diagnose
from server.auth.identity import load_keys
from server.cli import names
from server.cli.common import BAD_USAGE, add_machine_options, complete, fetch_json, given, secret_file
from server.cli.serve import find_redis_server
from server.cli.serve import parse as parse_serve
from server.config import parser as gateway_parser
from worker.common.checks import Check, Status, judge
from worker.common.command_line import CommandParser, module_command
from worker.common.sockets import ANY_HOSTS, in_url, is_loopback, listen

TESTED_PYTHONS: Final = ((3, 11), (3, 12), (3, 13))
MIN_OPEN_FILES: Final = 4096
"""A stream takes two sockets of the gateway."""
MIN_FREE_BYTES: Final = 1 << 30  # a download of a small model takes a third of it
GOOD_REDIS: Final = (7,)  # has read-only scripts and finer ACLs
OLDEST_REDIS: Final = (6, 2)
SLOW_PING_S: Final = 0.002  # a lookup has 25 ms, most of which the network must leave
TIMEOUT_S: Final = 3.0  # a silent part is the problem to show
WORKER_MODULE: Final = "worker.doctor"
ENGINE_MODULE: Final = "worker.adapter"
WORKER_TIMEOUT_S: Final = 120.0  # importing torch from a cold disk takes a minute
FIX_INSTALL: Final = (
    "run `make install`: it checks every package and repairs it; TORCH_INDEX=URL names an index of torch's CPU builds. "
    "Without a checkout: pip install --force-reinstall torch"
)
_NO_REDIS: Final = (
    "start it there, or correct --redis (rediss:// for TLS) and --redis-username, --redis-password-file; "
    "without it gateways route only by their own memory"
)
_STYLES: Final = {"ok": "green", "warn": "yellow", "fail": "red"}


def text(check: Check) -> Text:
    """Return a check as coloured text."""
    line = Text(str(check))
    line.stylize(_STYLES[check.status], 0, len(check.status))
    return line


async def checks(args: argparse.Namespace) -> AsyncIterator[Check]:
    for check in (python(), packages(), open_files(), *disks()):
        yield check
    if args.redis is None:
        yield embedded_redis()
    else:
        yield await redis_at(args.redis, args.redis_username, args.redis_password_file)
    yield api_keys(args.hosts, args.api_keys)
    yield await port("port", args.host, args.port, "--port")
    yield await port("ops port", args.host, args.ops_port, "--ops-port")
    for url in args.engine_urls:
        for check in await engine_checks(args, url):
            yield check if len(args.engine_urls) == 1 else replace(check, found=f"{url}: {check.found}")
    if args.engine_urls or args.gateway_only:
        return
    if importlib.util.find_spec("torch") is None:
        fix = "pip install 'headstart[worker]', or give --gateway-only"
        yield Check("worker", "warn", "torch is not installed: this machine can run a gateway, no worker", fix)
        return
    options = ["--model", args.model or "", "--num-workers", str(args.num_workers), "--device", args.device]
    for check in checks_of(WORKER_MODULE, [*options, *given(args, "dtype", "kv_disk", "kv_disk_size")]):
        yield check


def python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()} in {sys.prefix}"
    fix = "Python 3.11 to 3.13 are tested: with another, run `make test` first"
    return judge("python", found, (sys.version_info[:2] not in TESTED_PYTHONS, "warn", fix))


def packages() -> Check:
    """Check the gateway's packages; `worker.doctor` checks those of the worker."""
    try:
        needed = importlib.metadata.requires("headstart") or []
    except importlib.metadata.PackageNotFoundError:
        return Check("packages", "warn", "headstart itself is not installed", "run `make install`, or pip install it")
    if wrong := [problem for text in needed if (problem := requirement_problem(text))]:
        return Check("packages", "fail", "; ".join(wrong), "run `make install`: it installs what requirements/ pins")
    found = f"headstart {importlib.metadata.version('headstart')} and what it needs"
    others = "; ".join(f"{', '.join(dists)} has a package {name!r} too" for name, dists in names.shared().items())
    return judge("packages", found, (bool(others), "warn", f"{others}: {names.OWN_ENVIRONMENT}"))


def requirement_problem(text: str) -> str | None:
    """Return what is wrong with a requirement, or None. Requirements of extras are ignored."""
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
    """Check the hard limit: gateways and workers raise the soft one by themselves."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY:
        return Check("files", "ok", "any number of open files allowed")
    found = f"{hard} open files allowed: enough for about {hard // 2} streams at a time"
    fix = f"raise the hard limit to {MIN_OPEN_FILES}: in /etc/security/limits.conf, or LimitNOFILE of the service"
    return judge("files", found, (hard < MIN_OPEN_FILES, "warn", fix))


def disks() -> Iterator[Check]:
    """Check the disks of temporary files and of fetched models."""
    models = Path(os.path.expanduser(os.environ.get("HF_HOME", "~/.cache/huggingface")))  # a user may have no home
    for name, folder in (("tmp", Path(tempfile.gettempdir())), ("models", models)):
        existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))
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
    is_cluster = info.get("redis_mode") == "cluster"
    is_replica = info.get("role") == "slave" and not is_cluster  # nodes of a cluster redirect
    found = f"Redis {version} at {bare}, PING {1000 * ping_s:.2f} ms, {used_bytes / 2**20:,.0f} MiB used"
    found += f", evicts by {eviction} at {max_bytes / 2**20:,.0f} MiB" if evicts else ""
    return judge(
        "redis",
        found,
        (is_replica, "fail", "name its primary, or Sentinels: workers cannot write to a replica"),
        (
            is_cluster and "+cluster" not in scheme,
            "fail",
            "it is a Redis Cluster: give redis+cluster://HOST:PORT, or rediss+cluster://",
        ),
        (evicts, "warn", "set maxmemory-policy noeviction: workers must rewrite every evicted set"),
        (ping_s > SLOW_PING_S, "warn", "put Redis near the gateways: after 25 ms they route without it"),
        *_version_problems(version),
    )


def _version_problems(text: str) -> Iterator[tuple[bool, Status, str]]:
    version = tuple(int(part) for part in text.split(".") if part.isdecimal())
    fix = "install Redis 7 or newer, which has read-only scripts and finer ACLs"
    yield bool(version) and version < OLDEST_REDIS, "fail", fix
    yield bool(version) and version < GOOD_REDIS, "warn", fix


def api_keys(hosts: Sequence[str], file: str | None) -> Check:
    """Check that a gateway which others can reach asks for keys."""
    fix = "make one with `headstart keys new --tenant NAME --file FILE`, and give the gateway --api-keys FILE"
    if file is not None:
        try:
            num_keys = len(load_keys(Path(file)).keys)
        except ValueError as error:
            return Check("keys", "fail", str(error), "correct it, and check it with `headstart keys check FILE`")
        return judge("keys", f"{num_keys} API keys in {file}", (num_keys == 0, "warn", fix))
    if reachable := " or ".join(host for host in hosts if not is_loopback(host)):
        return Check("keys", "warn", f"no API keys: anyone who reaches {reachable} may use every model", fix)
    return Check("keys", "ok", "no API keys, and only this machine reaches the gateway")


def what_gateways_read(args: argparse.Namespace, config: Sequence[str]) -> None:
    """Set the addresses and the key file that a gateway has by its variables and the file of options."""
    serve = parse_serve(config)
    gateway = gateway_parser().parse_args([*config, *serve.gateway_args])
    args.api_keys = args.api_keys or getattr(gateway, "api_keys", None)
    args.hosts = list(dict.fromkeys((args.host, serve.host, gateway.host, gateway.ops_host)))


async def port(name: str, host: str, number: int, option: str) -> Check:
    """Check that a port is free, or that a Headstart gateway serves there."""
    where = f"{host}:{number}"
    try:
        listen(host, number, option).close()
        return Check(name, "ok", f"{where} is free")
    except OSError as error:
        problem = str(error)
    num_workers = await _num_workers_of_gateway(ANY_HOSTS.get(host, host), number)
    if num_workers is None:
        return Check(name, "fail", problem, f"`ss -ltnp 'sport = :{number}'` names the program that has this one")
    fix = "start workers on its Redis: `headstart worker --redis URL`; /dashboard of its ops port shows them"
    found = f"a Headstart gateway serves at {where}, with {num_workers} worker{'' if num_workers == 1 else 's'}"
    return judge(name, found, (num_workers == 0, "warn", fix))


async def _num_workers_of_gateway(host: str, number: int) -> int | None:
    """Return the number of workers, or None if no gateway answers, with TLS or without."""
    for scheme in ("http", "https"):
        try:
            _, answer = await fetch_json(f"{scheme}://{in_url(host)}:{number}/health/ready", timeout_s=TIMEOUT_S)
        except (OSError, ValueError):
            continue
        match answer:
            case {"workers": int(num_workers)}:
                return num_workers
            case {"error": {"code": "service_unavailable"}}:
                return 0
    return None


def checks_of(module: str, options: Sequence[str]) -> list[Check]:
    """Return the checks that a module of the worker prints, one JSON object each, and one more if it failed."""
    command = [*module_command(module), *options]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=WORKER_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        fix = f"run `python -m {module}` to see where it hangs; a GPU that does not answer is the usual reason"
        return [Check("worker", "fail", f"no answer within {WORKER_TIMEOUT_S:g} s", fix)]
    found = [msgspec.json.decode(line, type=Check) for line in done.stdout.splitlines()]
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        fix = "correct the options" if done.returncode == BAD_USAGE else FIX_INSTALL
        found.append(Check("worker", "fail", lines[-1], fix))
    return found


async def engine_checks(args: argparse.Namespace, url: str) -> list[Check]:
    """Return the checks of `python -m worker.adapter doctor`."""
    known = given(args, "engine", "engine_key_file", "engine_ca", "engine_rank", "tokenizer", "block_size")
    events = [*given(args, "events", "events_replay"), *(["--events-exposed"] if args.events_exposed else [])]
    options = ["doctor", "--engine-url", url, *known, *events]
    return await asyncio.to_thread(checks_of, ENGINE_MODULE, options)


def parser() -> CommandParser:
    p = CommandParser(
        prog="headstart doctor",
        command="doctor",
        description="Checks what a gateway and workers need on this machine, one line each, with the remedy. "
        "With --engine-url it checks engines instead of own workers. Exit code 1 when something would not work.",
    )
    engine, add = add_machine_options(p), p.add_argument
    add("--redis", metavar="URL", help="check this Redis (default: the binary that `serve` would start)")
    add("--redis-username", metavar="NAME", help="ACL user in Redis (default: the URL's)")
    add("--redis-password-file", type=secret_file, metavar="FILE", help="password of the ACL user (default: the URL's)")
    add("--host", default="127.0.0.1", help="address of the gateway's ports (default 127.0.0.1)")
    add("--api-keys", metavar="FILE", help="the gateway's API keys (default: as its own options have it)")
    add("--device", default="auto", help="device of the workers: cpu, cuda, cuda:1 ... (default: as they choose)")
    add("--kv-disk", metavar="DIR", help="check that workers can keep blocks in this folder")
    add("--kv-disk-size", metavar="SIZE", help="size of the blocks of each worker (default 10G)")
    add("--gateway-only", action="store_true", help="leave out what only a worker needs")
    add("--json", action="store_true", help="print one JSON object instead")
    engine("--engine-ca", metavar="FILE", help="the authority of its certificate (default: the system's)")
    engine("--engine-rank", metavar="N", help="its data-parallel rank, where it has several")
    engine("--events", metavar="ENDPOINT", help="its cache events, as the worker has them (default auto)")
    engine("--events-replay", metavar="ENDPOINT", help="where it repeats lost events (default: as advertised)")
    engine("--events-exposed", action="store_true", help="allow the events to cross the network")
    engine("--block-size", metavar="N", help="tokens in a block of the fleet's index (default 16)")
    return p


def verdict(checks: Sequence[Check]) -> tuple[int, str]:
    """Return the exit status and the last line."""
    statuses = [check.status for check in checks]
    if failed := statuses.count("fail"):
        return 1, f"{failed} of {len(statuses)} checks failed: see the advice after ->"
    warned = statuses.count("warn")
    return 0, f"It will work; {warned} of {len(statuses)} checks could be better." if warned else "All is well."


async def _run(args: argparse.Namespace) -> int:
    console, done = Console(highlight=False), []
    async for check in checks(args):
        done.append(check)
        if not args.json:
            console.print(text(check), soft_wrap=True)
    status, line = verdict(done)
    rows = [asdict(check) for check in done]
    print(json.dumps({"ok": status == 0, "checks": rows}) if args.json else f"\n{line}")
    return status


def main(argv: Sequence[str]) -> int:
    """Return 1 when something failed."""
    args = parser().parse_args(argv)
    complete(args)
    file = parser().file(argv)
    what_gateways_read(args, [] if file is None else ["--config", file])
    return asyncio.run(_run(args))
