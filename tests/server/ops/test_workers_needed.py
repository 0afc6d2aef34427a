"""The number of workers that a model needs: from reports of workers and prefills of requests."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from cache.records import Candidate, WorkerLoad
from cache.types import HASH_BYTES, BlockHash
from server.ops.workers_needed import INTERVAL_S, SETTLE_S, SPREAD, WARM_UP_S, WorkersNeeded
from tests.members import make_member

ROOT = BlockHash(b"\0" * HASH_BYTES)


class Traffic:
    """Workers that report `offered` prefill seconds a second together, and requests of `prefill_s` each."""

    def __init__(self, num_workers: int, objective_s: float = 3.0) -> None:
        self.now_s = 100.0
        self.needed = WorkersNeeded(objective_s, lambda: self.now_s)
        self.members = [make_member(f"w{number}", epoch=f"e{number}") for number in range(num_workers)]
        self.assigned_s = dict.fromkeys(range(num_workers), 1000.0)
        self.held_s = 0.0

    def run(self, seconds: float, offered: float, **load: object) -> float:
        """Return the number of workers after these seconds; NaN while there is none."""
        for _ in range(int(seconds / INTERVAL_S)):
            self.now_s += INTERVAL_S
            for number in range(len(self.members)):
                self.assigned_s[number] += offered * INTERVAL_S / len(self.members)
            reports = [WorkerLoad(assigned_prefill_s=self.assigned_s[n], **load) for n in range(len(self.members))]  # type: ignore[arg-type]
            self.observe([Candidate(m, report, 0) for m, report in zip(self.members, reports, strict=True)])
        needed = self.needed.needed("m")
        return math.nan if needed is None else needed

    def observe(self, candidates: Sequence[Candidate]) -> None:
        self.needed.observe("m", candidates, self.held_s)


def test_a_new_gateway_has_no_number() -> None:
    traffic = Traffic(2)
    assert traffic.needed.needed("m") is None
    assert math.isnan(traffic.run(WARM_UP_S, 1.0))
    assert traffic.run(INTERVAL_S, 1.0) >= 1


def test_without_traffic_one_worker_is_needed() -> None:
    assert Traffic(5).run(300, 0.0) == 1


@pytest.mark.parametrize("num_workers", [4, 8, 16])
def test_the_number_follows_the_work_and_not_the_fleet(num_workers: int) -> None:
    few, many = Traffic(num_workers).run(600, 2.0), Traffic(num_workers).run(600, 8.0)
    assert few == math.ceil(2.0 + SPREAD * math.sqrt(2.0))
    assert many == math.ceil(8.0 + SPREAD * math.sqrt(8.0))


def test_it_rises_at_once_and_falls_slowly() -> None:
    traffic = Traffic(8)
    low, rising = traffic.run(600, 2.0), traffic.run(60, 6.0)
    assert rising > low
    high = traffic.run(3000, 6.0)
    traffic.run(SETTLE_S - INTERVAL_S, 0.0)
    assert traffic.needed.needed("m") == high
    assert traffic.run(1800, 0.0) == 1


def test_a_queue_and_held_requests_raise_it() -> None:
    quiet = Traffic(4).run(600, 2.0)
    queued = Traffic(4).run(600, 2.0, queued_prefill_s={"g": 60.0})
    held = Traffic(4)
    held.held_s = 240.0
    assert queued > quiet + 2
    assert held.run(600, 2.0) == queued


def test_with_a_queue_a_tighter_objective_needs_more() -> None:
    load = {"queued_prefill_s": {"g": 10.0}}
    tight, loose = Traffic(8, 0.6).run(600, 4.0, **load), Traffic(8, 20.0).run(600, 4.0, **load)
    assert tight > loose


def test_running_blocks_need_workers() -> None:
    assert Traffic(4).run(600, 0.0, num_blocks=100, num_free_blocks=2) == 5


def test_forged_reports_are_bounded() -> None:
    traffic = Traffic(3)
    traffic.run(120, 1.0)
    traffic.assigned_s = dict.fromkeys(range(3), 1e12)
    assert traffic.run(60, 1.0) == 12


def test_a_forged_pool_hides_no_full_one() -> None:
    traffic = Traffic(3)
    full, forged = WorkerLoad(num_blocks=100), WorkerLoad(num_blocks=1, num_free_blocks=1000)
    for _ in range(20):
        traffic.now_s += INTERVAL_S
        traffic.observe([Candidate(m, forged if m.worker_id == "w0" else full, 0) for m in traffic.members])
    assert traffic.needed.needed("m") == 3


def test_a_new_epoch_and_a_new_worker_add_no_work() -> None:
    """Their counters begin anywhere."""
    traffic = Traffic(2)
    before = traffic.run(600, 1.0)
    traffic.members = [make_member(f"w{number}", epoch="later") for number in range(3)]
    traffic.assigned_s = dict.fromkeys(range(3), 5e6)
    after = traffic.run(INTERVAL_S, 0.0)
    assert after <= before


async def test_a_model_without_workers_is_forgotten() -> None:
    traffic = Traffic(2)
    traffic.run(120, 1.0)
    router: Any = SimpleNamespace(fleet=SimpleNamespace(workers=list))
    following = asyncio.create_task(traffic.needed.follow(router))
    await asyncio.sleep(0)
    following.cancel()
    assert traffic.needed.needed("m") is None


def test_while_no_worker_lives_there_is_no_number() -> None:
    """A low number would shrink the fleet in the middle of an outage."""
    traffic = Traffic(4)
    assert traffic.run(600, 2.0) >= 1
    traffic.now_s += INTERVAL_S
    traffic.observe([])
    assert traffic.needed.needed("m") is None
    assert traffic.run(INTERVAL_S, 2.0) >= 1


def test_every_gateway_has_the_same_number() -> None:
    """The work comes from the workers' counters, which include all gateways."""
    early, late = Traffic(8), Traffic(8)
    early.run(1200, 5.0)
    late.run(600, 5.0)
    assert early.run(INTERVAL_S, 5.0) == late.run(INTERVAL_S, 5.0)
