"""Gateways that share the limits of keys in simulated time, and whoever writes to their Redis without the secret."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from server.auth.fleet_limits import FleetLimits, GatewayRecord
from server.auth.limits import KeyEntry, KeyUsage
from server.auth.shared_limits import JOIN_S, PERIOD_S
from server.errors import OverloadedError

NUM_GATEWAYS = 4


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
