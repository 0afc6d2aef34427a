"""The main job survives Redis gone and back, and a worker killed. A tiny model, real processes."""

from __future__ import annotations

import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import httpx
import psutil
import pytest

from tests.e2e.serving import READY, SMALL_POOL, Serve, cached_tokens, chat
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.e2e

TUTORIAL: Final = Path(__file__).parents[2] / "docs" / "tutorial.md"


@pytest.fixture(scope="module")
def serve(tiny_model: Path) -> Iterator[Serve]:
    """One for all tests, each of which leaves it whole; the last one stops it."""
    with Serve("--model", str(tiny_model), "--worker-args", SMALL_POOL) as running:
        yield running


@pytest.fixture(scope="module")
def model(serve: Serve) -> str:
    return serve.model()


class Load:
    """Requests one after another on several threads until stopped; keeps every status, 0 for a broken connection."""

    def __init__(self, serve: Serve, model: str, num_threads: int = 3) -> None:
        self._serve, self._model = serve, model
        self._stop = threading.Event()
        self.statuses: list[int] = []
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(num_threads)]

    def __enter__(self) -> Load:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        for thread in self._threads:
            thread.join()

    def _run(self, index: int) -> None:
        turn = 0
        while not self._stop.is_set():
            turn += 1
            body = {"model": self._model, "messages": [{"role": "user", "content": f"{index} {turn} " * 30}]}
            try:
                status = self._serve.post("/v1/chat/completions", body | {"max_tokens": 8}).status_code
            except httpx.HTTPError:
                status = 0
            self.statuses.append(status)

    def stop(self) -> None:
        self._stop.set()


def long_conversation(turns: int) -> list[dict[str, str]]:
    roles = ("user", "assistant")
    return [{"role": roles[turn % 2], "content": f"Sentence number {turn}. " * 20} for turn in range(2 * turns - 1)]


def test_redis_killed_and_restarted_under_load(serve: Serve, model: str) -> None:
    redis = serve.child("redis-server")
    with Load(serve, model) as load:
        _wait_for_statuses(load, 5)
        redis.send_signal(signal.SIGSTOP)  # first unresponsive,
        seen = len(load.statuses)
        _wait_for_statuses(load, seen + 10)
        redis.kill()  # then gone; the supervisor starts another, empty one
        seen = len(load.statuses)
        _wait_for_statuses(load, seen + 10)
    assert set(load.statuses) == {200}
    wait_until(lambda: _is_prefix_routed(serve, model))


def _is_prefix_routed(serve: Serve, model: str) -> bool:
    """Return whether the index promises a later turn its prefix, and the turn finds it."""
    marker = f"{time.monotonic()} "
    first, second = long_conversation(1), long_conversation(2)
    for messages in (first, second):
        messages[0] = {"role": "user", "content": marker + messages[0]["content"]}
    worker = chat(serve, first, model=model, max_tokens=1).headers["x-headstart-worker"]
    time.sleep(0.3)  # longer than a publish takes, so that the index has it, not only the gateway's memory
    answer = chat(serve, second, model=model, max_tokens=1)
    promised = int(answer.headers["x-headstart-cached-tokens"])
    return answer.headers["x-headstart-worker"] == worker and promised > 0 and cached_tokens(answer) > 0


def test_restarted_worker_is_not_credited_with_lost_blocks(serve: Serve, model: str) -> None:
    first = chat(serve, long_conversation(2), model=model)
    epochs = serve.epochs()
    for worker in [serve.child(name) for name in epochs]:
        worker.kill()
    _wait_for_new_epochs(serve, epochs)
    second = chat(serve, long_conversation(2), model=model)
    assert first.json()["choices"][0]["message"] == second.json()["choices"][0]["message"]
    assert cached_tokens(second) == 0
    assert int(second.headers["x-headstart-cached-tokens"]) == 0


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
    with Load(serve, model) as load:
        _wait_for_statuses(load, 1)
        assert serve.stop() == 0


def _wait_for_new_epochs(serve: Serve, old: dict[str, str]) -> None:
    """Until every worker of `old` is known again, under another epoch."""

    def all_are_new() -> bool:
        now = serve.epochs()
        return all(now.get(worker, epoch) != epoch for worker, epoch in old.items())

    wait_until(all_are_new, what=f"{old} are new: {serve.lines[-20:]}")


def _wait_for_statuses(load: Load, count: int) -> None:
    wait_until(lambda: len(load.statuses) >= count)
