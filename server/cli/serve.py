"""`headstart serve`: every part on one machine, supervised.

    Supervisor --+-- redis-server     on a unix socket in a private folder
                 +-- worker 0..N-1    each with its own process and port
                 +-- gateway 0..M-1   one public port, each with its own ops port

The parts are the same as on Kubernetes; only starting and restarting differ.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from server.cli.child import REFUSED, Child, ChildRefusedError
from server.cli.serve_config import RedisMissingError, ServeConfig, find_redis_server, parse, redis_command

STOP_GRACE_S: Final = 3.5
"""Every child is gone 5 s after Ctrl-C: this much for SIGTERM, the rest for SIGKILL and for Redis."""
REDIS_GRACE_S: Final = 1.0
DRAIN_GRACE_S: Final = 2.0
"""Seconds of it for open requests, at gateways and workers."""
POLL_S: Final = 0.1
TICK_S: Final = 0.2
REDIS: Final = "redis"
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}
_LAYERS: Final = re.compile(r"headstart worker: loading layer (\d+) of (\d+)")
_FOR_LOGS: Final = re.compile(r"^headstart worker: |^\S+ \S+ (INFO|DEBUG) ")
_FOR_PROGRAMS: Final = '{"event": '


class Screen:
    """Prints the lines of all parts. On a terminal, a progress bar stands for log lines until `ready`."""

    def __init__(self, num_workers: int) -> None:
        self._console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        self._num_workers = num_workers
        self._layers: dict[str, tuple[int, int]] = {}
        columns = (TextColumn("headstart: {task.description}"), BarColumn(20), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
        self._task = self._bar.add_task("starting", total=None)
        self._starting = self._console.is_terminal

    async def run(self) -> None:
        """Move the bar until `ready`. Children are forked during that time, so no thread moves it."""
        while self._starting:
            self._bar.start()
            self._bar.refresh()
            await asyncio.sleep(TICK_S)

    def stage(self, text: str, done: int = 0, total: int | None = None) -> None:
        self._bar.update(self._task, description=text, completed=done, total=total)

    def ready(self) -> None:
        """End the bar; every line is printed from here on."""
        if self._starting:
            self._starting = False
            self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line of the supervisor's own."""
        self._print(f"headstart: {text}")

    def relay(self, name: str, line: str) -> None:
        """Print a line of a part, unless it is for programs."""
        if line.startswith(_FOR_PROGRAMS):
            return
        if self._starting and (layers := _LAYERS.match(line)):
            self._layers[name] = int(layers[1]), int(layers[2])
            done = sum(done for done, _ in self._layers.values())
            total = self._num_workers * self._layers[name][1]
            if done < total:
                self.stage("loading the model", done, total)
            else:
                self.stage("measuring how fast the workers are")
        elif not (self._starting and _FOR_LOGS.match(line) and " cannot " not in line):
            self._print(f"[{name}] {line}")

    def _print(self, text: str) -> None:
        if self._starting:
            self._console.print(text, soft_wrap=True)  # above the bar
        else:
            print(text, file=sys.stderr, flush=True)


class Supervisor:
    """Owner of all children of one `headstart serve`."""

    def __init__(self, config: ServeConfig, folder: Path) -> None:
        self._config = config
        self._socket = folder / "redis.sock"
        self._redis_url = config.redis_url or f"unix://{self._socket}"
        self._secret_options = secret_options(folder)
        self._started_s = time.monotonic()
        self._children: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_requested = asyncio.Event()
        self._screen = Screen(config.num_workers)

    async def run(self) -> int:
        """Serve until SIGINT or SIGTERM, and return the exit code. Raises RedisMissingError and ChildRefusedError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop_requested.set)
        self._run(self._screen.run())
        starting = self._run(self._start())
        try:
            await self._stop_requested.wait()
            self._screen.ready()
            self._screen.say("stopping ...")
        finally:
            starting.cancel()
            await asyncio.gather(starting, return_exceptions=True)
            await self._stop()
        for task in self._tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        self._screen.say("stopped")
        return 0

    async def _start(self) -> None:
        config = self._config
        if config.redis_url is None:
            self._spawn(REDIS, redis_command(find_redis_server(), self._socket), quiet=True)
            while not self._socket.exists():  # noqa: ASYNC110 - another process makes it
                await asyncio.sleep(POLL_S)
        self._screen.stage("loading the model")
        for index in range(config.num_workers):
            self._spawn(f"worker-{index}", self._worker_command(index))
        for index in range(config.num_gateways):
            self._spawn("gateway" if config.num_gateways == 1 else f"gateway-{index}", self._gateway_command(index))
        for index in range(config.num_gateways):
            await self._ready(index)
        self._screen.ready()
        await self._announce()

    def _spawn(self, name: str, command: Sequence[str], *, quiet: bool = False) -> None:
        child = Child(name, command, partial(self._screen.relay, name), quiet=quiet)
        self._children.append(child)
        self._run(child.run(self._screen.say))

    def _run(self, part: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a part in the background; its failure ends everything."""

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and task.exception() is not None:
                self._stop_requested.set()

        task = asyncio.create_task(part)
        task.add_done_callback(ended)
        self._tasks.append(task)
        return task

    async def _stop(self) -> None:
        """End the children, Redis last, so that the others never miss it."""
        others = [child for child in self._children if child.name != REDIS]
        await asyncio.gather(*(child.stop(STOP_GRACE_S) for child in others))
        await asyncio.gather(*(child.stop(REDIS_GRACE_S) for child in self._children))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _worker_command(self, index: int) -> list[str]:
        config = self._config
        command = [sys.executable, "-m", "worker", "--worker-id", f"worker-{index}", "--host", "127.0.0.1"]
        command += ["--port", "0", "--threads", str(config.threads)]
        command += ["--local-rank", str(index), "--local-world-size", str(config.num_workers)]
        if config.model is not None:
            command += ["--model", config.model]
        return [*command, *self._common_options(), *config.worker_args]

    def _gateway_command(self, index: int) -> list[str]:
        config = self._config
        command = [sys.executable, "-m", "server.gateway", "--host", config.host, "--port", str(config.port)]
        command += ["--ops-port", str(config.ops_port + index)]
        if config.num_gateways > 1:
            command.append("--share-port")
        return [*command, *self._common_options(), *config.gateway_args]

    def _common_options(self) -> list[str]:
        return ["--redis", self._redis_url, "--drain-grace-s", str(DRAIN_GRACE_S), *self._secret_options]

    async def _ready(self, gateway: int) -> None:
        """Wait until a gateway serves and knows every worker."""
        while True:
            status, detail = await self._ask(gateway, "/health/ready")
            if status == 200 and int(detail["workers"]) >= self._config.num_workers:
                return
            await asyncio.sleep(POLL_S)

    async def _ask(self, gateway: int, path: str) -> tuple[int, Any]:
        """Ask the ops port of a gateway; status 0: no answer. Its certificate is for the names that others use."""
        connector, timeout = aiohttp.TCPConnector(ssl=False), aiohttp.ClientTimeout(total=2)
        with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
            async with (
                aiohttp.ClientSession(connector=connector, timeout=timeout) as session,
                session.get(self._url(self._config.ops_host, self._config.ops_port + gateway) + path) as answer,
            ):
                return answer.status, await answer.json(content_type=None)
        return 0, {}

    def _url(self, host: str, port: int) -> str:
        return f"{'https' if self._config.tls else 'http'}://{_ANY.get(host, host)}:{port}"

    async def _announce(self) -> None:
        config = self._config
        _, detail = await self._ask(0, "/workers")
        model = detail["workers"][0]["model"]
        question = [{"role": "user", "content": "What is the capital of France?"}]
        body = json.dumps({"model": model, "messages": question, "temperature": 0})
        public = self._url(config.host, config.port)
        ops = self._url(config.ops_host, config.ops_port)
        last = config.ops_port + config.num_gateways - 1
        others = "" if config.num_gateways == 1 else f"  (the other gateways: ports up to {last})"
        plural = "" if config.num_workers == 1 else "s"
        curl = f"curl{' --insecure' if config.tls else ''} {public}/v1/chat/completions"
        self._screen.say(
            f"ready in {time.monotonic() - self._started_s:.1f} s: {model} on {config.num_workers} worker{plural}\n\n"
            f"  OpenAI API  {public}/v1\n"
            f"  chat page   {ops}/chat\n"
            f"  dashboard   {ops}/dashboard{others}\n\n"
            f"  {curl} -H 'content-type: application/json' -d '{body}'\n\n"
            "Ctrl-C ends them all."
        )


def secret_options(folder: Path) -> list[str]:
    """Return the option for a cluster secret of this run, unless the environment has one."""
    if os.environ.get("HEADSTART_CLUSTER_SECRET"):
        return []
    path = folder / "cluster-secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return ["--cluster-secret-file", str(path)]


def main(argv: Sequence[str]) -> int:
    try:
        config = parse(argv)
        with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
            return asyncio.run(Supervisor(config, Path(folder)).run())
    except (ValueError, RedisMissingError, ChildRefusedError) as error:
        print(f"headstart serve: {error}", file=sys.stderr)
        return REFUSED
