"""Gateways that share the limits of keys in simulated time, over a Redis that is sound, faulty or hostile."""

from __future__ import annotations

import contextlib
import copy
import math
import random
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field

from cache.redis_index import LEASE_S, Charge, KeyUse
from server.auth.limits import KeyEntry, KeyUsage
from server.errors import OverloadedError

SOUND = "sound"
FAULTS = ("stopped", "slow", "full", "emptied", "replayed", "inflated", "garbled")
DAY_S = 86_400.0


@dataclass(eq=False)
class CountedUse:
    """The script of `KeyUse` over one key, as Redis keeps it. `test_key_use` compares the two."""

    now: Callable[[], float]
    held: dict[str, tuple[float, float]] = field(default_factory=dict)

    def count(self, gateway: str, charges: Sequence[Charge]) -> list[float]:
        now, own, said, counted, fits = self.now(), f"open:{gateway}", list[float](), {}, True
        for kind, limit, needed, amount in charges:
            used, at_s = self.held.get(kind, (0.0, now))
            if kind == "streams":
                mine, end_s = self.held.get(own, (0.0, now))
                mine = 0.0 if needed < 0 or end_s <= now else mine
                used = mine
                for name, (num_open, end_s) in list(self.held.items()):
                    if name.startswith("open:") and name != own:
                        if now < end_s <= now + LEASE_S:
                            used += num_open
                        else:
                            del self.held[name]
                counted[own] = (max(0.0, mine + amount), now + LEASE_S)
            else:
                used = max(0.0, used)
                if kind == "day":
                    used = 0.0 if at_s // DAY_S < now // DAY_S else used
                else:
                    used = max(0.0, used - max(0.0, now - at_s) * limit / 60)
                if at_s > now:
                    self.held[kind] = (used, now)
                counted[kind] = (used + amount, now)
            said.append(used)
            fits &= needed <= 0 or used + needed <= limit
        if fits:
            self.held.update(counted)
        return said


class SimulatedRedis:
    """Counts for all gateways, and does what a fault or a writer would do."""

    def __init__(self, now: Callable[[], float], rng: random.Random) -> None:
        self.clock_s = rng.choice((-600.0, 0.0, 600.0))
        self.use = CountedUse(lambda: now() + self.clock_s)
        self.fault = SOUND
        self._rng = rng
        self._old: list[dict[str, tuple[float, float]]] = [{}]

    def count(self, gateway: str, charges: Sequence[Charge]) -> Sequence[float] | None:
        """Return what the gateway reads within its deadline."""
        rng, held = self._rng, self.use.held
        if self.fault in ("stopped", "full"):
            return None
        if self.fault == "emptied" and rng.random() < 0.3:
            held.clear()
        if self.fault == "replayed" and rng.random() < 0.3:
            self.use.held = copy.copy(rng.choice(self._old))
        if self.fault == "inflated":
            of_kind = {charge.kind: charge.limit for charge in charges if charge.kind != "streams"}
            held |= {kind: (100.0 * limit, self.use.now()) for kind, limit in of_kind.items()}
        if self.fault == "garbled":
            return [rng.choice((-1e9, 0.0, 1.0, 1e9, math.nan, math.inf)) for _ in charges]
        if rng.random() < 0.1:
            self._old.append(copy.copy(held))
        said = self.use.count(gateway, charges)
        return None if self.fault == "slow" else said


class SimulatedUse(KeyUse):
    """The connection of one gateway."""

    def __init__(self, server: SimulatedRedis, gateway: str) -> None:
        self._server = server
        self._gateway = gateway

    async def count(self, key: str, charges: Sequence[Charge]) -> Sequence[float] | None:
        return self._server.count(self._gateway, charges)

    def report(self, key: str, charges: Sequence[Charge]) -> None:
        self._server.count(self._gateway, charges)


def done(work: Coroutine[None, None, None]) -> None:
    """Run what never waits."""
    with contextlib.suppress(StopIteration):
        work.send(None)
        raise AssertionError("it waits")


def entry(**limits: int) -> KeyEntry:
    return KeyEntry(digest="sha256:" + "0" * 64, tenant="t", **limits)  # type: ignore[arg-type]


class Fleet:
    """Gateways with one key, each with a wall clock of its own."""

    def __init__(self, num_gateways: int, key: KeyEntry, seed: int = 0, clocks_s: Sequence[float] = (0.0,)) -> None:
        self.now_s = 40_000.0
        self.num_gateways = num_gateways
        self.server = SimulatedRedis(lambda: self.now_s, random.Random(seed))
        self.num_started = 0
        self.usages: list[KeyUsage] = []
        self._key = key
        self._clocks_s = clocks_s
        self._renewed_s = self.now_s
        for number in range(num_gateways):
            self.usages.append(self.started(number))

    def started(self, place: int) -> KeyUsage:
        clock_s = self._clocks_s[place % len(self._clocks_s)]
        counter = SimulatedUse(self.server, f"g{self.num_started}")
        self.num_started += 1
        usage = KeyUsage(counter, "k", self.num_gateways, lambda: self.now_s + clock_s)
        usage.apply(self._key)
        return usage

    def restart(self, place: int) -> None:
        """Kill a gateway, with what it has open, and start another one."""
        self.usages[place] = self.started(place)

    def advance(self, seconds: float) -> None:
        end_s = self.now_s + seconds
        while self._renewed_s + LEASE_S / 4 <= end_s:
            self._renewed_s = self.now_s = max(self.now_s, self._renewed_s + LEASE_S / 4)
            for usage in self.usages:
                usage.renew_lease()
        self.now_s = end_s

    def opens(self, place: int, num_tokens: int = 0) -> bool:
        """Return whether a request was granted. It stays open."""
        usage = self.usages[place]
        try:
            done(usage.admit())
        except OverloadedError:
            return False
        try:
            if num_tokens:
                usage.take_tokens(num_tokens)
        except OverloadedError:
            usage.close()
            return False
        return True

    def asks(self, place: int, num_tokens: int = 0) -> bool:
        granted = self.opens(place, num_tokens)
        if granted:
            self.usages[place].close()
        return granted
