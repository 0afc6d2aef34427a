"""Fleets on free ports, each part of which a test may kill, stop, restart or cut off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from tests.e2e.serving import free_ports
from tests.faults.fleet import Fleet
from tests.faults.part import Gateway, Worker, metrics
from tests.faults.worker_process import Additions
from tests.redis_server import RedisServer, newest_redis

NUM_BLOCKS: Final = 8192
"""Blocks of a worker's pool unless a test sets another number: 64 MiB."""


@dataclass
class Topology:
    """The parts of a fleet."""

    num_workers: int = 2
    num_gateways: int = 1
    worker_args: Sequence[str] = ()
    gateway_args: Sequence[str] = ()
    gateway_module: str = "server.gateway"
    additions: Additions | None = None
    redis: bool = True
    """Started with the fleet; without it the tests may start it later."""
    static_workers: bool = True
    """Pass the workers' addresses to gateways, too."""
    redis_ports: tuple[int | None, int | None] = (None, None)
    """Where gateways and workers look for Redis, when that is not its own port: a proxy."""
    advertise: dict[int, int] = field(default_factory=dict)
    """Worker number to the port that it advertises: a proxy."""


class Cluster(Fleet):
    """On plain HTTP, and without keys."""

    def __init__(self, folder: Path, model: Path, topology: Topology | None = None) -> None:
        self.topology = t = topology or Topology()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        ports = free_ports(t.num_workers + 2 * t.num_gateways + 1)
        self.redis_port = ports.pop()
        binary = newest_redis()
        redis = RedisServer(folder, binary, "--port", str(self.redis_port))
        gateway_redis, worker_redis = (f"redis://127.0.0.1:{port or self.redis_port}" for port in t.redis_ports)
        common = ["--model", str(model), "--served-model-name", "tiny", "--redis", worker_redis, "--threads", "1"]
        common += ["--num-blocks", str(NUM_BLOCKS)]
        workers = []
        for number in range(t.num_workers):
            args = [*common, *t.worker_args]
            if number in t.advertise:
                args += ["--advertise-url", f"http://127.0.0.1:{t.advertise[number]}"]
            workers.append(self.worker(f"w{number}", ports.pop(), args, t.additions))
        gateway_args = ["--redis", gateway_redis, *t.gateway_args]
        if t.static_workers:
            urls = [f"http://127.0.0.1:{t.advertise.get(n, w.port)}" for n, w in enumerate(workers)]
            gateway_args += ["--workers", *urls]
        gateways = [
            Gateway(f"g{n}", ports.pop(), ports.pop(), folder / f"g{n}.log", gateway_args, t.gateway_module)
            for n in range(t.num_gateways)
        ]
        super().__init__(redis, workers, gateways, starts_redis=t.redis)

    def named(self, name: str) -> Worker:
        return next(worker for worker in self.workers if worker.name == name)

    def worker(self, name: str, port: int, args: Sequence[str], additions: Additions | None) -> Worker:
        return Worker(name, port, self.folder / f"{name}.log", args, additions)

    def wait_ready(self) -> None:
        """Wait until every live worker serves, and every live gateway has found all of them."""
        alive = [worker for worker in self.workers if worker.poll() is None]
        gateways = [gateway for gateway in self.gateways if gateway.poll() is None]

        def ready() -> bool:
            return all(worker.is_ready() for worker in alive) and all(g.num_ready() == len(alive) for g in gateways)

        self._wait_until(ready)

    # --- invariants -------------------------------------------------------------------------------------------------

    def census(self) -> dict[str, int]:
        """Return what each living part holds open: file descriptors and asyncio tasks."""
        counts: dict[str, int] = {}
        for part in self.parts:
            if part.poll() is not None:
                continue
            samples = metrics(part.ops_url if isinstance(part, Gateway) else part.url)
            prefix = "headstart" if isinstance(part, Gateway) else "headstart_worker"
            counts[f"{part.name} tasks"] = int(samples[f"{prefix}_asyncio_tasks"])
            counts[f"{part.name} fds"] = part.process.num_fds()
        return counts

    def quiet(self) -> str:
        """Return what is not at rest, or "": blocks neither free nor cached, requests, counters, load."""
        for worker in self.workers:
            if worker.poll() is not None:
                continue
            state = worker.debug()
            pool = state["pool"]
            if state["running"] or state["waiting"] or state["num_requests"]:
                return f"{worker.name} works: {state}"
            if pool["num_free_blocks"] != pool["num_blocks"] - 1:
                return f"{worker.name} has lost blocks: {pool}"
        for gateway in self.gateways:
            if gateway.poll() is None:
                samples = gateway.metrics()
                for name in ("headstart_requests_in_flight", "headstart_requests_booked"):
                    if samples[name]:
                        return f"{gateway.name}: {name} is {samples[name]}"
        return ""

    def assert_quiet(self, within_s: float = 5.0) -> None:
        """Assert that all work in the fleet ends within `within_s` of the processes' own seconds."""
        problem = ""

        def is_quiet() -> bool:
            nonlocal problem
            problem = self.quiet()
            return not problem

        self.stopwatch().wait_until(is_quiet, within_s, lambda: problem)

    def assert_census(self, before: dict[str, int], within_s: float = 30.0, slack: int = 3) -> None:
        """Assert that descriptors and tasks return to at most `before` plus `slack`; idle connections may end late."""
        grown: dict[str, tuple[int, int]] = {}

        def is_back() -> bool:
            grown.clear()
            for name, count in self.census().items():
                if count > before.get(name, 0) + slack:
                    grown[name] = before.get(name, 0), count
            return not grown

        self.stopwatch().wait_until(is_back, within_s, lambda: f"leaked: {grown}")
