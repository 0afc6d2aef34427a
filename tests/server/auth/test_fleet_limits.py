"""Limits of keys over four gateways, in simulated time: what clients get, and what happens without a sound Redis."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
from msgspec.structs import replace

from server.auth.fleet_limits import FORGET_S, FRESH_S, FleetLimits, GatewayRecord
from server.auth.limits import KeyEntry, KeyUsage, KeyUse
from server.auth.shared_limits import BUSY_S
from server.errors import OverloadedError

NUM_GATEWAYS = 4
TOLERANCE = 0.02


@dataclass(eq=False)
class Fleet:
    """Gateways that exchange records over a hash, as over Redis: first the read, then the own write."""

    entries: dict[str, KeyEntry]
    num_gateways: int = NUM_GATEWAYS
    now_s: float = 0.0
    records: dict[str, GatewayRecord] = field(default_factory=dict)
    is_up: bool = True
    day: str = "1"
    spoil: Callable[[], None] = lambda: None
    """Called before each exchange."""

    def __post_init__(self) -> None:
        self.gateways: dict[str, tuple[FleetLimits, dict[str, KeyUsage]]] = {}
        self._written: dict[str, GatewayRecord] = {}
        self._next_s: dict[str, float] = {}
        for number in range(self.num_gateways):
            self.start(f"g{number}")

    def start(self, name: str) -> None:
        usages = {key: KeyUsage(clock=lambda: self.now_s) for key in self.entries}
        for key, usage in usages.items():
            usage.apply(self.entries[key])
        self.gateways[name] = (FleetLimits(lambda: usages, lambda: self.now_s), usages)
        self._next_s[name] = self.now_s + BUSY_S * random.Random(name).random()

    def kill(self, name: str) -> None:
        del self.gateways[name], self._next_s[name]

    def advance(self, to_s: float) -> None:
        """Run the exchanges up to this time."""
        while (name := min(self._next_s, key=self._next_s.__getitem__)) and self._next_s[name] <= to_s:
            self.now_s = self._next_s[name]
            self._next_s[name] += BUSY_S
            self.exchange(name)
        self.now_s = to_s

    def exchange(self, name: str) -> None:
        limits, _ = self.gateways[name]
        record = limits.record(self.day)
        if not self.is_up:
            limits.missed()
            return
        self.spoil()
        own = self.records.get(name)
        is_intact = name not in self._written or own == self._written[name]
        limits.merge({other: each for other, each in self.records.items() if other != name}, is_intact=is_intact)
        self.records[name] = self._written[name] = record

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

    def granted(self, key: str, seconds: float, per_s: float) -> int:
        """Return how many of evenly timed requests, over all gateways in turn, were granted."""
        names, granted, begun_s = list(self.gateways), 0, self.now_s
        for number in range(int(seconds * per_s)):
            self.advance(begun_s + number / per_s)
            granted += self.ask(names[number % len(names)], key)
        self.advance(begun_s + seconds)
        return granted

    def settle(self) -> None:
        self.advance(self.now_s + 1.0)

    def stall(self, name: str, seconds: float) -> None:
        """Stop a gateway for this time, while the others go on."""
        self._next_s[name] = self.now_s + seconds

    def drain(self, key: str) -> dict[str, int]:
        """Ask in turn, at this instant, until no gateway grants; exchange after each request."""
        granted = dict.fromkeys(self.gateways, 0)
        while True:
            before = sum(granted.values())
            for name in self.gateways:
                granted[name] += self.ask(name, key)
                for each in (name, *self.gateways):
                    self.exchange(each)
            if sum(granted.values()) == before:
                return granted

    def left(self, name: str, key: str) -> float:
        return self.gateways[name][1][key].use().requests_left


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
    for at_s, key in events:
        fleet.advance(at_s)
        asked[key] += 1
        granted[key] += fleet.ask(rng.choices(list(fleet.gateways), mixes[key])[0], key)
    for key, limit in limits.items():
        allowed = limit * (1.0 + seconds / 60.0)
        assert granted[key] <= allowed * (1.0 + TOLERANCE), (key, demands[key])
        assert granted[key] >= min(asked[key], allowed) * (1.0 - TOLERANCE), (key, demands[key])


def test_no_key_gets_more_or_less_than_its_limit() -> None:
    check_keys(60.0, seed=0)


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(3))
def test_limits_hold_for_ten_minutes(seed: int) -> None:
    check_keys(600.0, seed)


def test_a_limit_is_exact_between_exchanges() -> None:
    """All gateways have read each other before each request."""
    fleet = Fleet({"k": entry(requests_per_minute=600)})
    fleet.settle()
    assert all(fleet.ask("g0", "k") for _ in range(200))
    for name in fleet.gateways:
        fleet.exchange(name)
    assert sum(fleet.drain("k").values()) == 400
    fleet.advance(fleet.now_s + 1.0)
    assert sum(fleet.drain("k").values()) == 10


@pytest.mark.parametrize("num_late", [0, 2])
def test_a_stalled_gateway_takes_what_others_granted(num_late: int) -> None:
    """It had left them no share. After late replies it has left them one, and takes at most what it has itself."""
    fleet = Fleet({"k": entry(requests_per_minute=600)}, num_gateways=2)
    fleet.settle()
    fleet.stall("g1", 2 * FRESH_S)
    assert all(fleet.ask("g0", "k") for _ in range(500))
    fleet.advance(fleet.now_s + 2 * FRESH_S - BUSY_S)
    for _ in range(num_late):
        fleet.gateways["g1"][0].missed()
    fleet.advance(fleet.now_s + 2 * BUSY_S)
    left = fleet.left("g1", "k")
    if num_late:
        assert 0 <= left <= 10 * 2 * BUSY_S
    else:
        assert 100 <= left <= 100 + 10 * 2 * BUSY_S


def test_a_flood_at_all_gateways_overdraws_little() -> None:
    """4,000 requests a second against 600 a minute, from a full bucket."""
    fleet = Fleet({"k": entry(requests_per_minute=600)})
    fleet.settle()
    assert 700 * (1 - TOLERANCE) <= fleet.granted("k", 10.0, 4000.0) <= 700 * (1 + TOLERANCE) + 4


def test_tokens_count_over_the_fleet() -> None:
    fleet = Fleet({"k": entry(tokens_per_minute=60_000)})
    fleet.settle()
    names, granted = list(fleet.gateways), 0
    begun_s = fleet.now_s
    for number in range(6000):
        fleet.advance(begun_s + number * 0.01)
        granted += 100 * fleet.ask(names[number % 4], "k", 100)
    assert 120_000 * (1 - TOLERANCE) <= granted <= 120_000 * (1 + TOLERANCE)


def breaks(fleet: Fleet, kind: str) -> Callable[[], None]:
    """Return what an attacker, or a failure, does to the records again and again."""
    old = dict(fleet.records)

    def rewound() -> None:
        fleet.records = dict(old)

    def huge() -> None:
        for name, record in fleet.records.items():
            keys = {key: replace(use, requests=2**53, tokens=2**53, num_open=2**53) for key, use in record.keys.items()}
            fleet.records[name] = replace(record, number=record.number + 1_000_000, keys=keys)

    steps = {"flushed": lambda: fleet.records.clear(), "rewound": rewound, "huge": huge, "gone": lambda: None}
    fleet.is_up = kind != "gone"
    return steps[kind]


@pytest.mark.parametrize("kind", ["gone", "flushed", "rewound", "huge"])
def test_each_gateway_grants_its_share_without_sound_records(kind: str) -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600, max_streams=8)})
    fleet.granted("k", 5.0, 40.0)
    step = breaks(fleet, kind)
    names = list(fleet.gateways)

    def spoiled(seconds: float) -> Counter[str]:
        granted: Counter[str] = Counter()
        for number in range(int(seconds * 160)):
            fleet.advance(fleet.now_s + 1 / 160)
            step()
            granted[names[number % 4]] += fleet.ask(names[number % 4], "k")
        return granted

    spoiled(max(FRESH_S, FORGET_S) + 60.0)
    granted = spoiled(20.0)
    for name in names:
        assert 50 * 0.98 - 1 <= granted[name] <= 50 * 1.02 + 1, granted
    fleet.is_up = True
    fleet.records = dict(fleet._written)
    fleet.granted("k", 20.0, 40.0)
    assert fleet.granted("k", 30.0, 40.0) == pytest.approx(300, rel=TOLERANCE), "over the fleet again"


@pytest.mark.parametrize("kind", ["gone", "flushed", "rewound", "huge"])
def test_a_share_is_exact_without_sound_records(kind: str) -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600), "other": entry(requests_per_minute=600)})
    fleet.granted("k", 5.0, 40.0)
    fleet.spoil = breaks(fleet, kind)
    fleet.advance(fleet.now_s + FRESH_S + 3 * BUSY_S)
    for name in fleet.gateways:
        assert sum(fleet.ask(name, "other") for _ in range(600)) == 150


def test_open_requests_count_over_the_fleet() -> None:
    fleet = Fleet({"k": entry(max_streams=8)})
    fleet.settle()
    usages = [usages["k"] for _, usages in fleet.gateways.values()]
    for _ in range(8):
        usages[0].admit()
    fleet.settle()
    with pytest.raises(OverloadedError, match="8 requests open"):
        usages[1].admit()
    for _ in range(3):
        usages[0].close()
    fleet.settle()
    for usage in usages[1:]:
        usage.admit()
    fleet.settle()
    with pytest.raises(OverloadedError):
        usages[0].admit()


def test_a_budget_counts_over_gateways_and_their_restarts() -> None:
    fleet = Fleet({"k": entry(tokens_per_day=1000)})
    fleet.settle()
    assert fleet.ask("g0", "k", 600)
    fleet.settle()
    fleet.kill("g0")
    fleet.start("g9")
    fleet.advance(fleet.now_s + FORGET_S + 3.0)
    assert fleet.ask("g1", "k", 390)
    fleet.settle()
    assert fleet.ask("g9", "k", 20)
    fleet.settle()
    assert not any(fleet.ask(name, "k", 1) for name in fleet.gateways)
    fleet.day, fleet.records = "2", {}
    fleet.settle()
    assert all(fleet.ask(name, "k", 1) for name in fleet.gateways), "another day"


def test_a_new_gateway_takes_over_the_level() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)})
    fleet.settle()
    fleet.granted("k", 20.0, 100.0)
    fleet.start("g9")
    fleet.settle()
    assert fleet.left("g9", "k") < 30


def test_a_gateway_that_ended_leaves_its_share() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)})
    fleet.granted("k", 5.0, 40.0)
    fleet.kill("g3")
    fleet.advance(fleet.now_s + FORGET_S + FRESH_S + 1.0)
    fleet.granted("k", 30.0, 40.0)
    assert fleet.granted("k", 30.0, 40.0) == pytest.approx(300, rel=TOLERANCE)


def test_after_its_last_record_a_gateway_has_ended() -> None:
    """The task that publishes may run once more after the last record."""
    fleet = Fleet({"k": entry(requests_per_minute=600)}, num_gateways=2)
    fleet.settle()
    fleet.records["g1"] = fleet.gateways["g1"][0].record(fleet.day, is_last=True)
    fleet.settle()
    assert fleet.gateways["g0"][0].part == 1.0
    fleet.stall("g1", 60.0)
    fleet.advance(fleet.now_s + 2 * FRESH_S)
    assert fleet.gateways["g0"][0].part == 1.0


def test_a_share_refills_at_its_own_rate() -> None:
    """Time spent on a share is not counted again at the whole limit."""
    fleet = Fleet({"k": entry(requests_per_minute=600)}, num_gateways=2)
    fleet.settle()
    assert all(fleet.ask("g0", "k") for _ in range(600))
    fleet.settle()
    fleet.is_up = False
    fleet.advance(fleet.now_s + FRESH_S)
    before = fleet.left("g1", "k")
    fleet.advance(fleet.now_s + 20.0)
    fleet.is_up = True
    fleet.settle()
    assert fleet.left("g1", "k") == pytest.approx(before + 100 + 10, abs=10 * FRESH_S)


def test_headers_show_what_is_left_in_the_fleet() -> None:
    fleet = Fleet({"k": entry(requests_per_minute=600)})
    fleet.settle()
    for _ in range(100):
        fleet.ask("g0", "k")
    fleet.advance(fleet.now_s + 0.05)
    headers = dict(fleet.gateways["g3"][1]["k"].headers())
    assert headers[b"x-ratelimit-limit-requests"] == b"600"
    assert 500 <= int(headers[b"x-ratelimit-remaining-requests"]) <= 502


def test_an_unsound_first_record_counts_nothing() -> None:
    """No gateway can have granted that much."""
    fleet = Fleet({"k": entry(tokens_per_day=1000, tokens_per_minute=1000)}, num_gateways=1)
    amount = 10**15
    fleet.records["stranger"] = GatewayRecord(1, False, "1", {"k": KeyUse(amount, amount, amount, amount)})
    fleet.settle()
    assert fleet.ask("g0", "k", num_tokens=500)
