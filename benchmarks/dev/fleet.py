"""`headstart bench fleet`: a gateway in front of 1,000 registered workers, on the wire.

    workers    without a model, in one process; they publish 2,000 times a second through a real Redis
    gateway    a real one, with a cluster secret; chats at 100 a second for a minute
    then       100 workers restart at once, while chats go on; then the gateway restarts

The processes may run on any core. `waited` is the share of its time for which a process could run and had no core:
on a machine that others load too, lookups miss their deadline of 25 ms then.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import aiohttp
import uvloop

from benchmarks.dev.fleet_load.requests import OpenLoop
from benchmarks.dev.gateway_load.processes import (
    MODEL,
    cpu_s,
    gateway_process,
    make_bundle,
    rss_bytes,
    scrape,
    started,
    until_ready,
)
from benchmarks.dev.gateway_load.traffic import Traffic
from benchmarks.dev.private_redis import private_redis
from benchmarks.report import Figure, Report, option_parser, publish
from cache.redis_index.client import RedisClient
from cache.redis_index.connection import ClientSettings
from server.ops.feed import quantile
from worker.common.command_line import module_command
from worker.wire import pack

NO_ANSWER: Final = ("timeout", "down", "skipped", "invalid")
"""Events of lookups that gave a decision nothing."""
MAX_WAIT_S: Final = 60.0
STAGES: Final = ("lookup", "choose")


@dataclass(frozen=True, slots=True)
class Gateway:
    url: str
    ops: str
    pid: int


@dataclass(frozen=True, slots=True)
class Sample:
    """The use of the processes at one time."""

    time_s: float
    metrics: Mapping[str, float]
    cpu_s: Mapping[str, float]
    waited_s: Mapping[str, float]
    bytes: Mapping[str, float]


class Workers:
    """The process of the workers."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid

    async def epochs(self, event: str) -> tuple[dict[str, str], str]:
        """Wait for the event, and return the workers' epochs and the URL of one."""
        assert self._process.stdout is not None
        line = await asyncio.to_thread(self._process.stdout.readline)
        if not line:
            raise SystemExit("the workers' process has ended: see above")
        found = json.loads(line)
        assert found["event"] == event
        return found["epochs"], found["url"]

    def restart(self, count: int, down_s: float) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"restart {count} {down_s}\n")
        self._process.stdin.flush()


def main(argv: list[str]) -> int:
    options = options_of(argv)
    with ExitStack() as stack:
        figures = uvloop.run(measure(stack, options))
    names = ("workers", "publishes", "rate", "seconds", "conversations", "prompt_tokens", "restarts", "down_s")
    publish(Report("fleet", figures, {name: getattr(options, name) for name in names}), options)
    return 0


def options_of(argv: list[str]) -> argparse.Namespace:
    parser = option_parser("fleet", "A gateway in front of a thousand workers, on the wire.")
    parser.add_argument("--workers", type=int, default=1000, help="registered (default 1000)")
    parser.add_argument("--publishes", type=float, default=2000.0, help="a second, of all together (default 2000)")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second (default 100)")
    parser.add_argument("--seconds", type=float, default=60.0, help="of requests (default 60)")
    parser.add_argument("--conversations", type=int, default=400, help="different prompts (default 400)")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="of each prompt (default 512)")
    parser.add_argument("--restarts", type=int, default=100, help="workers that restart at once (default 100)")
    parser.add_argument("--down-s", type=float, default=1.0, help="for which they are gone (default 1)")
    return parser.parse_args(argv)


async def measure(stack: ExitStack, options: argparse.Namespace) -> list[Figure]:
    folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    bundle, tokenizer = make_bundle()
    (folder / "bundle").write_bytes(pack(bundle))
    secret = folder / "secret"
    secret.write_text(secrets.token_hex(32))
    redis = stack.enter_context(private_redis())
    command = [*module_command("benchmarks.dev.fleet_load.workers"), "--bundle", str(folder / "bundle")]
    command += ["--redis", redis, "--secret", str(secret), "--workers", str(options.workers)]
    command += ["--publishes", str(options.publishes), "--seconds", str(2 * options.seconds + 120)]
    process = stack.enter_context(started(command, None, stdout=subprocess.PIPE, stdin=subprocess.PIPE))
    workers = Workers(process)
    _, worker_url = await workers.epochs("registered")
    bodies = prompts(Traffic(MODEL, tokenizer), options.conversations, options.prompt_tokens)
    client = RedisClient(redis, ClientSettings())
    link = asyncio.create_task(client.run())
    try:
        while not client.up:  # noqa: ASYNC110 (another process makes it true)
            await asyncio.sleep(0.01)
        with ExitStack() as life:
            gateway = start_gateway(life, worker_url, redis, secret)
            await until_ready(gateway.url, options.workers)
            figures = await load_figures(gateway, workers, client, bodies, options)
            restarted, epochs = await restart_figures(gateway, workers, bodies, options)
        figures += restarted
        begun_s = time.monotonic()
        gateway = start_gateway(stack, worker_url, redis, secret)
        await until_ready(gateway.url, None)
        ready_s = time.monotonic()
        await until_right(gateway, epochs)
        figures += [
            Figure("gateway_restart.ready_s", ready_s - begun_s, "s", "from its start until it takes requests"),
            Figure("gateway_restart.right_s", time.monotonic() - ready_s, "s", "until it has every worker", "<= 2"),
        ]
    finally:
        link.cancel()
    return figures


def start_gateway(stack: ExitStack, worker_url: str, redis: str, secret: Path) -> Gateway:
    options = ("--cluster-secret-file", str(secret))
    return Gateway(*stack.enter_context(gateway_process(worker_url, None, redis, *options)))


def prompts(traffic: Traffic, count: int, num_tokens: int) -> list[bytes]:
    """Return chats with one system prompt of half the tokens."""
    system = {"role": "system", "content": traffic.text(num_tokens // 2)}
    chats = [[system, {"role": "user", "content": traffic.text(num_tokens // 2)}] for _ in range(count)]
    return [json.dumps({"model": MODEL, "messages": chat, "max_tokens": 8}).encode() for chat in chats]


async def load_figures(
    gateway: Gateway, workers: Workers, client: RedisClient, bodies: Sequence[bytes], options: argparse.Namespace
) -> list[Figure]:
    """Send requests, and return what the gateway and Redis did and used."""
    chats = OpenLoop(gateway.url + "/v1/chat/completions", bodies, options.rate)
    await chats.run(min(10.0, options.seconds))  # each conversation has its workers, and the processes their memory
    before = await sample(gateway, workers, client)
    outcomes = await chats.run(options.seconds)
    after = await sample(gateway, workers, client)
    spent_s = after.time_s - before.time_s
    metrics = {name: value - before.metrics.get(name, 0.0) for name, value in after.metrics.items()}
    num_decisions = metrics['headstart_route_seconds_count{stage="lookup"}']
    missed = {event: metrics.get(f'headstart_index_events_total{{event="{event}"}}', 0.0) for event in NO_ANSWER}
    p99_s = {stage: stage_quantile(metrics, stage, 0.99) for stage in STAGES}
    mean_s = {stage: metrics[f'headstart_route_seconds_sum{{stage="{stage}"}}'] / num_decisions for stage in STAGES}
    found = metrics["headstart_cached_tokens_total"] / metrics["headstart_promised_cached_tokens_total"]
    figures = [
        Figure("requests_per_s", len(outcomes.latencies_s) / spent_s, "1/s"),
        Figure("failed_requests", sum(outcomes.failures.values()), "", first(outcomes.failures), "0"),
        Figure("decisions", num_decisions),
        Figure("used_index", 1.0 - sum(missed.values()) / num_decisions, "", named(missed), ">= 0.999"),
        Figure("lookup_mean_s", mean_s["lookup"], "s"),
        Figure("lookup_p99_s", p99_s["lookup"], "s"),
        Figure("choose_mean_s", mean_s["choose"], "s"),
        Figure("choose_p99_s", p99_s["choose"], "s"),
        Figure("decision_p99_s", sum(p99_s.values()), "s", "at most: the sum of both", "<= 0.02"),
        Figure("found_over_promised", found, "", "prompt tokens cached at the worker, over those that the index had"),
    ]
    for name in after.cpu_s:
        used = (after.cpu_s[name] - before.cpu_s[name]) / spent_s
        waited = (after.waited_s[name] - before.waited_s[name]) / spent_s
        figures.append(Figure(f"{name}.cpu", used, "", "of a core"))
        figures.append(Figure(f"{name}.waited", waited, "", "of the time: it could run and had no core"))
    for name, num_bytes in after.bytes.items():
        grown = num_bytes / before.bytes[name] - 1.0
        figures.append(Figure(f"{name}.memory_growth", grown, "", f"of {num_bytes / 1e6:.0f} MB", "<= 0.05"))
    return figures


async def restart_figures(
    gateway: Gateway, workers: Workers, bodies: Sequence[bytes], options: argparse.Namespace
) -> tuple[list[Figure], dict[str, str]]:
    """Restart workers while requests go on; return also the epochs of all."""
    chats = OpenLoop(gateway.url + "/v1/chat/completions", bodies, options.rate)
    before_s = min(2.0, options.seconds)
    load = asyncio.create_task(chats.run(before_s + options.down_s + min(8.0, options.seconds)))
    await asyncio.sleep(before_s)
    workers.restart(options.restarts, options.down_s)
    epochs, _ = await workers.epochs("restarted")
    begun_s = time.monotonic()
    await until_right(gateway, epochs)
    right_s = time.monotonic() - begun_s
    outcomes = await load
    figures = [
        Figure("restarts.failed_requests", sum(outcomes.failures.values()), "", first(outcomes.failures), "0"),
        Figure("restarts.requests", outcomes.num_sent),
        Figure("restarts.right_s", right_s, "s", "until the gateway has the new epochs", "<= 5"),
    ]
    return figures, epochs


async def until_right(gateway: Gateway, epochs: Mapping[str, str]) -> None:
    """Wait until the gateway has every worker, in its present epoch."""
    async with asyncio.timeout(MAX_WAIT_S), aiohttp.ClientSession() as session:
        while True:
            async with session.get(gateway.ops + "/workers") as response:
                rows = (await response.json())["workers"]
            if {row["worker_id"]: row["epoch"] for row in rows} == epochs:
                return
            await asyncio.sleep(0.1)


async def sample(gateway: Gateway, workers: Workers, client: RedisClient) -> Sample:
    (info,) = await client.call(("INFO",), timeout_s=30.0)
    redis = dict(re.findall(r"^(\w+):(\S+)\r$", info.decode(), re.MULTILINE))
    pids = {"gateway": gateway.pid, "redis": int(redis["process_id"]), "workers": workers.pid, "client": os.getpid()}
    async with aiohttp.ClientSession() as session:
        metrics = await scrape(session, gateway.ops)
    return Sample(
        time.monotonic(),
        metrics,
        {name: cpu_s(pid) for name, pid in pids.items()},
        {name: waited_s(pid) for name, pid in pids.items()},
        {"gateway": float(rss_bytes(gateway.pid)), "redis": float(redis["used_memory"])},
    )


def waited_s(pid: int) -> float:
    """Return how long the main thread of a process could run and had no core."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9


def stage_quantile(metrics: Mapping[str, float], stage: str, share: float) -> float:
    """Return a quantile of a stage of the decisions."""
    found = re.compile(rf'headstart_route_seconds_bucket\{{(?=.*stage="{stage}").*le="([^"]+)"')
    buckets = sorted((float(match[1]), count) for name, count in metrics.items() if (match := found.match(name)))
    return quantile(share, [bound_s for bound_s, _ in buckets], [count for _, count in buckets]) or 0.0


def named(counts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {count:.0f}" for name, count in counts.items() if count)


def first(failures: Mapping[str, int]) -> str:
    return next(iter(failures), "")
