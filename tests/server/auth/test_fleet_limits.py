"""Limits of keys over gateways, in simulated time: what clients get, and that no fault or write grants more."""

from __future__ import annotations

import contextlib
import logging
import random
from collections import Counter
from types import SimpleNamespace
from typing import cast

import pytest

from cache.redis_index import GatewayRecords, RedisDownError
from server.auth.fleet_limits import GONE_S, HELD_S, Allotment, AllotmentUse, FleetLimits
from server.auth.shared_limits import JOIN_S, MAX_LATE, PERIOD_S, SharedLimits
from server.errors import OverloadedError
from tests.server.auth.limits_machine import NUM_GATEWAYS, Episode, Fleet, arrivals, entry

TOLERANCE = 0.02
DEEP = pytest.mark.deep
MANY = range(0, 10_000, 1000)


@pytest.mark.parametrize(
    ("seconds", "seed"), [(20.0, 0), *(pytest.param(600.0, seed, marks=DEEP) for seed in range(3))]
)
def test_no_key_gets_more_or_less_than_its_limit(seconds: float, seed: int) -> None:
    """20 keys of 600 to 6,000 requests a minute, each with its own demand and mix of gateways."""
    rng = random.Random(seed)
    limits = {f"k{n}": rng.randrange(600, 6000) for n in range(20)}
    demands = {key: rng.choice((0.3, 0.7, 0.95, 0.98, 1.2, 2.0, 5.0)) for key in limits}
    fleet = Fleet({key: entry(requests_per_minute=limit) for key, limit in limits.items()})
    mixes = {key: [rng.random() ** 3 + 0.001 for _ in fleet.gateways] for key in limits}
    asked: Counter[str] = Counter()
    granted: Counter[str] = Counter()
    events = sorted(
        (at_s, key) for key, limit in limits.items() for at_s in arrivals(demands[key] * limit / 60.0, seconds, rng)
    )
    begun_s = fleet.now_s
    for at_s, key in events:
        fleet.advance(begun_s + at_s)
        asked[key] += 1
        granted[key] += fleet.ask(rng.choices(list(fleet.gateways), mixes[key])[0], key)
    for key, limit in limits.items():
        allowed = limit * (1.0 + seconds / 60.0)
        print(key, limit, demands[key], granted[key] / min(asked[key], allowed))
        assert granted[key] <= allowed + NUM_GATEWAYS, (key, demands[key])
        assert granted[key] >= min(asked[key], allowed) * (1.0 - TOLERANCE), (key, demands[key])


@pytest.mark.parametrize(("first", "num_episodes"), [(0, 20), *(pytest.param(n, 1000, marks=DEEP) for n in MANY)])
def test_no_fault_or_write_grants_more_than_the_limit(first: int, num_episodes: int) -> None:
    for seed in range(first, first + num_episodes):
        Episode(seed, num_beyond=0, is_shown=seed % 3 > 0).run()


def test_more_gateways_than_the_option_hold_a_limit_too() -> None:
    """With a sound Redis, the shares of all shrink."""
    for seed in range(20):
        Episode(seed, num_beyond=2, is_shown=True, is_sound=True).run()


def test_one_gateway_of_several_gets_nearly_the_whole_limit() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)})
    assert fleet.granted("k", 60.0, 40.0, "g0") >= 1200 * (1 - TOLERANCE)


@pytest.mark.parametrize("is_killed", [False, True])
def test_gateways_that_come_and_go_neither_starve_nor_overdraw(is_killed: bool) -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)})
    fleet.granted("k", 5.0, 400.0)
    for number in range(4):
        fleet.start(f"h{number}")
        fleet.settle()
        fleet.kill(f"g{number}") if is_killed else fleet.stop(f"g{number}")
        fleet.advance(fleet.now_s + 3.0)
    share = 0.8 if is_killed else 1.0
    assert fleet.share() == pytest.approx(share), "five were here, and the last one that was killed may still be"
    fleet.granted("k", 30.0, 40.0)
    assert fleet.granted("k", 30.0, 40.0) == pytest.approx(300 * share, rel=TOLERANCE)


def test_a_gateway_that_starts_has_its_part_at_once() -> None:
    """In a place within the option by itself, beyond it by gifts."""
    fleet = Fleet({"k": entry(requests_per_minute=600)}, num_gateways=1, min_gateways=2)
    begun_s = fleet.now_s
    fleet.start("h1")
    assert fleet.now_s - begun_s < JOIN_S / 2
    assert fleet.gateways["h1"][0].allotments["k/requests"].left(fleet.now_s) == 300
    fleet.start("h2")
    assert sum(fleet.ask("h2", "k") for _ in range(10)) == 10


def test_no_two_gateways_share_a_place() -> None:
    """Also more than the option, which start at the same time after others were killed."""
    for seed in range(10):
        random.seed(seed)
        fleet = Fleet({"s": entry(max_streams=4)}, 4, min_gateways=4)
        for number in range(1, 4):
            fleet.kill(f"g{number}")
        fleet.start(*[f"h{number}" for number in range(9)])
        places = [limits.record(fleet.day, is_last=False).place for limits, _ in fleet.gateways.values()]
        assert len(set(places)) == 10, (seed, places)


def test_a_gateway_that_redis_hides_keeps_its_share() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)}, 2)
    fleet.reads = lambda name: {}
    fleet.advance(fleet.now_s + 5.0)
    assert fleet.share() == 1.0
    assert sum(fleet.ask(name, "k") for name in fleet.gateways for _ in range(600)) <= 602


def test_a_gift_under_way_keeps_its_room() -> None:
    allotment = Allotment("k/requests", 600, 0.5)
    allotment.move(0.0, -100.0, 100.0)
    assert allotment.owned(60.0) == 200.0
    allotment.move(60.0, 0.0, 0.0)
    assert allotment.owned(120.0) == 300.0


def test_the_room_of_a_gift_that_no_gateway_takes_is_free_again() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)}, 2)
    allotment = fleet.gateways["g0"][0].allotments["k/requests"]
    while not under_way(fleet, "k/requests"):
        fleet.ask("g1", "k")
        fleet.advance(fleet.now_s + 0.01)
    fleet.kill("g1")
    assert allotment.owned(fleet.now_s) < allotment.part
    fleet.advance(fleet.now_s + 60.0)
    assert allotment.owned(fleet.now_s) == allotment.part == 300.0


def test_an_allotment_above_its_part_runs_off_as_others_refill() -> None:
    allotment = Allotment("k/requests", 600, 0.25)
    allotment.own(0.0, 300.0)
    assert (allotment.owned(10.0), allotment.owned(1000.0)) == (225.0, 150.0)


def test_an_allotment_says_when_an_amount_can_be_taken() -> None:
    allotment = Allotment("k/requests", 600, 0.25)
    allotment.own(0.0, 10.0)
    assert allotment.take(0.0, 1000.0) == 56.0, "when it is full"
    assert allotment.demand.at(0.0) == 1000.0, "refused or not"
    assert allotment.take(0.0, 10.5) == 0.0, "less than one more than it holds"
    assert allotment.owned(0.0) == -0.5
    whole = Allotment("k/requests", 600, 1.0)
    whole.own(0.0, 10.0)
    assert whole.take(0.0, 10.5) == pytest.approx(0.05), "a whole limit grants no more"


def test_a_smaller_limit_takes_what_is_above_it() -> None:
    allotment = Allotment("k/requests", 600, 0.5)
    allotment.resize(0.0, 60, 0.5)
    assert allotment.owned(0.0) == 30.0
    allotment.resize(0.0, 120, 0.5)
    assert allotment.owned(0.0) == 30.0, "more comes with time"


def test_only_allotments_in_use_are_published() -> None:
    rate, count = Allotment("k/requests", 600, 0.5), Allotment("k/streams", 8, 0.5)
    assert rate.use(0.0) is count.use(0.0) is None
    count.open = 1
    assert count.use(0.0) == AllotmentUse(4.0, 1, 0.0)
    rate.take(0.0, 1.0)
    assert rate.use(0.0) == AllotmentUse(299.0, 0, 1.0)
    assert rate.use(60.0) is None, "full again"


def test_the_gateway_in_place_of_a_killed_one_gets_nothing() -> None:
    """Nothing is known of what the killed one had left."""
    fleet = Fleet({"k": entry(requests_per_minute=600)}, 2, min_gateways=2)
    fleet.kill("g1")
    fleet.advance(fleet.now_s + HELD_S)
    fleet.start("g2")
    assert fleet.gateways["g2"][0].allotments["k/requests"].left(fleet.now_s) < 1.0


def test_a_killed_gateway_has_a_share_for_15_minutes() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)}, 2)
    fleet.kill("g1")
    fleet.advance(fleet.now_s + GONE_S - 10.0)
    assert fleet.share() == 0.5
    fleet.advance(fleet.now_s + 20.0)
    assert fleet.share() == 1.0


def test_a_gateway_that_stops_is_counted_once() -> None:
    """It publishes last records until it has ended. Another one that was killed keeps its share."""
    fleet = Fleet({"k": entry(requests_per_minute=600)})
    fleet.kill("g2")
    fleet.advance(fleet.now_s + 5.0)
    fleet.exchange("g3", is_last=True)
    fleet.advance(fleet.now_s + 0.5)
    fleet.kill("g3")
    assert fleet.share() == pytest.approx(2 / 3)


def test_without_redis_each_gateway_has_its_share() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)})
    assert fleet.gateways["g0"][0].part == 1.0
    fleet.reads = lambda name: None
    fleet.advance(fleet.now_s + 5.0)
    for name in fleet.gateways:
        assert 145 <= sum(fleet.ask(name, "k") for _ in range(600)) <= 150
        assert fleet.gateways[name][0].part == 0.25


def test_a_budget_counts_over_gateways_and_their_restarts() -> None:
    fleet = Fleet({"k": entry(tokens_per_day=1000)}, num_gateways=1)
    assert fleet.ask("g0", "k", 600)
    fleet.settle()
    fleet.stop("g0")
    fleet.start("g1")
    assert fleet.ask("g1", "k", 390)
    assert fleet.ask("g1", "k", 20)
    assert not fleet.ask("g1", "k", 1)
    fleet.day, fleet.records = "2", {}
    fleet.settle()
    assert fleet.ask("g1", "k", 1), "another day"


def test_a_new_day_begins_with_its_whole_budget() -> None:
    """And what is under way then of other limits arrives."""
    for seed in range(4):
        fleet, rng = Fleet({"d": entry(tokens_per_day=1000), "s": entry(max_streams=40)}), random.Random(seed)
        name = rng.choice(list(fleet.gateways))
        while not (under_way(fleet, "d/day") and under_way(fleet, "s/streams")):
            for key in ("d", "s"):
                fleet.ask(name, key, 1)
            fleet.advance(fleet.now_s + rng.random() / 20.0)
        fleet.day, fleet.records = "2", {}
        fleet.settle()
        for allotment, limit in (("d/day", 1000), ("s/streams", 40)):
            while under_way(fleet, allotment):
                fleet.advance(fleet.now_s + PERIOD_S)
            owned = [limits.allotments[allotment].owned(fleet.now_s) for limits, _ in fleet.gateways.values()]
            assert sum(owned) == pytest.approx(limit), (seed, allotment)


def test_a_start_after_midnight_adds_nothing_to_a_count() -> None:
    """The others keep the part of a gateway that ended, though the new day has no record of it."""
    fleet = Fleet({"k": entry(max_streams=40)}, num_gateways=2, min_gateways=2)
    for day in range(2, 5):
        fleet.stop(next(iter(fleet.gateways)))
        fleet.settle()
        fleet.day, fleet.records = str(day), {}
        fleet.settle()
        fleet.start(f"h{day}")
        fleet.settle()
        owned = [limits.allotments["k/streams"].owned(fleet.now_s) for limits, _ in fleet.gateways.values()]
        assert sum(owned) == pytest.approx(40), day


def under_way(fleet: Fleet, allotment: str) -> bool:
    """Return whether a part of a limit is given, and not known to be taken."""
    gifts = [gift for name in fleet.gateways for gift in fleet.records[name].gifts.values()]
    return any(allotment in gift.amounts for gift in gifts)


def test_open_requests_move_to_where_they_are_asked_for() -> None:
    fleet = Fleet({"k": entry(max_streams=8)})
    usages = [usages["k"] for _, usages in fleet.gateways.values()]
    for _ in range(20):
        with contextlib.suppress(OverloadedError):
            usages[0].admit()
        fleet.advance(fleet.now_s + 0.2)
    assert usages[0].num_open == 8
    for _ in range(8):
        usages[0].close()
    for _ in range(20):
        with contextlib.suppress(OverloadedError):
            usages[1].admit()
        fleet.advance(fleet.now_s + 1.0)
    assert usages[1].num_open == 8


def test_headers_show_what_is_left_in_the_fleet() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)})
    for _ in range(100):
        assert fleet.ask("g0", "k")
    fleet.advance(fleet.now_s + 1.0)
    headers = dict(fleet.gateways["g3"][1]["k"].headers())
    assert headers[b"x-ratelimit-limit-requests"] == b"600"
    assert 480 <= int(headers[b"x-ratelimit-remaining-requests"]) <= 511


async def test_exchanges_that_fail_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    answers: list[dict[str, bytes] | None] = [*[None] * (MAX_LATE - 1), {}, *[None] * (MAX_LATE + 5), {"h": b"rubbish"}]
    counts: Counter[str] = Counter()

    async def exchange(*_: object) -> dict[str, bytes]:
        if (answer := answers.pop(0)) is None:
            raise RedisDownError("away")
        return answer

    records = cast("GatewayRecords", SimpleNamespace(exchange=exchange))
    shared = SharedLimits(FleetLimits("g"), records, "g", lambda kind: counts.update([kind]))
    caplog.set_level(logging.INFO, "server.auth.shared_limits")
    lines = []
    while answers:
        await shared.exchange()
        lines.append(len(caplog.records))
    assert lines == [*[0] * (2 * MAX_LATE - 1), *[1] * 6, 2]
    assert counts == {"timeout": 2 * MAX_LATE + 4, "invalid": 1}


async def test_an_exchange_without_redis_takes_no_time() -> None:
    """Else the next one, which begins a day's budget, would come late."""
    assert await SharedLimits(FleetLimits(), None, "g", print).exchange() == 0.0
