"""A gateway, a worker and an adapter whose event loops hang end themselves, and `headstart serve` starts them again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.serving import SMALL_POOL, Serve, chat, free_ports
from tests.e2e.test_engines import engine, with_events
from tests.waiting import wait_until
from worker.common.watchdog import MAX_MISSED, TICK_S

pytestmark = pytest.mark.e2e
HANGS_AT_A_SIGNAL = """
import signal, threading

def hang(*_):
    threading.Event().wait()

signal.signal(signal.SIGUSR1, hang)
"""
"""A `sitecustomize` for every Python process under `serve`: the main thread, which runs the loop, hangs at SIGUSR1.

It waits, which costs no processor time. The watchdog's own tests hang in a busy loop too.
"""
WORDS = ("server.gateway", "worker-0", "engine-0")


def test_hung_loops_end_and_come_back(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(HANGS_AT_A_SIGNAL)
    ports = free_ports(3)
    with (
        engine(tiny_model, ports[0], "--model", "other", *with_events(*ports[1:])),
        Serve(
            *("--model", str(tiny_model), "--num-workers", "1", "--worker-args", SMALL_POOL),
            *("--engine-url", f"http://127.0.0.1:{ports[0]}"),
            env={"PYTHONPATH": str(tmp_path)},
        ) as serve,
    ):
        before = {word: serve.child(word) for word in WORDS}
        for child in before.values():
            child.send_signal(signal.SIGUSR1)
        begun_s = time.monotonic()
        gone, alive = psutil.wait_procs(list(before.values()), timeout=120.0)
        assert len(gone) == len(WORDS), alive
        assert MAX_MISSED * TICK_S < 30.0
        assert time.monotonic() - begun_s > MAX_MISSED * TICK_S / 2, "they ended for another reason"
        for name, kind in (("gateway", "gateway"), ("worker-0", "worker"), ("engine-0", "worker")):
            line = f"[{name}] headstart {kind}: its event loop has not run for"
            wait_until(lambda line=line: any(line in said for said in serve.lines))
        serve.wait_ready(2)
        for model in ("other", tiny_model.name):
            chat(serve, [{"role": "user", "content": "Hello"}], model=model)
