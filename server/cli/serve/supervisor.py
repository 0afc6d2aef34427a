"""Starts the parts in order, says when they are ready, keeps them alive, and ends them all within seconds."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import secrets
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

import aiohttp

from server.cli.serve.child import Child, ChildSpec
from server.cli.serve.redis import find_redis_server, redis_command, redis_url, socket_path
from server.cli.serve.screen import Screen

if TYPE_CHECKING:
    from server.cli.serve.command import ServeConfig

STOP_GRACE_S: Final = 3.5
"""Every child is gone 5 s after Ctrl-C: this much for SIGTERM, the rest for SIGKILL and for Redis."""
REDIS_GRACE_S: Final = 1.0
DRAIN_GRACE_S: Final = 2.0
"""What the gateway and the workers may spend of it on open requests."""
POLL_S: Final = 0.1
REDIS: Final = "redis"


class Supervisor:
    """Owner of all children of one `headstart serve`."""

    def __init__(self, config: ServeConfig) -> None:
        self._config = config
        self._started_s = time.monotonic()
        self._children: list[Child] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._stop_requested = asyncio.Event()
        self._secret_options: list[str] = []
        self._screen = Screen(sys.stderr, config.num_workers)

    async def run(self) -> int:
        """Serve until SIGINT or SIGTERM. Returns the exit code. Raises RedisMissingError and ChildRefusedError."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._stop_requested.set)
        with tempfile.TemporaryDirectory(prefix="headstart-") as folder:
            self._secret_options = secret_options(Path(folder))
            starting = asyncio.create_task(self._start(Path(folder)))
            starting.add_done_callback(self._stop_on_error)
            drawing = asyncio.create_task(self._screen.run())
            try:
                await self._stop_requested.wait()
                self._screen.ready()
                self._screen.say("stopping ...")
            finally:
                starting.cancel()
                await asyncio.gather(starting, drawing, return_exceptions=True)
                await self._stop()
        for task in (starting, *self._tasks):
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        self._screen.say("stopped")
        return 0

    async def _start(self, folder: Path) -> None:
        config = self._config
        url = config.redis_url
        if url is None:
            url = redis_url(folder)
            await self._spawn(self._redis_spec(folder)).ready.wait()
        plural = "" if config.num_workers == 1 else "s"
        self._screen.stage(f"loading the model on {config.num_workers} worker{plural}")
        workers = [self._spawn(self._worker_spec(index, url)) for index in range(config.num_workers)]
        gateway = self._spawn(self._gateway_spec(url))
        for child in (*workers, gateway):
            await child.ready.wait()
        await _until(self._serves_all_workers)
        self._screen.ready()
        await self._announce()

    def _spawn(self, spec: ChildSpec) -> Child:
        child = Child(spec, self._screen.say)
        self._children.append(child)
        task = asyncio.create_task(child.run(), name=spec.name)
        task.add_done_callback(self._stop_on_error)
        self._tasks.append(task)
        return child

    def _stop_on_error(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._stop_requested.set()

    async def _stop(self) -> None:
        """Redis last, so that nobody misses it."""
        parts = [child for child in self._children if child.spec.name != REDIS]
        await asyncio.gather(*(child.stop(STOP_GRACE_S) for child in parts))
        await asyncio.gather(*(child.stop(REDIS_GRACE_S) for child in self._children))
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _redis_spec(self, folder: Path) -> ChildSpec:
        path = socket_path(folder)

        async def answers() -> bool:
            with contextlib.suppress(OSError):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(b"PING\r\n")
                try:
                    return await reader.readline() == b"+PONG\r\n"
                finally:
                    writer.close()
            return False

        command = redis_command(find_redis_server(), folder)
        return ChildSpec(REDIS, command, self._screen.relay(REDIS), lambda: _until(answers), quiet=True)

    def _worker_spec(self, index: int, url: str) -> ChildSpec:
        config = self._config
        name = f"worker-{index}"
        command = [sys.executable, "-m", "worker", "--worker-id", name, "--host", "127.0.0.1", "--port", "0"]
        command += ["--redis", url, "--threads", str(config.threads), "--drain-grace-s", str(DRAIN_GRACE_S)]
        command += ["--local-rank", str(index), "--local-world-size", str(config.num_workers)]
        if config.model is not None:
            command += ["--model", config.model]
        return ChildSpec(name, [*command, *self._secret_options, *config.worker_args], self._screen.relay(name))

    def _gateway_spec(self, url: str) -> ChildSpec:
        config = self._config
        command = [sys.executable, "-m", "server.gateway", "--host", config.host, "--port", str(config.port)]
        command += ["--ops-port", str(config.ops_port), "--redis", url, "--drain-grace-s", str(DRAIN_GRACE_S)]
        command += [*self._secret_options, *config.gateway_args]
        return ChildSpec("gateway", command, self._screen.relay("gateway"))

    async def _serves_all_workers(self) -> bool:
        """The gateway is ready and knows every worker."""
        async with self._session() as session:
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, ValueError):
                async with session.get(f"{self._public_url}/health/ready") as answer:
                    detail = await answer.json(content_type=None)
                    return answer.status == 200 and int(detail.get("workers", 0)) >= self._config.num_workers
        return False

    async def _announce(self) -> None:
        async with self._session() as session, session.get(f"{self._public_url}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        body = json.dumps(
            {
                "model": model,
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
            }
        )
        insecure = " --insecure" if self._config.tls else ""
        scheme, host = urlsplit(self._public_url).scheme, urlsplit(self._public_url).hostname
        curl = f"curl{insecure} {self._public_url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'"
        self._screen.say(
            f"ready in {time.monotonic() - self._started_s:.1f} s: {model} on {self._config.num_workers} workers\n\n"
            f"  OpenAI API  {self._public_url}/v1\n"
            f"  chat page   {scheme}://{host}:{self._config.ops_port}/chat\n"
            f"  dashboard   {scheme}://{host}:{self._config.ops_port}/dashboard\n\n"
            f"  {curl}\n\n"
            "Ctrl-C ends them all."
        )

    def _session(self) -> aiohttp.ClientSession:
        """For our own gateway on this machine: its certificate is for the names that others use."""
        connector = aiohttp.TCPConnector(ssl=False)
        return aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=2))

    @property
    def _public_url(self) -> str:
        host = self._config.host
        scheme = "https" if self._config.tls else "http"
        return f"{scheme}://{'127.0.0.1' if host in ('0.0.0.0', '::') else host}:{self._config.port}"


def secret_options(folder: Path) -> list[str]:
    """What makes workers and gateway trust each other: the user's secret by the environment, else one for this run."""
    if os.environ.get("HEADSTART_CLUSTER_SECRET"):
        return []
    path = folder / "cluster-secret"
    path.touch(mode=0o600)
    path.write_text(secrets.token_hex(32))
    return ["--cluster-secret-file", str(path)]


async def _until(condition: Callable[[], Awaitable[bool]]) -> None:
    """Poll until the condition holds; the caller bounds the time by cancelling."""
    while not await condition():  # noqa: ASYNC110 - what is awaited happens in another process
        await asyncio.sleep(POLL_S)
