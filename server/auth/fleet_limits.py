"""Limits of keys over all gateways, pure: what each gateway owns of a limit, and what it gives to the others.

A counter that all gateways share would hold only while all of them read it. So there is none. Each gateway owns an
amount of every limit, and grants what it owns without asking. Redis carries signed records, and whoever writes there
without the secret can delay, remove or repeat them only. Each rule below holds under all of that:

    shares    a rate refills by 1/N of the limit, up to 1/N of it. N is `--limits-gateways`, or the number of gateways
              that were met and have not ended if that is more.
    gifts     a gateway may give what it owns. It takes the amount from its purse first, and leaves room for it. The
              other takes it once, until a time of its own clock that it published. What it has not taken returns when
              its record proves that.
    places    a gateway that starts takes a place that no other holds, and begins with what the last holder left. In
              a new place it begins with 1/N, or with nothing and by gifts if N others are there.
    the end   a gateway that stops gives away what the others can use. What one that was killed has left of rates
              counts as used.

So granted amounts are owned amounts: at most the limit, and one request for each gateway whose part is below one. An
old record can only move less. Without Redis nothing moves, and each gateway has its share. A debt stays with its place.
Gifts follow demand, so a key that is used through one gateway gets nearly all of its limit there.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Final

from msgspec import Meta, Struct

from cache.records import Count
from server.auth.limits import MINUTE_S, KeyUsage, Purse, PurseUse

FRESH_S: Final = 1.5
"""A gateway whose record has not advanced for this time is away."""
HELD_S: Final = 0.5
"""For this time a gateway that starts leaves alone the place of a record that does not advance."""
GONE_S: Final = 900.0
"""Beyond N, a gateway that does not advance has a share for this time."""
GIFT_S: Final = 1.0
"""For this time another gateway may take what a gateway gives it."""
MAX_GATEWAYS: Final = 1024
_IDLE_WEIGHT: Final = 0.0003
"""The demand of a gateway without requests, as a part of the limit."""
_GIVEN: Final = 0.99
"""The part of a purse up to which others fill it: the rest is for its own refill."""
_GRAIN: Final = 0.001
"""The least part of a limit that is given."""


class Gift(Struct, frozen=True, array_like=True):
    """Amounts that one gateway gives another, by purse."""

    number: Count
    until_s: float
    """By the clock of the one who takes it."""
    amounts: dict[str, Annotated[float, Meta(ge=0.0, le=1e15)]]


class GatewayRecord(Struct, frozen=True, array_like=True):
    """Everything that one gateway publishes. A purse's name is `KEY/LIMIT`."""

    number: Count
    """Grows with each record of the gateway."""
    is_last: bool
    clock_s: float
    wall_s: float
    place: Count
    share: Annotated[float, Meta(ge=0.0, le=1.0)]
    """0.0 until the gateway has begun."""
    gifts: dict[str, Gift]
    taken: dict[str, Count]
    """The number of the last gift of each gateway."""
    purses: dict[str, PurseUse]


@dataclass(slots=True, eq=False)
class _Peer:
    """Another gateway."""

    record: GatewayRecord
    read_s: float
    """When its record was first read, or last advanced."""
    has_advanced: bool = False
    taken: int = 0
    gift: Gift | None = None
    """Given, and neither taken nor returned."""
    gift_ends_s: float = -math.inf
    """After this time it can no longer be taken."""

    def may_hold(self, now_s: float) -> bool:
        """Return whether the gateway may still hold its place."""
        return not self.record.is_last and now_s - self.read_s < HELD_S


class FleetLimits:
    """This gateway's part of all limits. Owned by the event loop."""

    def __init__(
        self,
        name: str,
        usages: Callable[[], Mapping[str, KeyUsage]],
        clock: Callable[[], float],
        wall: Callable[[], float],
        min_gateways: int = 1,
    ) -> None:
        """`usages` returns the keys with limits. `min_gateways`: N."""
        self._name = name
        self._usages = usages
        self._clock = clock
        self._wall = wall
        self._min_gateways = min_gateways
        self._peers: dict[str, _Peer] = {}
        self._num_met = 1
        """The gateways that have not ended, with this one."""
        self._met_s = clock()
        """When as many were last here."""
        self._number = 0
        self._place = -1
        self._day = ""
        self.has_begun = False
        self._has_ended = False

    @property
    def share(self) -> float:
        return 1.0 / max(self._num_met, self._min_gateways)

    @property
    def part(self) -> float:
        """The part of each limit that this gateway and those with a recent record grant."""
        return min(1.0, self.share * (1 + len(self._fresh())))

    @property
    def is_ready(self) -> bool:
        """Whether this gateway has begun, and was given its part if it began with nothing."""
        has_part = self._place < self._min_gateways or any(peer.taken for peer in self._peers.values())
        return self.has_begun and has_part

    def _fresh(self, within_s: float = FRESH_S) -> dict[str, _Peer]:
        since_s, peers = self._clock() - within_s, self._peers.items()
        return {
            name: peer
            for name, peer in peers
            if peer.has_advanced and peer.read_s >= since_s and not peer.record.is_last
        }

    def _purses(self) -> dict[str, Purse]:
        return {f"{key}/{name}": purse for key, usage in self._usages().items() for name, purse in usage.purses.items()}

    def record(self, day: str, *, is_last: bool = False) -> GatewayRecord:
        """Return the record to publish. After the last one all are last: `run` may still publish."""
        if day != self._day:
            self._begin_day(day)
        self._hold()
        now_s, purses = self._clock(), self._purses()
        self._number += 1
        if self.has_begun and not self._has_ended:
            for peer in self._peers.values():
                if peer.gift is not None and now_s > peer.gift_ends_s:
                    self._move(purses, peer.gift, 0.0)
            self._give(purses, is_last=is_last)
        self._has_ended |= is_last
        used = {name: use for name, purse in purses.items() if (use := purse.use(now_s)) is not None}
        return GatewayRecord(
            self._number,
            self._has_ended,
            now_s,
            self._wall(),
            max(0, self._place),
            self.share if self.has_begun else 0.0,
            {name: peer.gift for name, peer in self._peers.items() if peer.gift is not None},
            {name: peer.taken for name, peer in self._peers.items() if peer.taken},
            used if self.has_begun else {},
        )

    def _begin_day(self, day: str) -> None:
        """Renew the budgets of a day, and forget the gateways that are not here."""
        fresh = self._fresh()
        self._peers = {name: peer for name, peer in self._peers.items() if name in fresh or peer.gift is not None}
        for peer in self._peers.values():
            if (gift := peer.gift) is not None:
                amounts = {name: amount for name, amount in gift.amounts.items() if not name.endswith("/day")}
                peer.gift = Gift(gift.number, gift.until_s, amounts)
        for usage in self._usages().values() if self._day else ():
            usage.begin_day()
        self._day = day

    def _hold(self) -> None:
        for key, usage in self._usages().items():
            if self.has_begun and usage.share != self.share:
                usage.hold(self.share, partial(self._elsewhere, key))

    def _elsewhere(self, key: str, limit: str, purse: Purse) -> float:
        """Return what the others have left of a limit."""
        return sum(self._party(peer, f"{key}/{limit}", purse)[0] for peer in self._fresh().values())

    def merge(self, records: Mapping[str, GatewayRecord]) -> None:
        """Take the records of the day; until this gateway has begun, with its own."""
        now_s, purses = self._clock(), self._purses()
        if self._has_ended:
            return
        for name, record in records.items():
            peer = self._peers.get(name)
            if peer is None and name != self._name and len(self._peers) < MAX_GATEWAYS:
                self._peers[name] = _Peer(record, now_s)
            elif peer is not None and record.number > peer.record.number:
                self._num_met -= record.is_last and peer.has_advanced
                peer.record, peer.read_s, peer.has_advanced = record, now_s, True
                if self.has_begun:
                    self._settle(peer, purses)
        num_here = 1 + len(self._fresh())
        if num_here >= self._num_met or now_s - self._met_s > GONE_S:
            self._num_met, self._met_s = num_here, now_s
        if not self.has_begun:
            self._find_place(now_s, records.get(self._name))

    def _find_place(self, now_s: float, own: GatewayRecord | None) -> None:
        """Choose a place, and begin once it is published and no other gateway has published the same."""
        holders = [peer for peer in self._peers.values() if peer.may_hold(now_s)]
        held = {peer.record.place for peer in holders}
        beyond = next(place for place in range(self._min_gateways, 2 * MAX_GATEWAYS) if place not in held)
        free = [place for place in range(self._min_gateways) if place not in held] or [beyond]
        if self._place in free:
            is_certain = self._place < self._min_gateways or all(peer.has_advanced for peer in holders)
            if own is not None and own.place == self._place and is_certain:
                self.begin()
        elif self._place not in held or random.random() < 0.5:  # of two that chose the same, one shall move
            ended_s = {peer.record.place: peer.record.wall_s for peer in self._peers.values()}
            self._place = max(free, key=lambda place: (ended_s.get(place, 0.0), random.random()))

    def begin(self) -> None:
        """Begin to grant, in the chosen place or a new one."""
        if self.has_begun:
            return
        now_s, wall_s, self.has_begun = self._clock(), self._wall(), True
        here = [peer for peer in self._peers.values() if peer.record.place == self._place and peer.record.share]
        ended = [peer.record for peer in here if not peer.may_hold(now_s)]
        last = max(ended, key=lambda record: record.wall_s, default=None)
        is_beyond = self._place >= self._min_gateways
        self._hold()
        for name, purse in self._purses().items():
            left = 0.0 if is_beyond else purse.part
            if last is not None:
                part = last.share * purse.limit
                left = last.purses[name].owned if name in last.purses else part
                if purse.is_rate:  # what was left at a kill is unknown
                    refill = max(0.0, wall_s - last.wall_s - GIFT_S) * part / MINUTE_S
                    left = min(part, (left if last.is_last else min(left, 0.0)) + refill)
            purse.own(now_s, min(left, 0.0) if is_beyond and purse.is_rate else left)

    def _settle(self, peer: _Peer, purses: Mapping[str, Purse]) -> None:
        """Take the gift in a new record, and what it proves that its owner has not taken."""
        record, gift, found = peer.record, peer.gift, peer.record.gifts.get(self._name)
        if found is not None and found.number > peer.taken and found.until_s > self._clock():
            peer.taken = found.number
            self._move(purses, found, 1.0)
        if gift is not None:
            is_taken = record.taken.get(self._name, 0) >= gift.number
            if is_taken or record.is_last or record.clock_s > gift.until_s:
                peer.gift = None
                self._move(purses, gift, 0.0 if is_taken else 1.0)

    def _move(self, purses: Mapping[str, Purse], gift: Gift, times: float) -> None:
        """Add the amounts of a gift to the purses, and keep the room of those that may still be taken."""
        now_s, peers = self._clock(), self._peers.values()
        away = [peer.gift.amounts for peer in peers if peer.gift is not None and now_s <= peer.gift_ends_s]
        for name, amount in gift.amounts.items():
            if (purse := purses.get(name)) is not None:
                purse.keep_room(now_s, sum([amounts.get(name, 0.0) for amounts in away]))
                purse.add(now_s, times * amount)

    def _party(self, peer: _Peer, name: str, purse: Purse) -> tuple[float, float, float]:
        """Return what a peer has left, its weight, and the most that it may hold."""
        use, part = peer.record.purses.get(name), peer.record.share * purse.limit
        left, demand = (part, 0.0) if use is None else (use.owned - use.open, use.demand)
        return left, demand + (_IDLE_WEIGHT * purse.limit if part else 0.0), _GIVEN * part if purse.is_rate else math.inf

    def _give(self, purses: Mapping[str, Purse], *, is_last: bool) -> None:
        """Give to the others what is theirs by demand, one gift each at a time; in the last record all that they use."""
        now_s, fresh = self._clock(), self._fresh(GIFT_S / 2).values()
        amounts: list[dict[str, float]] = [{} for _ in fresh]
        for name in purses if is_last else {name for peer in fresh for name in peer.record.purses}:
            if (purse := purses.get(name)) is None:
                continue
            left, weight = purse.left(now_s), 0.0 if is_last else purse.demand.at(now_s) + _IDLE_WEIGHT * purse.limit
            parties = [self._party(peer, name, purse) for peer in fresh]
            total, weights = left + sum([each[0] for each in parties]), weight + sum([each[1] for each in parties])
            if weights <= 0.0 or total <= 0.0:
                continue
            lacks = [min(most, total * weight / weights) - held for held, weight, most in parties]
            mine = left - total * weight / weights
            spare = mine + sum([-lack for lack in lacks if lack < 0.0])
            for each, lack in zip(amounts, lacks, strict=True):
                if mine > 0.0 and lack >= _GRAIN * purse.limit:
                    each[name] = lack * min(1.0, mine / spare)
        for peer, given in zip(fresh, amounts, strict=True):
            if peer.gift is None and given:
                peer.gift = Gift(self._number, peer.record.clock_s + GIFT_S, given)
                peer.gift_ends_s = now_s + 1.01 * GIFT_S
                self._move(purses, peer.gift, -1.0)
