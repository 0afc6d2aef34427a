"""A model whose threads get fewer processors than they expect: an answer takes more time, and never collapses."""

from __future__ import annotations

import os

import psutil
import pytest

from benchmarks.dev.gateway_load.processes import cpu_s
from benchmarks.dev.tiers_load.worker import BenchWorker

NUM_TOKENS = 12
pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux"),
]


def test_threads_that_share_a_core_do_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads of a model meet at each product. On one core, one of them always waits for the other.

    The processor time is that of one thread, and a little for each wait. It grows 20 times if the threads spin.
    """
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    spent = []
    for num_threads in ("1", "2"):
        with BenchWorker(["--threads", num_threads, "--num-blocks", "64"]) as worker:
            spent.append(used(worker))
    assert spent[1] < 3.0 * spent[0]


def used(worker: BenchWorker) -> float:
    core = min(os.sched_getaffinity(0))
    for thread in psutil.Process(worker.pid).threads():
        os.sched_setaffinity(thread.id, {core})
    worker.ask([1, 2, 3], 4)
    begun_s = cpu_s(worker.pid)
    worker.ask([4, 5, 6], NUM_TOKENS)
    return cpu_s(worker.pid) - begun_s
