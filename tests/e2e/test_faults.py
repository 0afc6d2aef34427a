"""`headstart serve` without its Redis, at its end, and after an end without warning. A tiny model, real processes."""

from __future__ import annotations

import re
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import psutil
import pytest

from tests.e2e.serving import READY, SMALL_POOL, Serve, chat
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.e2e
HI = [{"role": "user", "content": "Hi"}]

TUTORIAL: Final = Path(__file__).parents[2] / "docs" / "tutorial.md"


@pytest.fixture(scope="module")
def serve(tiny_model: Path) -> Iterator[Serve]:
    """One for all tests, each of which leaves it whole; the last one stops it."""
    with Serve("--model", str(tiny_model), "--worker-args", SMALL_POOL) as running:
        yield running


@pytest.fixture(scope="module")
def model(serve: Serve) -> str:
    return serve.model()


def test_redis_that_is_killed_comes_back(serve: Serve, model: str) -> None:
    """No request fails before that, nor after it."""
    redis = serve.child("redis-server")
    redis.kill()

    def is_back() -> bool:
        chat(serve, HI, model=model)
        return any(each.name() == "redis-server" and each.pid != redis.pid for each in serve.family())

    wait_until(is_back)


def test_the_tutorial_kills_one_worker(serve: Serve) -> None:
    """Its command is for the worker that it names, and for no other process of this `headstart serve`."""
    (pattern,) = re.findall(r'^pkill -9 -f "(.*)"$', TUTORIAL.read_text(encoding="utf-8"), re.MULTILINE)
    command = re.compile(pattern.replace("$PWD/.venv/bin/python", re.escape(sys.executable)))
    lines = [" ".join(process.cmdline()) for process in (psutil.Process(serve.process.pid), *serve.family())]
    assert [line for line in lines if command.search(line)] == [" ".join(serve.child("worker-0").cmdline())]


def test_stops_at_ctrl_c(tiny_model: Path) -> None:
    """At SIGTERM every server of these tests is seen to stop."""
    with Serve("--model", str(tiny_model), "--num-workers", "1", "--worker-args", SMALL_POOL) as running:
        assert len(running.family()) >= 3
        assert running.stop(signal.SIGINT) == 0


def test_the_next_start_deletes_what_a_killed_one_has_left(tiny_model: Path) -> None:
    """SIGKILL leaves no time for that. The parts end by themselves."""
    options = ["--model", str(tiny_model), "--num-workers", "1", "--worker-args", SMALL_POOL]
    with tempfile.TemporaryDirectory() as folder:  # a socket's path has at most 107 bytes
        _kill_and_start(options, Path(folder))


def _kill_and_start(options: list[str], folder: Path) -> None:
    variables = {"TMPDIR": str(folder)}
    killed = Serve(*options, env=variables)
    try:
        killed.wait_for_line(READY)
        family = killed.family()
    finally:
        assert killed.stop(signal.SIGKILL) == -signal.SIGKILL
    assert not psutil.wait_procs(family, timeout=HANG_S)[1]
    (left,) = folder.iterdir()
    with Serve(*options, env=variables):
        assert not left.exists()
    assert not list(folder.iterdir())


def test_a_model_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    serve = Serve("--model", str(tmp_path / "nothing.gguf"), "--num-workers", "1")
    serve.process.wait(timeout=HANG_S)
    assert serve.stop() == 2
    assert any("nothing.gguf" in line for line in serve.lines), serve.lines


def test_stops_while_requests_run(serve: Serve, model: str) -> None:
    """The last test of this module."""
    body = {"model": model, "messages": HI, "max_tokens": 400, "stream": True, "ignore_eos": True}
    with httpx.stream("POST", f"{serve.url}/v1/chat/completions", json=body, timeout=HANG_S) as response:
        next(response.iter_lines())
        assert serve.stop() == 0
