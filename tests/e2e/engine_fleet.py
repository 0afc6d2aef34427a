"""Fake engines and a gateway as processes: a fleet over other people's engines."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.serving import free_ports
from tests.faults.fleet import Fleet
from tests.faults.part import ROOT, Gateway, Part
from tests.redis_server import RedisServer, newest_redis
from tests.waiting import HANG_S


class Program(Part):
    """A part that is a Python module of its own."""

    def __init__(self, name: str, port: int, log: Path, *command: str) -> None:
        super().__init__(name, port, log)
        self.command = [sys.executable, "-m", *command]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self.command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return 0 if self._process is None else self._process.poll()


class FakeEngine(Program):
    """An engine that publishes its cache events."""

    def __init__(self, name: str, folder: Path, model: Path) -> None:
        port, events, replay = free_ports(3)
        sockets = ["--events", f"tcp://127.0.0.1:{events}", "--replay", f"tcp://127.0.0.1:{replay}"]
        command = ["tests.fake_engine", str(model), "--port", str(port), *sockets]
        super().__init__(name, port, folder / f"{name}.log", *command)


class EngineFleet(Fleet):
    """Engines and one gateway. A test starts the adapters."""

    def __init__(self, folder: Path, *gateway_args: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        port, ops_port = free_ports(2)
        redis = RedisServer(folder, newest_redis())
        gateway = Gateway("g0", port, ops_port, folder / "g0.log", ["--redis", redis.url, *gateway_args])
        super().__init__(redis, [], [gateway])
        self.engines: dict[str, FakeEngine] = {}

    def add_engine(self, name: str, model: Path) -> FakeEngine:
        engine = FakeEngine(name, self.folder, model)
        self.engines[name] = engine
        return engine

    @property
    def parts(self) -> Iterator[Part]:
        yield from self.gateways
        yield from self.engines.values()

    def wait_ready(self) -> None:
        self.wait_for(0)

    def wait_for(self, num_workers: int) -> None:
        """Wait until the gateway counts `num_workers` live workers."""
        self._wait_until(lambda: self.gateway.num_ready() == num_workers)

    def post(self, body: dict[str, Any]) -> httpx.Response:
        return httpx.post(f"{self.gateway.url}/v1/completions", json=body, timeout=HANG_S)
