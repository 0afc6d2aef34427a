"""One process of a fleet, gateway or worker, and what it can be asked."""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, Final

import psutil
from prometheus_client.parser import text_string_to_metric_families

from tests.faults import worker_process
from tests.faults.worker_process import Additions
from tests.waiting import HANG_S
from tests.waiting import wait_until as wait_until

ROOT: Final = Path(__file__).parents[2]
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.faults.worker_process"])


def get(url: str, timeout_s: float = HANG_S) -> bytes:
    """Raises OSError, which an HTTP status of 400 and more is, too."""
    try:
        with urllib.request.urlopen(url, timeout=timeout_s) as response:
            body: bytes = response.read()
            return body
    except urllib.error.HTTPError as error:
        error.close()  # it holds the connection
        raise


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

    def wait(self, timeout_s: float = HANG_S) -> int:
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
    def __init__(
        self, name: str, port: int, ops_port: int, log: Path, args: Sequence[str], module: str = "server.gateway"
    ) -> None:
        super().__init__(name, port, log)
        self.ops_port = ops_port
        self.args = list(args)
        self._module = module
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def ops_url(self) -> str:
        return f"http://127.0.0.1:{self.ops_port}"

    def start(self) -> None:
        command = [sys.executable, "-m", self._module, "--port", str(self.port), "--ops-port", str(self.ops_port)]
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
