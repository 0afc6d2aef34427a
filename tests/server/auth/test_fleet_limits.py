"""Limits of keys over gateways, in simulated time: what clients get, and that no Redis makes it more than N times."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator

import pytest

from cache.redis_index import LEASE_S
from server.auth.limits import Allowance, KeyUsage, utc_s
from server.rates import TokenBucket
from tests.server.auth.limits_machine import FAULTS, SOUND, Fleet, done, entry

APART_S = (0.0, 600.0, -600.0, 60.0)
"""Wall clocks of gateways."""


def arrivals(per_s: float, seconds: float, rng: random.Random) -> Iterator[float]:
    at_s = rng.expovariate(per_s)
    while at_s < seconds:
        yield at_s
        at_s += rng.expovariate(per_s)


@pytest.mark.parametrize("num_gateways", [2, 3, 4])
def test_a_calm_fleet_grants_its_limit(num_gateways: int) -> None:
    """Whatever the demand, the mix of gateways, their clocks, and restarts: what one gateway would grant."""
    for seed in range(12):
        rng = random.Random(seed)
        limit, seconds = rng.choice((6, 60, 600, 3000)), 120.0
        demand = rng.choice((0.5, 0.95, 1.2, 3.0))
        fleet = Fleet(num_gateways, entry(requests_per_minute=limit), seed, APART_S)
        mix = [rng.random() ** 3 + 0.001 for _ in range(num_gateways)]
        single, expected, times = TokenBucket(limit / 60.0, limit), 0, list[float]()
        for at_s in arrivals(demand * limit / 60.0, seconds, rng):
            fleet.advance(40_000.0 + at_s - fleet.now_s)
            expected += not single.take(at_s)
            if rng.random() < 0.02:
                fleet.restart(rng.randrange(num_gateways))
            if fleet.asks(rng.choices(range(num_gateways), mix)[0]):
                times.append(at_s)
        assert len(times) >= 0.97 * expected - 1, seed
        assert_within(times, limit, limit + 1e-6)


def assert_within(times: list[float], limit: float, most: float) -> None:
    """Assert that no span has more grants than `most` and what refills in it."""
    lowest = float("inf")
    for number, at_s in enumerate(times):
        ahead = number - at_s * limit / 60.0
        lowest = min(lowest, ahead)
        assert ahead + 1 - lowest <= most, (number, at_s)


class Episode:
    """Gateways come and go and are used, while Redis is sound, faulty or hostile in turn."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.num_gateways = rng.randint(2, 4)
        self.limit, self.streams, self.budget = rng.choice((6, 60, 600)), rng.randint(1, 40), rng.choice((100, 1000))
        limits = {"requests_per_minute": self.limit, "max_streams": self.streams, "tokens_per_day": self.budget}
        self.fleet = Fleet(self.num_gateways, entry(**limits), seed, APART_S)
        self.times: list[float] = []
        self.num_tokens = 0
        self.num_restarts = 0

    def run(self) -> None:
        for _ in range(self.rng.randint(5, 15)):
            self.fleet.server.fault = self.rng.choice((SOUND, *FAULTS))
            if self.rng.random() < 0.2:
                self.fleet.restart(self.rng.randrange(self.num_gateways))
                self.num_restarts += 1
            if self.rng.random() < 0.1:
                self.fleet.server.clock_s = self.rng.choice((-600.0, 0.0, 600.0, 86_400.0))
            for _ in range(self.rng.choice((1, 30, 400))):
                self.use(self.rng.randrange(self.num_gateways))
            self.fleet.advance(self.rng.choice((0.01, 1.0, 20.0, 100.0)))
        num_lived = self.num_gateways + self.num_restarts
        assert_within(self.times, self.num_gateways * self.limit, num_lived * self.limit + 1e-6)
        assert self.num_tokens <= num_lived * (self.budget + 9), "a last prompt may overdraw"

    def use(self, place: int) -> None:
        usage, rng = self.fleet.usages[place], self.rng
        if usage.num_open and rng.random() < 0.5:
            usage.close()
        elif self.fleet.opens(place, 10):
            self.times.append(self.fleet.now_s)
            self.num_tokens += 10
        assert all(each.num_open <= self.streams for each in self.fleet.usages)


@pytest.mark.parametrize(
    ("first", "number"), [(0, 40), *(pytest.param(n, 490, marks=pytest.mark.deep) for n in range(40, 2000, 490))]
)
def test_no_redis_grants_more_than_n_times_the_limit(first: int, number: int) -> None:
    """Stopped, slow, full, emptied, replayed, inflated, garbled, with other clocks. A killed gateway is one more."""
    for seed in range(first, first + number):
        Episode(seed).run()


@pytest.mark.parametrize(("is_shared", "left"), [(False, -40.0), (True, 0.0)])
def test_use_above_a_gateways_part_is_a_debt_without_redis_alone(is_shared: bool, left: float) -> None:
    allowance = Allowance("minute", 120, 2)
    now_s = utc_s()
    allowance.spend(now_s, 100.0, is_shared=is_shared)
    assert allowance.share.level(now_s) == pytest.approx(left, abs=1e-6)


@pytest.mark.parametrize("fault", ["stopped", "slow", "full", "inflated"])
def test_without_a_sound_redis_a_gateway_grants_its_part(fault: str) -> None:
    """A counter above what all gateways can have granted neither refuses a key nor grants more."""
    fleet = Fleet(4, entry(requests_per_minute=600, tokens_per_day=1000, max_streams=8))
    fleet.server.fault = fault
    granted = [sum(fleet.asks(place) for _ in range(600)) for place in range(4)]
    assert granted == [150] * 4
    fleet.advance(60.0)
    assert [sum(fleet.opens(place) for _ in range(20)) for place in range(4)] == [2] * 4
    fleet.restart(0)
    fleet.advance(60.0)
    assert sum(fleet.asks(0, 10) for _ in range(100)) == 25, "of a day's budget, too"
    fleet.advance(60.0)
    fleet.server.fault, fleet.server.use.held = SOUND, {}
    assert sum(fleet.asks(1) for _ in range(700)) == 600, "the whole limit again"


def test_a_smaller_forgery_refuses_a_key() -> None:
    """This is in docs/security.md. The forgery runs off."""
    fleet = Fleet(4, entry(requests_per_minute=600))
    fleet.server.use.held["requests"] = (2000.0, fleet.server.use.now())
    assert not fleet.asks(0)
    fleet.advance(150.0)
    assert fleet.asks(0)


@pytest.mark.parametrize("apart_s", [-600.0, -60.0, 60.0, 600.0])
def test_no_wall_clock_of_another_machine_opens_a_window(apart_s: float) -> None:
    """Where one gateway has used 60 a minute, one whose clock is apart grants none, restarted or not."""
    fleet = Fleet(2, entry(requests_per_minute=60, tokens_per_day=1000), clocks_s=(0.0, apart_s))
    assert sum(fleet.asks(0) for _ in range(70)) == 60
    assert not fleet.asks(1)
    for place in (0, 1):
        fleet.restart(place)
    assert sum(fleet.asks(place) for place in (0, 1) for _ in range(60)) == 0
    fleet.advance(2.0)
    assert sum(fleet.asks(place) for place in (0, 1) for _ in range(60)) == 2


def test_a_clock_of_redis_that_jumps_back_stops_no_key() -> None:
    fleet = Fleet(2, entry(requests_per_minute=60))
    assert sum(fleet.asks(0) for _ in range(60)) == 60
    fleet.server.clock_s -= 600.0
    assert not fleet.asks(1)
    fleet.advance(10.0)
    assert sum(fleet.asks(1) for _ in range(60)) == 10


def test_streams_of_a_killed_gateway_end_with_its_lease() -> None:
    fleet = Fleet(2, entry(max_streams=4))
    assert [fleet.opens(0) for _ in range(3)] == [True] * 3
    assert [fleet.opens(1) for _ in range(2)] == [True, False]
    fleet.advance(10 * LEASE_S)
    assert not fleet.opens(1), "what lives renews its lease"
    fleet.restart(0)
    fleet.advance(LEASE_S - 1.0)
    assert not fleet.opens(1)
    fleet.advance(2.0)
    assert [fleet.opens(1) for _ in range(4)] == [True] * 3 + [False]


def test_a_stream_that_ends_makes_room_at_once() -> None:
    fleet = Fleet(2, entry(max_streams=1))
    assert fleet.opens(0)
    assert not fleet.opens(1)
    fleet.usages[0].close()
    assert fleet.opens(1)


def test_tokens_of_answers_are_added_after_them() -> None:
    fleet = Fleet(3, entry(tokens_per_minute=600, tokens_per_day=2000))
    assert fleet.opens(0, 400)
    fleet.usages[0].add_tokens(260)
    fleet.usages[0].close()
    assert not fleet.asks(1, 10)
    fleet.advance(8.0)
    assert fleet.asks(2, 10)
    assert [fleet.asks(2, 600), fleet.advance(600.0), fleet.asks(2, 1330)] == [False, None, True]
    fleet.advance(600.0)
    assert not fleet.asks(0, 1), "the day's budget is used up"
    fleet.advance(86_400.0 - fleet.server.use.now() % 86_400.0)
    assert fleet.asks(0, 600) or fleet.server.clock_s < 0, "another day, by Redis and by this machine"


def test_a_prompt_that_did_not_run_costs_nothing_of_the_day() -> None:
    fleet = Fleet(2, entry(tokens_per_day=100))
    assert fleet.opens(0, 100)
    assert not fleet.opens(1, 1)
    fleet.usages[0].add_tokens(-100)
    fleet.usages[0].close()
    assert fleet.opens(1, 1)


def test_a_restarted_fleet_goes_on_with_what_redis_counts() -> None:
    fleet = Fleet(2, entry(requests_per_minute=60, tokens_per_day=1000))
    for place in (0, 1):
        assert all(fleet.asks(place, 10) for _ in range(30))
        fleet.restart(place)
    fleet.advance(60.0)
    assert Counter(fleet.asks(0, 100) for _ in range(10)) == {True: 4, False: 6}


def test_headers_show_what_is_left_in_the_fleet() -> None:
    fleet = Fleet(4, entry(requests_per_minute=600))
    assert all(fleet.asks(0) for _ in range(100))
    assert fleet.asks(3)
    assert remaining(fleet.usages[3]) == 499
    fleet.server.fault = "stopped"
    assert fleet.asks(3)
    assert remaining(fleet.usages[3]) == 148, "of its own part"


def remaining(usage: KeyUsage) -> int:
    return int(dict(usage.headers())[b"x-ratelimit-remaining-requests"])


async def test_a_request_that_leaves_while_redis_is_asked_is_not_open() -> None:
    fleet = Fleet(2, entry(max_streams=1))
    usage = fleet.usages[0]
    waiting = usage.admit()
    waiting.close()
    done(usage.admit())
    assert usage.num_open == 1
