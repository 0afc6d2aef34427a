"""Limits of keys over all gateways, pure: what each gateway owns of a limit, and what it gives to the others.

A counter that all gateways share would hold only while all of them read it. So there is none. Each gateway owns an
amount of every limit, and grants what it owns without asking. Redis carries signed records, and whoever writes there
without the secret can delay, remove or repeat them only. Each rule below holds under all of that:

    shares    a rate refills by 1/N of the limit, up to 1/N of it. N is `--limits-gateways`, or the number of gateways
              that were met and have not ended if that is more.
    gifts     a gateway may give what it owns. It takes the amount from its allotment first, and leaves room for it. The
              other takes it once, until a time of its own clock that it published. What it has not taken returns when
              its record proves that.
    places    a gateway that starts takes a place that no other holds, and begins with what the last holder left. In
              a new place it begins with 1/N, or with nothing and by gifts if N others are there.
    the end   a gateway that stops gives away what the others use. What one that was killed has left of rates counts
              as used.

So granted amounts are owned amounts: at most the limit, and less than one request more for each gateway. An old record
can only move less. Without Redis nothing moves, and each gateway has its share. A debt stays with its place. Gifts
follow demand, so a key that is used through one gateway gets nearly all of its limit there.
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta, Struct

from cache.records import Count
from server.rates import DecayedSum

FRESH_S: Final = 1.5
"""A gateway whose record has not advanced for this time is away."""
HELD_S: Final = 0.5
"""For this time a gateway that starts does not take the place of a record that does not advance."""
GONE_S: Final = 900.0
"""For this time a gateway beyond `--limits-gateways` that does not advance has a share."""
GIFT_S: Final = 1.0
"""For this time another gateway may take what a gateway gives it."""
MINUTE_S: Final = 60.0  # the unit of the limits of rates
MAX_GATEWAYS: Final = 1024  # of which records are kept: bounds the memory of a day with many restarts
_DEMAND_S: Final = 5.0  # of the mean demand: at half, single requests move amounts; at twice, limits lag
_IDLE_WEIGHT: Final = 0.0003
"""The demand of a gateway without requests, as a part of the limit."""
_GIVEN: Final = 0.99
"""The part of an allotment up to which others fill it: the rest is for its own refill."""
_GRAIN: Final = 0.001
"""The least part of a limit that is given."""
Clock = Callable[[], float]
_Level = Annotated[float, Meta(ge=-1e15, le=1e15)]


class AllotmentUse(Struct, frozen=True, array_like=True, gc=False):
    """An allotment as other gateways read it. One that is not listed is untouched."""

    owned: _Level
    open: _Level
    demand: _Level
    """The amount that was asked for lately, granted or not."""


class Gift(Struct, frozen=True, array_like=True):
    """Amounts that one gateway gives another, by allotment."""

    number: Count
    until_s: float
    """By the clock of the one who takes it."""
    amounts: dict[str, Annotated[float, Meta(ge=0.0, le=1e15)]]


class GatewayRecord(Struct, frozen=True, array_like=True):
    """Everything that one gateway publishes."""

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
    allotments: dict[str, AllotmentUse]

    def owned(self, allotment: Allotment) -> float:
        use = self.allotments.get(allotment.name)
        return self.share * allotment.limit if use is None else use.owned

    def left(self, allotment: Allotment) -> float:
        """Return what the gateway has left of a limit."""
        use = self.allotments.get(allotment.name)
        return self.share * allotment.limit if use is None else use.owned - use.open


class Allotment:
    """A gateway's part of one limit of a key. A rate refills up to its share of a minute's worth; a count does not."""

    __slots__ = ("_at_s", "_away", "_owned", "demand", "is_rate", "limit", "name", "open", "share")

    def __init__(self, name: str, limit: float, share: float) -> None:
        """`name`: KEY/LIMIT."""
        self.name = name
        self.limit = limit
        self.share = share
        self.is_rate = name.endswith(("/requests", "/tokens"))
        self.open = 0
        """The amount in use that comes back: open requests."""
        self.demand = DecayedSum(_DEMAND_S)
        self._away = 0.0
        """The amount that was given and may still be taken."""
        self._owned = self.part
        self._at_s = 0.0

    @property
    def part(self) -> float:
        return self.share * self.limit

    def owned(self, now_s: float) -> float:
        """Return the amount that this gateway may grant, or has open; negative when overdrawn."""
        if not self.is_rate:
            return self._owned
        most, refill = self.part - self._away, (now_s - self._at_s) * self.limit / MINUTE_S
        if self._owned > most:  # runs off as the others' parts refill
            return max(most, self._owned - refill * (1.0 - self.share))
        return min(most, self._owned + refill * self.share)

    def left(self, now_s: float) -> float:
        return self.owned(now_s) - self.open

    def own(self, now_s: float, amount: float) -> None:
        self._owned, self._at_s = amount, now_s

    def add(self, now_s: float, amount: float) -> None:
        """Add an amount, or use one that is negative."""
        self.own(now_s, self.owned(now_s) + amount)

    def move(self, now_s: float, amount: float, away: float) -> None:
        """Add the amount of a gift, and keep room for what is given and may still be taken."""
        self.add(now_s, amount)
        self._away = away

    def resize(self, now_s: float, limit: float, share: float) -> None:
        """Have another share or limit. What was used stays used; a share moves nothing."""
        owned = self.owned(now_s) + (0.0 if self.is_rate else self.share * (limit - self.limit))
        self.own(now_s, min(owned, self.share * limit) if limit < self.limit and self.is_rate else owned)
        self.limit, self.share = limit, share

    def take(self, now_s: float, amount: float) -> float:
        """Take `amount` of a rate and return 0.0, or take nothing and return the seconds until it can be taken.

        A full allotment grants more than it holds, and a part of a limit less than one more. Both are then overdrawn.
        """
        owned, needed = self.owned(now_s), min(amount, self.part)
        self.demand.add(amount, now_s)
        if owned < needed and (self.share == 1.0 or amount - owned >= 1.0):
            return (needed - owned) * MINUTE_S / self.part
        self.add(now_s, -amount)
        return 0.0

    def use(self, now_s: float) -> AllotmentUse | None:
        """Return what to publish; None if untouched."""
        demand, owned = self.demand.at(now_s), self.owned(now_s)
        is_untouched = owned == self.part and (self.is_rate or (demand < 1.0 and not self.open))
        return None if is_untouched else AllotmentUse(owned, self.open, demand)


@dataclass(slots=True, eq=False)
class _Peer:
    """Another gateway."""

    name: str
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
        self, name: str = "", num_gateways: int = 1, clock: Clock = time.monotonic, wall: Clock = time.time
    ) -> None:
        """`num_gateways`: share as at least that many."""
        self.allotments: dict[str, Allotment] = {}
        """By name. Keys add and remove theirs."""
        self.clock = clock
        self.has_begun = False
        self._name = name
        self._num_gateways = num_gateways
        self._wall = wall
        self._peers: dict[str, _Peer] = {}
        self._num_met = 1
        """The gateways that have not ended, with this one."""
        self._met_s = clock()
        """When as many were last here."""
        self._number = 0
        self._place = -1
        self._day = ""
        self._has_ended = False

    @property
    def share(self) -> float:
        return 1.0 / max(self._num_met, self._num_gateways)

    @property
    def part(self) -> float:
        """The part of each limit that this gateway and those with a recent record grant."""
        return min(1.0, self.share * (1 + len(self._fresh())))

    @property
    def is_ready(self) -> bool:
        """True once this gateway may grant: it has begun with its part, or with nothing and was given some."""
        return self.has_begun and (not self._is_beyond or any(peer.taken for peer in self._peers.values()))

    @property
    def _is_beyond(self) -> bool:
        return self._place >= self._num_gateways

    def _fresh(self, within_s: float = FRESH_S) -> list[_Peer]:
        since_s, peers = self.clock() - within_s, self._peers.values()
        return [peer for peer in peers if peer.has_advanced and peer.read_s >= since_s and not peer.record.is_last]

    def elsewhere(self, allotment: Allotment) -> float:
        """Return what the others have left of a limit."""
        return sum([peer.record.left(allotment) for peer in self._fresh()])

    def record(self, day: str, *, is_last: bool) -> GatewayRecord:
        """Return the record to publish. After the last one all are last: `run` may still publish."""
        now_s = self.clock()
        if day != self._day:
            self._begin_day(now_s, day)
        self._number += 1
        if self.has_begun and not self._has_ended:
            for peer in self._peers.values():
                if peer.gift is not None and now_s > peer.gift_ends_s:
                    self._move(peer.gift, 0.0)
            self._give(now_s, is_last=is_last)
        self._has_ended |= is_last
        owned = self.allotments if self.has_begun else {}
        return GatewayRecord(
            self._number,
            self._has_ended,
            now_s,
            self._wall(),
            max(0, self._place),
            self.share if self.has_begun else 0.0,
            {name: peer.gift for name, peer in self._peers.items() if peer.gift is not None},
            {name: peer.taken for name, peer in self._peers.items() if peer.taken},
            {name: use for name, allotment in owned.items() if (use := allotment.use(now_s)) is not None},
        )

    def _begin_day(self, now_s: float, day: str) -> None:
        """Renew the budgets of a day, and forget the gateways that are not here."""
        fresh = self._fresh()
        self._peers = {name: peer for name, peer in self._peers.items() if peer in fresh or peer.gift is not None}
        for peer in self._peers.values():
            if (gift := peer.gift) is not None:
                amounts = {name: amount for name, amount in gift.amounts.items() if not name.endswith("/day")}
                peer.gift = Gift(gift.number, gift.until_s, amounts)
        for name, allotment in self.allotments.items():
            if name.endswith("/day"):
                allotment.own(now_s, allotment.part)
        self._day = day

    def merge(self, records: Mapping[str, GatewayRecord]) -> None:
        """Take the records of the day; until this gateway has begun, with its own."""
        now_s = self.clock()
        if self._has_ended:
            return
        for name, record in records.items():
            peer = self._peers.get(name)
            if peer is None and name != self._name and len(self._peers) < MAX_GATEWAYS:
                self._peers[name] = _Peer(name, record, now_s)
            elif peer is not None and record.number > peer.record.number:
                self._num_met -= peer.has_advanced and record.is_last > peer.record.is_last
                peer.record, peer.read_s, peer.has_advanced = record, now_s, True
                if self.has_begun:
                    self._settle(peer)
        num_here = 1 + len(self._fresh())
        if num_here >= self._num_met or now_s - self._met_s > GONE_S:
            self._num_met, self._met_s = num_here, now_s
        for allotment in self.allotments.values():
            if allotment.share != self.share:
                allotment.resize(now_s, allotment.limit, self.share)
        if not self.has_begun:
            self._find_place(now_s, records.get(self._name))

    def _find_place(self, now_s: float, own: GatewayRecord | None) -> None:
        """Choose a place, and begin once it is published and no other gateway has published the same."""
        holders = [peer for peer in self._peers.values() if peer.may_hold(now_s)]
        held = {peer.record.place for peer in holders}
        beyond = next(place for place in range(self._num_gateways, 2 * MAX_GATEWAYS) if place not in held)
        free = [place for place in range(self._num_gateways) if place not in held] or [beyond]
        if self._place in free:
            is_certain = not self._is_beyond or all(peer.has_advanced for peer in holders)
            if own is not None and own.place == self._place and is_certain:
                self.begin()
            return
        same = [peer for peer in holders if peer.record.place == self._place]
        if not same or any(peer.record.share or peer.name < self._name for peer in same):  # else the others move
            ended_s = {peer.record.place: peer.record.wall_s for peer in self._peers.values()}
            self._place = max(free, key=lambda place: (ended_s.get(place, 0.0), random.random()))

    def begin(self) -> None:
        """Begin to grant, in the chosen place or a new one."""
        if self.has_begun:
            return
        now_s, wall_s, self.has_begun = self.clock(), self._wall(), True
        peers = [peer for peer in self._peers.values() if peer.record.share]
        held = [peer.record for peer in peers if peer.record.place == self._place and not peer.may_hold(now_s)]
        last = max(held, key=lambda record: record.wall_s, default=None)
        has_part = not self._is_beyond and sum([peer.record.share for peer in self._fresh()]) + self.share < 1.001
        others = {peer.record.place: peer.record for peer in sorted(peers, key=lambda peer: peer.record.wall_s)}
        num_new = max(1, self._num_gateways - sum([place < self._num_gateways for place in others]))
        for allotment in self.allotments.values():
            left = allotment.limit / self._num_gateways if has_part else 0.0
            if has_part and last is None and not allotment.is_rate:  # a holder of yesterday may have given its part
                owned = sum([record.owned(allotment) for record in others.values()])
                left = max(0.0, min(left, (allotment.limit - owned) / num_new))
            if last is not None:
                part, left = last.share * allotment.limit, last.owned(allotment)
                if allotment.is_rate:  # what was left at a kill is unknown; beyond N, others refilled this part too
                    refill_s = wall_s - last.wall_s - GIFT_S if last.share * self._num_gateways > 0.999 else 0.0
                    left = min(part, (left if last.is_last else min(left, 0.0)) + max(0.0, refill_s) * part / MINUTE_S)
            allotment.own(now_s, left if has_part or not allotment.is_rate else min(left, 0.0))

    def _settle(self, peer: _Peer) -> None:
        """Take the gift in a new record, and what it proves that its owner has not taken."""
        record, gift, found = peer.record, peer.gift, peer.record.gifts.get(self._name)
        if found is not None and found.number > peer.taken and found.until_s > self.clock():
            peer.taken = found.number
            self._move(found, 1.0)
        if gift is not None:
            is_taken = record.taken.get(self._name, 0) >= gift.number
            if is_taken or record.is_last or record.clock_s > gift.until_s:
                peer.gift = None
                self._move(gift, 0.0 if is_taken else 1.0)

    def _move(self, gift: Gift, times: float) -> None:
        """Add the amounts of a gift to the allotments, and keep the room of those that may still be taken."""
        now_s, peers = self.clock(), self._peers.values()
        away = [peer.gift.amounts for peer in peers if peer.gift is not None and now_s <= peer.gift_ends_s]
        for name, amount in gift.amounts.items():
            if (allotment := self.allotments.get(name)) is not None:
                allotment.move(now_s, times * amount, sum([amounts.get(name, 0.0) for amounts in away]))

    def _arriving(self) -> Counter[tuple[str, str]]:
        """Return the amounts that are given and not yet taken, by gateway and allotment."""
        arriving: Counter[tuple[str, str]] = Counter()
        for peer in self._fresh():
            gifts = [] if peer.gift is None else [(peer.name, peer.gift)]
            for taker, gift in [*gifts, *peer.record.gifts.items()]:
                known = self._peers.get(taker)
                if known is not None and (gift is peer.gift or known.record.taken.get(peer.name, 0) < gift.number):
                    arriving.update({(taker, name): amount for name, amount in gift.amounts.items()})
        return arriving

    def _give(self, now_s: float, *, is_last: bool) -> None:
        """Give to each of the others what is theirs by demand; in the last record, all that they use."""
        records = [(peer, peer.record) for peer in self._fresh(GIFT_S / 2) if peer.record.share]
        amounts: list[dict[str, float]] = [{} for _ in records]
        arriving = self._arriving()
        for name in self.allotments if is_last else {name for _, record in records for name in record.allotments}:
            if (allotment := self.allotments.get(name)) is None:
                continue
            idle = _IDLE_WEIGHT * allotment.limit
            weight = 0.0 if is_last else idle + allotment.demand.at(now_s)
            uses = [record.allotments.get(name) for _, record in records]
            weights = [idle if use is None else idle + use.demand for use in uses]
            left = allotment.left(now_s)
            lefts = [record.left(allotment) + arriving[peer.name, name] for peer, record in records]
            level = (left + sum(lefts)) / (weight + sum(weights)) if weights else 0.0
            most = [_GIVEN * record.share * allotment.limit if allotment.is_rate else math.inf for _, record in records]
            lacks = [min(*each) - held for *each, held in zip(most, [level * w for w in weights], lefts, strict=True)]
            mine = left - level * weight
            spare = mine + sum([-lack for lack in lacks if lack < 0.0])
            for each, lack in zip(amounts, lacks, strict=True):
                if level > 0.0 and mine > 0.0 and lack >= _GRAIN * allotment.limit:
                    each[name] = lack * min(1.0, mine / spare)
        for (peer, record), given in zip(records, amounts, strict=True):
            if peer.gift is None and given:
                peer.gift = Gift(self._number, record.clock_s + GIFT_S, given)
                peer.gift_ends_s = now_s + 1.01 * GIFT_S
                self._move(peer.gift, -1.0)
