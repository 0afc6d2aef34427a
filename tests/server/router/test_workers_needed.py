"""The number of workers that a model needs: from reports of workers and prefills of requests."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest

from cache.hashing import hash_chain
from cache.records import Candidate, WorkerLoad
from cache.types import HASH_BYTES, BlockHash
from server.router.placement import Placement
from server.router.reuse_ages import MAX_BLOCKS, ReuseAges
from server.router.workers_needed import INTERVAL_S, SETTLE_S, WARM_UP_S, WorkersNeeded, late_share
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

    def run(self, seconds: float, offered: float, prefill_s: float = 0.5, **load: object) -> int | None:
        for _ in range(int(seconds / INTERVAL_S)):
            self.now_s += INTERVAL_S
            for number in range(len(self.members)):
                self.assigned_s[number] += offered * INTERVAL_S / len(self.members)
            if offered:
                self.request(prefill_s)
            reports = [WorkerLoad(assigned_prefill_s=self.assigned_s[n], **load) for n in range(len(self.members))]  # type: ignore[arg-type]
            self.observe([Candidate(m, report, 0) for m, report in zip(self.members, reports, strict=True)])
        return self.needed.needed("m")

    def observe(self, candidates: Sequence[Candidate]) -> None:
        self.needed.observe({"m": candidates}, lambda _: self.held_s)

    def request(self, prefill_s: float, ttft_s: float = 0.5, numerics: str | None = None) -> None:
        placement = SimpleNamespace(
            request=SimpleNamespace(model="m", hashes=(), numerics=numerics),
            worker=SimpleNamespace(block_size=16),
            active=SimpleNamespace(prefill_s=prefill_s),
        )
        self.needed.started(cast(Placement, placement), 0)
        self.needed.first_token(cast(Placement, placement), ttft_s)


def test_a_new_gateway_has_no_number() -> None:
    traffic = Traffic(2)
    assert traffic.needed.needed("m") is None
    assert traffic.run(WARM_UP_S, 1.0) is None
    assert traffic.run(INTERVAL_S, 1.0) is not None


def test_without_traffic_one_worker_is_needed() -> None:
    assert Traffic(5).run(300, 0.0) == 1


@pytest.mark.parametrize("num_workers", [4, 8, 16])
def test_the_number_follows_the_work_and_not_the_fleet(num_workers: int) -> None:
    few, many = Traffic(num_workers).run(600, 2.0), Traffic(num_workers).run(600, 8.0)
    assert few is not None
    assert many is not None
    assert 3 <= few <= 4
    assert 9 <= many <= 11


def test_it_rises_at_once_and_falls_slowly() -> None:
    traffic = Traffic(8)
    low, rising = traffic.run(600, 2.0), traffic.run(60, 6.0)
    assert low is not None
    assert rising is not None
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
    assert quiet is not None
    assert queued is not None
    assert queued > quiet + 2
    assert held.run(600, 2.0) == queued


def test_a_tighter_objective_needs_more() -> None:
    tight, loose = Traffic(8, 0.6).run(600, 4.0), Traffic(8, 6.0).run(600, 4.0)
    assert tight is not None
    assert loose is not None
    assert tight > loose


def test_an_objective_below_the_prefill_has_a_number() -> None:
    """Every request misses it without any wait: more workers do not help."""
    number = Traffic(8, 0.1).run(600, 4.0)
    assert number is not None
    assert 5 <= number <= 32


def test_running_blocks_need_workers() -> None:
    assert Traffic(4).run(600, 0.0, num_blocks=100, num_free_blocks=2) == 5


def test_forged_reports_are_bounded() -> None:
    traffic = Traffic(3)
    traffic.run(120, 1.0)
    traffic.assigned_s = dict.fromkeys(range(3), 1e12)
    assert traffic.run(60, 1.0) == 12


@pytest.mark.parametrize(("numerics", "is_raised"), [(None, True), ("class", False)])
def test_minutes_that_miss_the_objective_raise_it(numerics: str | None, is_raised: bool) -> None:
    """A request for the rest of an answer has had its first token before: it does not count."""
    prompt, late = Traffic(8), Traffic(8)
    for _ in range(10):
        prompt.run(60, 4.0)
        late.run(60, 4.0)
        for _ in range(20):
            late.request(0.5, 4.0, numerics)
    before, after = prompt.run(60, 4.0), late.run(60, 4.0)
    assert before is not None
    assert after is not None
    assert (after > before) == is_raised


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
    assert before is not None
    assert after is not None
    assert after <= before


def test_a_model_without_workers_is_forgotten() -> None:
    traffic = Traffic(2)
    traffic.run(120, 1.0)
    traffic.needed.observe({}, lambda _: 0.0)
    assert traffic.needed.needed("m") is None


def test_while_no_worker_lives_there_is_no_number() -> None:
    """A low number would shrink the fleet in the middle of an outage."""
    traffic = Traffic(4)
    assert traffic.run(600, 2.0) is not None
    traffic.now_s += INTERVAL_S
    traffic.observe([])
    assert traffic.needed.needed("m") is None
    assert traffic.run(INTERVAL_S, 2.0) is not None


def test_every_gateway_has_the_same_number() -> None:
    """The work comes from the workers' counters, which include all gateways: a gateway with few requests has it too."""
    busy, quiet = Traffic(8), Traffic(8)
    busy.run(600, 5.0)
    quiet.run(600, 5.0)
    for _ in range(100):
        busy.request(0.5)
    assert busy.run(INTERVAL_S, 5.0) == quiet.run(INTERVAL_S, 5.0)


@pytest.mark.parametrize("num_workers", [1, 4])
def test_the_late_share_is_that_of_a_queue(num_workers: int) -> None:
    """Exponential prefills and arrivals: the formula is exact without the prefill, P(wait > t)."""
    offered, rng = 0.7 * num_workers, random.Random(1)
    expected = late_share(num_workers, offered, 2.0, [0.0], 1.5)
    free_s, now_s, num_late = [0.0] * num_workers, 0.0, 0
    for _ in range(60_000):
        now_s += rng.expovariate(offered)
        at = min(range(num_workers), key=free_s.__getitem__)
        start_s = max(now_s, free_s[at])
        num_late += start_s - now_s > 1.5
        free_s[at] = start_s + rng.expovariate(1.0)
    assert num_late / 60_000 == pytest.approx(expected, rel=0.15)


def test_the_late_share_is_a_number_at_its_ends() -> None:
    assert late_share(3, 0.0, 1.0, [0.5], 1.0) == 0.0
    assert late_share(3, 3.0, 1.0, [0.5], 1.0) == 1.0
    assert late_share(3, 1.0, 1.0, [2.0], 1.0) == 1.0


def chains(num: int) -> list[list[BlockHash]]:
    return [hash_chain(ROOT, [number] * 4, 1) for number in range(num)]


def test_a_larger_cache_finds_what_comes_back_a_little_later() -> None:
    """Blocks that come back after 12 s are found, after 24 s they are not: twice the workers find both."""
    ages = ReuseAges()
    for number, chain in enumerate(chains(200)):
        later_s = 12.0 if number % 2 else 24.0
        ages.add(chain, 0, 256, number * 100.0)
        ages.add(chain, 4 if number % 2 else 0, 256, number * 100.0 + later_s)
    assert ages.missed_ratio(1.0) == 1.0
    assert ages.missed_ratio(2.0) == pytest.approx(2 / 3)  # 800 blocks are new, 400 come back too late
    assert ages.missed_ratio(0.5) == pytest.approx(4 / 3)
    assert 1.0 > ages.missed_ratio(1.25) > ages.missed_ratio(1.5) > ages.missed_ratio(2.0)


def test_what_never_comes_back_changes_nothing() -> None:
    ages = ReuseAges()
    for at, chain in enumerate(chains(100)):
        ages.add(chain, 0, 256, float(at))
    assert [ages.missed_ratio(scale) for scale in (0.25, 1.0, 4.0)] == [1.0, 1.0, 1.0]


def test_remembered_blocks_are_bounded() -> None:
    ages = ReuseAges()
    rng = random.Random(1)
    for at in range(100):
        ages.add([BlockHash(rng.randbytes(HASH_BYTES)) for _ in range(1000)], 0, 256, float(at))
    assert MAX_BLOCKS / 4 < len(ages._seen_s) <= MAX_BLOCKS
    assert math.isfinite(ages.missed_ratio(2.0))


def test_after_weeks_recent_blocks_are_still_counted() -> None:
    """Every prompt is new, and comes again a minute later. Blocks of the days before make room."""
    ages = ReuseAges()
    rng = random.Random(1)
    for day in range(60):
        for at in range(20):
            hashes = [BlockHash(rng.randbytes(HASH_BYTES)) for _ in range(500)]
            now_s = 86_400.0 * day + 100.0 * at
            ages.add(hashes, 0, 256, now_s)
            ages.add(hashes, 500, 256, now_s + 60.0)
        ages.fade(0.0 if day < 59 else 1.0)
    assert sum(ages._all) >= 20_000 / 4
    assert sum(ages._cached) == sum(ages._all) / 2
