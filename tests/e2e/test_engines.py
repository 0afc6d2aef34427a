"""`headstart serve --engine-url`: gateway, Redis and adapters in front of engines that run already."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.serving import READY, Serve, cached_tokens, chat, free_ports
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.e2e

LONG = [{"role": "user", "content": "A dragon and a knight meet in a castle and talk about the weather. " * 8}]


@contextmanager
def engine(folder: Path, port: int, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """A fake engine of its own process, which answers before this begins."""
    process = subprocess.Popen([sys.executable, "-m", "tests.fake_engine", str(folder), "--port", str(port), *options])
    try:
        wait_until(lambda: is_up(port))
        yield process
    finally:
        process.kill()
        process.wait(timeout=HANG_S)


def is_up(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=HANG_S).status_code == 200
    except httpx.TransportError:
        return False


def with_events(*ports: int) -> list[str]:
    events, replay = (f"tcp://127.0.0.1:{port}" for port in ports)
    return ["--events", events, "--replay", replay]


def workers(serve: Serve) -> dict[str, Any]:
    listed = httpx.get(f"{serve.ops_url}/workers", timeout=HANG_S).json()["workers"]
    return {worker["worker_id"]: worker for worker in listed}


def test_two_engines_serve_and_outlive_ctrl_c(tiny_model: Path) -> None:
    ports = free_ports(6)
    urls = [part for port in ports[:2] for part in ("--engine-url", f"http://127.0.0.1:{port}")]
    with (
        engine(tiny_model, ports[0], *with_events(*ports[2:4])) as first,
        engine(tiny_model, ports[1], *with_events(*ports[4:])) as second,
    ):
        with Serve(*urls) as serve:
            assert any("tiny on 2 engines" in line for line in serve.lines)
            assert any("but not the engines" in line for line in serve.lines) or serve.wait_for_line(
                re.compile("but not the engines")
            )
            assert set(workers(serve)) == {"engine-0", "engine-1"}
            cold = chat(serve, LONG, model="tiny")
            assert cached_tokens(cold) == 0

            def promised() -> int:
                answer = serve.post("/v1/chat/completions", {"model": "tiny", "messages": LONG, "max_tokens": 2})
                return int(answer.headers["x-headstart-cached-tokens"])

            assert wait_until(promised) >= 32
            again = chat(serve, LONG, model="tiny")
            assert cached_tokens(again) >= 32
            assert again.headers["x-headstart-worker"] == cold.headers["x-headstart-worker"]
            assert serve.stop(signal.SIGINT) == 0
        assert (first.poll(), second.poll()) == (None, None)
        assert is_up(ports[0])
        assert is_up(ports[1])


def test_it_waits_for_an_engine(tiny_model: Path) -> None:
    """It serves all ranks of the engines, with or without cache events."""
    *ports, events, _ = free_ports(4)
    ranks = ["--ranks", "2", "--events", f"tcp://127.0.0.1:{events}"]
    urls = [part for port in ports for part in ("--engine-url", f"http://127.0.0.1:{port}")]
    with engine(tiny_model, ports[0]):
        serve = Serve(*urls)
        try:
            serve.wait_for_line(re.compile(f"WARNING: http://127.0.0.1:{ports[0]} publishes no cache events"))
            if not any(f"waiting for the engine at http://127.0.0.1:{ports[1]}" in line for line in serve.lines):
                serve.wait_for_line(re.compile(f"waiting for the engine at http://127.0.0.1:{ports[1]}"))
            with engine(tiny_model, ports[1], *ranks):
                serve.wait_for_line(READY)
                assert set(workers(serve)) == {"engine-0", "engine-1-rank-0", "engine-1-rank-1"}
                chat(serve, LONG, model="tiny")
                assert serve.stop() == 0
        finally:
            serve.stop()


def test_an_engine_that_cannot_be_served_ends_the_command(tiny_model: Path) -> None:
    port = free_ports(1)[0]
    with engine(tiny_model, port, "--api-key", "k1"):
        serve = Serve("--engine-url", f"http://127.0.0.1:{port}")
        assert serve.process.wait(timeout=HANG_S) == 2
        serve.stop()
    assert any("--engine-key-file" in line for line in serve.lines)
