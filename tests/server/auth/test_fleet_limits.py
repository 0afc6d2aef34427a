"""Limits of keys over gateways, in simulated time: what clients get, and that no fault or write grants more."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from server.auth.fleet_limits import GONE_S, FleetLimits, GatewayRecord, Purse, PurseUse
from server.auth.limits import KeyEntry, KeyUsage
from server.auth.shared_limits import JOIN_S, PERIOD_S
from server.errors import OverloadedError

NUM_GATEWAYS = 4
TOLERANCE = 0.02


@dataclass(eq=False)
class Fleet:
    """Gateways that exchange records over a hash, as over Redis: first the read, then the own write."""

    entries: dict[str, KeyEntry]
    num_gateways: int = NUM_GATEWAYS
    min_gateways: int = 1
    now_s: float = 100.0
    records: dict[str, GatewayRecord] = field(default_factory=dict)
    day: str = "1"
    reads: Callable[[str], dict[str, GatewayRecord] | None] | None = None
    """Returns what a gateway reads; None for no answer. A fault or an attacker sets it."""
    writes: Callable[[str], bool] = lambda name: True
    """Returns whether a gateway's write arrives."""

    def __post_init__(self) -> None:
        self.gateways: dict[str, tuple[FleetLimits, dict[str, KeyUsage]]] = {}
        self._next_s: dict[str, float] = {}
        self.start(*[f"g{number}" for number in range(self.num_gateways)])
        self.settle()

    def start(self, *names: str) -> None:
        """Start gateways at the same time."""
        for name in names:
            limits = FleetLimits(name, self.min_gateways, lambda: self.now_s, lambda: self.now_s)
            usages = {key: KeyUsage(limits, key) for key in self.entries}
            for key, usage in usages.items():
                usage.apply(self.entries[key])
            self.gateways[name] = (limits, usages)
        until_s = self.now_s + JOIN_S
        while self.now_s < until_s and any(not self.gateways[name][0].is_ready for name in names):
            for name in names:
                self.exchange(name)
            self.advance(self.now_s + PERIOD_S / 2)
        for name in names:
            self.gateways[name][0].begin()
            self._next_s[name] = self.now_s

    def stop(self, name: str) -> None:
        self.exchange(name, is_last=True)
        self.kill(name)

    def kill(self, name: str) -> None:
        del self.gateways[name], self._next_s[name]

    def advance(self, to_s: float) -> None:
        """Run the exchanges up to this time."""
        while self._next_s and self._next_s[name := min(self._next_s, key=self._next_s.__getitem__)] <= to_s:
            self.now_s = max(self.now_s, self._next_s[name])
            self.exchange(name)
            self._next_s[name] += PERIOD_S
        self.now_s = max(self.now_s, to_s)

    def exchange(self, name: str, *, is_last: bool = False) -> None:
        limits, _ = self.gateways[name]
        record = limits.record(self.day, is_last=is_last)
        found = dict(self.records) if self.reads is None else self.reads(name)
        if self.writes(name):
            self.records[name] = record
        if found is not None:
            limits.merge(found)

    def ask(self, gateway: str, key: str, num_tokens: int = 0) -> bool:
        usage = self.gateways[gateway][1][key]
        try:
            usage.admit()
        except OverloadedError:
            return False
        try:
            if num_tokens:
                usage.take("tokens", num_tokens)
        except OverloadedError:
            return False
        finally:
            usage.close()
        return True

    def granted(self, key: str, seconds: float, per_s: float, *names: str) -> int:
        """Return how many of evenly timed requests, over these gateways in turn, were granted."""
        chosen, granted, begun_s = names or list(self.gateways), 0, self.now_s
        for number in range(int(seconds * per_s)):
            self.advance(begun_s + number / per_s)
            granted += self.ask(chosen[number % len(chosen)], key)
        self.advance(begun_s + seconds)
        return granted

    def settle(self) -> None:
        self.advance(self.now_s + 1.0)

    def share(self) -> float:
        return sum(limits.share for limits, _ in self.gateways.values())


def entry(**limits: int) -> KeyEntry:
    return KeyEntry(digest="sha256:" + "0" * 64, tenant="t", **limits)  # type: ignore[arg-type]


def arrivals(rate_per_s: float, seconds: float, rng: random.Random) -> Iterator[float]:
    at_s = rng.expovariate(rate_per_s)
    while at_s < seconds:
        yield at_s
        at_s += rng.expovariate(rate_per_s)


def check_keys(seconds: float, seed: int) -> None:
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


def test_no_key_gets_more_or_less_than_its_limit() -> None:
    check_keys(20.0, seed=0)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(3))
def test_limits_hold_for_ten_minutes(seed: int) -> None:
    check_keys(600.0, seed)


class Attacker:
    """Redis as a fault or a writer without the secret may make it: what each gateway reads, and what arrives.

    Any gateway may be shown any signed record at any time, or none, or no answer at all.
    """

    def __init__(self, fleet: Fleet, rng: random.Random) -> None:
        self._fleet = fleet
        self._rng = rng
        self._signed: dict[str, list[GatewayRecord]] = {}
        self._fault: dict[str, Any] = {}
        self.choose()
        fleet.reads, fleet.writes = self.reads, lambda name: self._fault[name] not in ("no writes", "absent")

    def choose(self) -> None:
        """Choose a fault for each gateway, or one for all."""
        kinds = ["none", "none", "absent", "frozen", "old", "partial", "alone", "swapped", "no writes"]
        names = [*self._fleet.gateways, *(f"h{n}" for n in range(40))]
        one = self._rng.choice(kinds) if self._rng.random() < 0.5 else None
        self._fault = {name: one or self._rng.choice(kinds) for name in names}
        self._frozen = dict(self._fleet.records)

    def reads(self, name: str) -> dict[str, GatewayRecord] | None:
        for other, record in self._fleet.records.items():
            known = self._signed.setdefault(other, [])
            if not known or known[-1] is not record:
                known.append(record)
        rng, own = self._rng, self._fleet.records.get(name)
        found = dict(self._fleet.records)
        match self._fault[name]:
            case "absent":
                return None
            case "frozen":
                found = dict(self._frozen)
            case "old":
                found = {other: rng.choice(known) for other, known in self._signed.items()}
            case "partial":
                found = {other: record for other, record in found.items() if rng.random() < 0.5}
            case "alone":
                found = {}
            case "swapped":
                found = {other: rng.choice(known[-5:]) for other, known in self._signed.items() if rng.random() < 0.8}
        if own is not None and rng.random() < 0.9:
            found[name] = own
        return found


class Episode:
    """Gateways come and go, while whoever writes to Redis does what he likes."""

    def __init__(self, seed: int, *, num_beyond: int, is_shown: bool, is_sound: bool = False) -> None:
        """`num_beyond`: gateways beyond the option. `is_shown`: Redis is sound while one starts or ends."""
        self.seed = seed
        self.rng = rng = random.Random(seed)
        random.seed(seed)
        self.limit = rng.choice((6, 60, 120, 600))
        self.num_gateways = rng.randrange(1, 5)
        self.most = self.num_gateways + num_beyond
        self.streams = rng.randrange(1, 40)
        self.is_shown = is_shown
        counts = {"s": entry(max_streams=self.streams), "d": entry(tokens_per_day=10 * self.limit)}
        entries = {"k": entry(requests_per_minute=self.limit), **counts}
        self.fleet = Fleet(entries, rng.randrange(1, self.num_gateways + 1), self.num_gateways)
        self.attacker = Attacker(self.fleet, rng)
        self.is_sound = is_sound
        if is_sound:
            self.fleet.reads, self.fleet.writes = None, lambda name: True
        self.started = list(self.fleet.gateways)
        self.hidden_starts: list[float] = []
        self.times: list[float] = []
        self.num_tokens = 0

    def run(self) -> None:
        for _ in range(self.rng.randrange(4, 16)):
            action = self.rng.random()
            if action < 0.5 and not self.is_sound:
                self.attacker.choose()
            elif action < 0.6 and self.fleet.gateways:
                self.end(self.rng.choice(list(self.fleet.gateways)))
            elif action < 0.75 and len(self.fleet.gateways) < self.most:
                self.start()
            self.use()
        for _ in range(3):
            for name in self.rng.sample(list(self.fleet.gateways), len(self.fleet.gateways)):
                self.drain(name)
            self.fleet.advance(self.fleet.now_s + self.rng.choice((0.05, 0.5, 2.0)))
        self.check()

    def end(self, name: str) -> None:
        self.show()
        if self.rng.random() < 0.5:
            self.fleet.stop(name)
        else:
            self.ask(name, self.rng.choice((0, self.limit)))  # what no other gateway will read
            self.fleet.kill(name)
        self.hide()

    def ask(self, name: str, number: int) -> None:
        for _ in range(number):
            if not self.fleet.ask(name, "k"):
                break
            self.times.append(self.fleet.now_s)

    def drain(self, name: str) -> None:
        """Use all that a gateway grants."""
        self.ask(name, 10 * self.limit)
        while self.fleet.ask(name, "d", 10):
            self.num_tokens += 10
        with contextlib.suppress(OverloadedError):
            while True:
                self.fleet.gateways[name][1]["s"].admit()
        self.check_streams()

    def show(self) -> None:
        if self.is_shown:
            self._reads, self._writes = self.fleet.reads, self.fleet.writes
            self.fleet.reads, self.fleet.writes = None, lambda name: True
            self.fleet.settle()

    def hide(self) -> None:
        if self.is_shown:
            self.fleet.reads, self.fleet.writes = self._reads, self._writes

    def start(self) -> None:
        self.show()
        room = self.most - len(self.fleet.gateways)
        names = [f"h{len(self.started) + number}" for number in range(self.rng.randint(1, room))]
        self.started += names
        if not self.is_shown:
            self.hidden_starts += [self.fleet.now_s] * len(names)
        self.fleet.start(*names)
        self.hide()

    def use(self) -> None:
        rng, fleet, names = self.rng, self.fleet, list(self.fleet.gateways)
        weights = [rng.random() ** 3 + 0.01 for _ in names]
        seconds, begun_s, number = rng.choice((0.1, 0.5, 2.0, 5.0)), fleet.now_s, rng.choice((1, 10, 40))
        for index in range(number if names else 0):
            fleet.advance(begun_s + seconds * index / number)
            name = rng.choices(names, weights)[0]
            self.ask(name, rng.choice((1, 1, 3, 20)))
            self.num_tokens += 10 * fleet.ask(name, "d", 10)
            usage = fleet.gateways[name][1]["s"]
            if rng.random() < 0.7:
                with contextlib.suppress(OverloadedError):
                    usage.admit()
            elif usage.num_open:
                usage.close()
            self.check_streams()
        if rng.random() < 0.2:
            self.drain(rng.choice(names)) if names else None
        fleet.advance(begun_s + seconds)

    def check_streams(self) -> None:
        num_open = sum(usages["s"].num_open for _, usages in self.fleet.gateways.values())
        times = 1 + len(self.hidden_starts)
        assert num_open <= times * self.streams + len(self.fleet.gateways), ("streams", self.seed)

    def check(self) -> None:
        """No window has more than the limit, what refills in it, and one request a gateway.

        A gateway that Redis hides from the others at its start may add its share.
        """
        times = 1 + len(self.hidden_starts)
        assert self.num_tokens <= 10 * (times * self.limit + len(self.started)), ("day", self.seed)
        most = self.limit + len(self.started) + 1e-6
        if self.most > self.num_gateways:  # all refill until they have seen the new one
            most += len(self.started) * 0.1 * self.limit / 60.0
        worst = float("-inf")
        for number, at_s in enumerate(self.times):
            hidden = sum(start_s <= at_s for start_s in self.hidden_starts) / self.num_gateways
            ahead = number - self.limit * (at_s / 60.0 + hidden)
            worst = max(worst, -ahead)
            assert ahead + 1 + worst <= most, ("requests", self.seed, number)


def run_episodes(seeds: range) -> None:
    for seed in seeds:
        Episode(seed, num_beyond=0, is_shown=seed % 3 > 0).run()


def test_no_fault_or_write_grants_more_than_the_limit() -> None:
    run_episodes(range(20))


@pytest.mark.deep
@pytest.mark.parametrize("part", range(10))
def test_no_fault_or_write_grants_more_in_10000_episodes(part: int) -> None:
    run_episodes(range(1000 * part, 1000 * (part + 1)))


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
    assert fleet.gateways["h1"][0].purses["k/requests"].left(fleet.now_s) == 300
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
        places = [limits.record(fleet.day).place for limits, _ in fleet.gateways.values()]
        assert len(set(places)) == 10, (seed, places)


def test_a_gateway_that_redis_hides_keeps_its_share() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)}, 2)
    fleet.reads = lambda name: {}
    fleet.advance(fleet.now_s + 5.0)
    assert fleet.share() == 1.0
    assert sum(fleet.ask(name, "k") for name in fleet.gateways for _ in range(600)) <= 602


def test_a_gift_under_way_keeps_its_room() -> None:
    purse = Purse("k/requests", 600, 0.5)
    purse.move(0.0, -100.0, 100.0)
    assert purse.owned(60.0) == 200.0
    purse.move(60.0, 0.0, 0.0)
    assert purse.owned(120.0) == 300.0


def test_the_room_of_a_gift_that_no_gateway_takes_is_free_again() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)}, 2)
    purse = fleet.gateways["g0"][0].purses["k/requests"]
    while not under_way(fleet, "k/requests"):
        fleet.ask("g1", "k")
        fleet.advance(fleet.now_s + 0.01)
    fleet.kill("g1")
    assert purse.owned(fleet.now_s) < purse.part
    fleet.advance(fleet.now_s + 60.0)
    assert purse.owned(fleet.now_s) == purse.part == 300.0


def test_a_purse_above_its_part_runs_off_as_the_others_refill() -> None:
    purse = Purse("k/requests", 600, 0.25)
    purse.own(0.0, 300.0)
    assert (purse.owned(10.0), purse.owned(1000.0)) == (225.0, 150.0)


def test_a_purse_says_when_an_amount_can_be_taken() -> None:
    purse = Purse("k/requests", 600, 0.25)
    purse.own(0.0, 10.0)
    assert purse.take(0.0, 1000.0) == 56.0, "when it is full"
    assert purse.demand.at(0.0) == 1000.0, "refused or not"
    assert purse.take(0.0, 10.5) == 0.0, "less than one more than it holds"
    assert purse.owned(0.0) == -0.5
    whole = Purse("k/requests", 600, 1.0)
    whole.own(0.0, 10.0)
    assert whole.take(0.0, 10.5) == pytest.approx(0.05), "a whole limit grants no more"


def test_a_smaller_limit_takes_what_is_above_it() -> None:
    purse = Purse("k/requests", 600, 0.5)
    purse.resize(0.0, 60, 0.5)
    assert purse.owned(0.0) == 30.0
    purse.resize(0.0, 120, 0.5)
    assert purse.owned(0.0) == 30.0, "more comes with time"


def test_only_purses_in_use_are_published() -> None:
    rate, count = Purse("k/requests", 600, 0.5), Purse("k/streams", 8, 0.5)
    assert rate.use(0.0) is count.use(0.0) is None
    count.open = 1
    assert count.use(0.0) == PurseUse(4.0, 1, 0.0)
    rate.take(0.0, 1.0)
    assert rate.use(0.0) == PurseUse(299.0, 0, 1.0)
    assert rate.use(60.0) is None, "full again"


def test_a_killed_gateway_has_a_share_for_15_minutes() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)}, 2)
    fleet.kill("g1")
    fleet.advance(fleet.now_s + GONE_S - 10.0)
    assert fleet.share() == 0.5
    fleet.advance(fleet.now_s + 20.0)
    assert fleet.share() == 1.0


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
        for purse, limit in (("d/day", 1000), ("s/streams", 40)):
            while under_way(fleet, purse):
                fleet.advance(fleet.now_s + PERIOD_S)
            owned = [limits.purses[purse].owned(fleet.now_s) for limits, _ in fleet.gateways.values()]
            assert sum(owned) == pytest.approx(limit), (seed, purse)


def under_way(fleet: Fleet, purse: str) -> bool:
    """Return whether a part of a limit is given, and not known to be taken."""
    gifts = [gift for name in fleet.gateways for gift in fleet.records[name].gifts.values()]
    return any(purse in gift.amounts for gift in gifts)


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
