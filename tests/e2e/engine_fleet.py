"""Fake engines, their adapters and a gateway as processes: a fleet over other people's engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from tests.e2e.serving import free_ports
from tests.faults.fleet import Fleet
from tests.faults.part import ROOT, Gateway, Part, Worker, get, metrics
from tests.redis_server import RedisServer, newest_redis
from tests.waiting import HANG_S, wait_until


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
    """With one adapter for each of its data-parallel ranks."""

    def __init__(
        self, name: str, folder: Path, model: Path, redis: str, *options: str, num_ranks: int = 1, kind: str = "vllm"
    ) -> None:
        # The ports of the ranks' events follow each other.
        port, events, *rest = free_ports(1 + 3 * num_ranks)
        replay, adapter_ports = rest[num_ranks - 1], rest[2 * num_ranks - 1 :]
        sockets = ["--events", f"tcp://127.0.0.1:{events}", "--replay", f"tcp://127.0.0.1:{replay}"]
        ranks = ["--ranks", str(num_ranks)] if kind == "vllm" else []
        module = "tests.fake_engine" if kind == "vllm" else f"tests.fake_engine.{kind}"
        command = [module, str(model), "--port", str(port), *sockets, *ranks, *options]
        super().__init__(name, port, folder / f"{name}.log", *command)
        key_file = folder / f"{name}.key"
        key_file.write_text(options[options.index("--api-key") + 1] if "--api-key" in options else "unused")
        self.adapters = [
            Program(
                f"{name}-{rank}",
                adapter_port,
                folder / f"{name}-{rank}.log",
                *("worker", "--engine", kind, "--engine-url", self.url, "--engine-key-file", str(key_file)),
                *("--worker-id", f"{name}-{rank}", "--host", "127.0.0.1", "--port", str(adapter_port)),
                *("--redis", redis, "--drain-grace-s", "0"),
                *(("--engine-rank", str(rank)) if num_ranks > 1 else ()),
            )
            for rank, adapter_port in enumerate(adapter_ports)
        ]

    def num_cached_tokens(self) -> int:
        """Return the cached tokens that the engine reports, of all its ranks, since its start."""
        found = metrics(self.url).items()
        return round(sum(value for name, value in found if name.startswith("vllm:prefix_cache_hits_total")))


class EngineFleet(Fleet):
    """Engines in front, adapters, own workers, and one gateway."""

    def __init__(self, folder: Path, *gateway_args: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        port, ops_port = free_ports(2)
        redis = RedisServer(folder, newest_redis())
        gateway = Gateway("g0", port, ops_port, folder / "g0.log", ["--redis", redis.url, *gateway_args])
        super().__init__(redis, [], [gateway])
        self.engines: dict[str, FakeEngine] = {}
        self.headers: dict[str, str] = {}
        """Headers of every `post`."""

    def add_engine(self, name: str, model: Path, *options: str, num_ranks: int = 1) -> FakeEngine:
        engine = FakeEngine(name, self.folder, model, self.redis.url, *options, num_ranks=num_ranks)
        self.engines[name] = engine
        return engine

    def add_sglang(self, name: str, model: Path, *options: str) -> FakeEngine:
        engine = FakeEngine(name, self.folder, model, self.redis.url, *options, kind="sglang")
        self.engines[name] = engine
        return engine

    def add_worker(self, name: str, *args: str) -> Worker:
        [port] = free_ports(1)
        worker = Worker(name, port, self.folder / f"{name}.log", ["--redis", self.redis.url, *args], None)
        self.workers.append(worker)
        return worker

    @property
    def adapters(self) -> list[Program]:
        return [adapter for engine in self.engines.values() for adapter in engine.adapters]

    @property
    def parts(self) -> Iterator[Part]:
        yield from self.gateways
        yield from self.engines.values()
        yield from self.adapters
        yield from self.workers

    @property
    def url(self) -> str:
        return self.gateway.url

    def wait_ready(self) -> None:
        self.wait_for(len(self.adapters) + len(self.workers))

    def wait_for(self, num_workers: int) -> None:
        """Wait until the gateway counts `num_workers` live workers."""
        self._wait_until(lambda: self.gateway.num_ready() == num_workers)

    def adapter(self, name: str) -> Program:
        return next(adapter for adapter in self.adapters if adapter.name == name)

    def engine_of(self, worker: str) -> FakeEngine:
        return self.engines[worker.rpartition("-")[0]]

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, headers=self.headers, timeout=HANG_S)

    def num_held(self, adapter: Program) -> int:
        """Return the number of the engine's blocks, as its adapter counts them."""
        return int(json.loads(get(f"{adapter.url}/debug/state"))["blocks"]["held"])

    def wait_settled(self) -> None:
        """Until no request is at any adapter."""
        for adapter in self.adapters:
            if adapter.poll() is None:
                wait_until(lambda a=adapter: json.loads(get(f"{a.url}/debug/state"))["num_requests"] == 0)
