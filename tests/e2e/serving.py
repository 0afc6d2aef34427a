"""A real `headstart serve` for tests: started on free ports, waited for, and ended with all its children."""

from __future__ import annotations

import contextlib
import itertools
import os
import queue
import random
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
from openai import OpenAI

from tests.waiting import HANG_S

SMALL_POOL = "--num-blocks 4096"
"""For workers of a tiny model: to zero the gigabytes of the default pool costs each of them 3 s of processor time."""
READY = re.compile(r"headstart: ready in ([\d.]+) s")


# Below the kernel's range of ephemeral ports (32768 and up on Linux). So no connection of another test takes a port
# between the check here and the server's bind. Each process of a run has its own part of the range, and goes round in
# it: two fleets that start at the same time, in one process or in two, never share a port.
PORTS_PER_PROCESS = 2_000
FIRST_PORT = 20_000 + PORTS_PER_PROCESS * (int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 6)
_offsets = itertools.count(random.SystemRandom().randrange(PORTS_PER_PROCESS))


def resolves(name: str) -> bool:
    """Return whether the machine has the name: one without /etc/hosts has no `localhost`."""
    try:
        return bool(socket.getaddrinfo(name, None))
    except socket.gaierror:
        return False


def free_ports(count: int) -> list[int]:
    """Return adjacent ports that were free just before, none of them among the last that this process got."""
    ports: list[int] = []
    for offset in itertools.islice(_offsets, 2 * PORTS_PER_PROCESS):
        port = FIRST_PORT + offset % PORTS_PER_PROCESS
        if not is_free(port) or (ports and port != ports[-1] + 1):
            ports = []
        else:
            ports.append(port)
        if len(ports) == count:
            return ports
    raise OSError(f"no {count} adjacent free ports from {FIRST_PORT}")


def is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("127.0.0.1", port))
        return True
    return False


class Serve:
    """One running `headstart serve`; use it as a context manager."""

    def __init__(self, *args: str, env: dict[str, str] | None = None) -> None:
        self.port, self.ops_port = free_ports(2)
        self.lines: list[str] = []
        self._new_lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        command = [sys.executable, "-m", "server.cli", "serve"]
        self.process = subprocess.Popen(
            [*command, "--port", str(self.port), "--ops-port", str(self.ops_port), *args],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def ops_url(self) -> str:
        return f"http://127.0.0.1:{self.ops_port}"

    def __enter__(self) -> Serve:
        try:
            self.wait_for_line(READY)
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        code = self.stop()
        assert kind or code == 0, "\n".join([f"headstart serve ended with {code}", *self.lines])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """End it; returns the exit code. Asserts that no child outlives it."""
        family = self.family()
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            code = self.process.wait(timeout=HANG_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError("\n".join(["headstart serve did not stop", *self.lines])) from None
        finally:
            _, alive = psutil.wait_procs(family, timeout=HANG_S)
            for orphan in alive:
                orphan.kill()
        self._reader.join(timeout=HANG_S)
        assert self.process.stderr is not None
        self.process.stderr.close()
        assert not alive, f"orphans: {alive}"
        return code

    def family(self) -> list[psutil.Process]:
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def child(self, word: str) -> psutil.Process:
        """The one child that is called `word`, or has it as an argument."""
        for process in self.family():
            if process.name() == word or word in process.cmdline():
                return process
        raise AssertionError(f"no child {word!r} among {[p.cmdline() for p in self.family()]}")

    def epochs(self) -> dict[str, str]:
        """Return worker id to epoch, as the gateway reports them."""
        workers = httpx.get(f"{self.ops_url}/workers", timeout=HANG_S).json()["workers"]
        return {worker["worker_id"]: worker["epoch"] for worker in workers}

    def wait_for_line(self, pattern: re.Pattern[str], timeout_s: float = HANG_S) -> re.Match[str]:
        """The first match among the lines not yet waited over."""
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0:
            try:
                line = self._new_lines.get(timeout=left_s)
            except queue.Empty:
                break
            if line is None:
                raise AssertionError("\n".join(["headstart serve ended:", *self.lines]))
            if match := pattern.search(line):
                return match
        raise AssertionError("\n".join([f"no line matches {pattern.pattern!r} in {timeout_s} s:", *self.lines]))

    def _read(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.lines.append(line.rstrip())
            self._new_lines.put(line.rstrip())
        self._new_lines.put(None)

    def client(self, **options: Any) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=HANG_S, **options)

    def model(self) -> str:
        """Return the name of the model."""
        return str(httpx.get(f"{self.url}/v1/models", timeout=HANG_S).json()["data"][0]["id"])

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=HANG_S, **options)

    def wait_ready(self, num_workers: int, timeout_s: float = HANG_S) -> None:
        """Until the gateway counts `num_workers` live workers."""
        deadline_s = time.monotonic() + timeout_s
        detail: object = None
        while time.monotonic() < deadline_s:
            try:
                answer = httpx.get(f"{self.url}/health/ready", timeout=HANG_S)
                detail = answer.json()
                if answer.status_code == 200 and detail["workers"] == num_workers:
                    return
            except httpx.HTTPError as error:
                detail = error
            time.sleep(0.1)
        raise AssertionError("\n".join([f"not ready with {num_workers} workers: {detail}", *self.lines]))


def chat(
    serve: Serve, messages: Sequence[dict[str, Any]], *, model: str, max_tokens: int = 8, **options: Any
) -> httpx.Response:
    """One unstreamed, greedy chat completion; asserts 200."""
    body = {"model": model, "messages": list(messages), "max_tokens": max_tokens, "temperature": 0, **options}
    answer = serve.post("/v1/chat/completions", body)
    assert answer.status_code == 200, (answer.status_code, answer.text, serve.lines[-20:])
    return answer


def cached_tokens(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def trace_path(name: str) -> Path:
    return Path(__file__).parent.parent / "data" / name
