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
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta, Struct

from cache.records import Count
from server.auth.identity import MAX_KEYS
from server.auth.limits import MINUTE_S, KeyUsage, Purse, PurseUse

FRESH_S: Final = 1.5
"""A gateway whose record has not advanced for this time is away."""
HELD_S: Final = 0.5
"""For this time a gateway that starts leaves alone the place of a record that does not advance."""
GONE_S: Final = 900.0
"""Beyond N, a gateway has a share until others' records were read for this time without its own."""
GIFT_S: Final = 1.0
"""For this time another gateway may take what a gateway gives it."""
MAX_GATEWAYS: Final = 1024
_IDLE_WEIGHT: Final = 0.0003
"""The demand of a gateway without requests, as a part of the limit."""
_GRAIN: Final = 0.001
"""The least part of a limit that is given."""
_Amount = Annotated[float, Meta(ge=0.0, le=1e15)]


class Gift(Struct, frozen=True, array_like=True):
    """Amounts that one gateway gives another, by purse."""

    number: Count
    until_s: float
    """By the clock of the one who takes it."""
    amounts: Annotated[dict[str, _Amount], Meta(max_length=4 * MAX_KEYS)]


class GatewayRecord(Struct, frozen=True, array_like=True):
    """Everything that one gateway publishes. A purse's name is `KEY/LIMIT`, and `KEY/DAY` for that of a day."""

    number: Count
    """Grows with each record of the gateway."""
    is_last: bool
    clock_s: float
    wall_s: float
    place: Count
    share: Annotated[float, Meta(ge=0.0, le=1.0)]
    """0.0 until the gateway has begun."""
    num_asked: Count
    gifts: Annotated[dict[str, Gift], Meta(max_length=MAX_GATEWAYS)]
    taken: Annotated[dict[str, Count], Meta(max_length=MAX_GATEWAYS)]
    """The number of the last gift of each gateway."""
    purses: Annotated[dict[str, PurseUse], Meta(max_length=4 * MAX_KEYS)]

    def owned(self, name: str, purse: Purse, wall_s: float) -> float:
        """Return what a gateway that has ended left of a limit."""
        use, part = self.purses.get(name), self.share * purse.limit
        owned = part if use is None else use.owned
        if not purse.is_rate:
            return owned
        refill = max(0.0, wall_s - self.wall_s - GIFT_S) * part / MINUTE_S
        return min(part, (owned if self.is_last else min(owned, 0.0)) + refill)


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
    """From this time it can no longer be taken."""


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
        """`usages` returns the keys with limits. `min_gateways`: share as at least that many."""
        self._name = name
        self._usages = usages
        self._clock = clock
        self._wall = wall
        self._min_gateways = min_gateways
        self._peers: dict[str, _Peer] = {}
        self._num_met = 1
        """The gateways that have not ended, as far as this one has met them."""
        self._met_s = clock()
        """When as many were last here."""
        self._number = 0
        self.has_begun = False
        self._has_ended = False
        self._day = ""
        self._place: int | None = None
        self._num_asked = 0
        self._read_s = -math.inf
        self.is_busy = False
        """A key was used, here or elsewhere, between the last two records."""

    @property
    def share(self) -> float:
        return 1.0 / max(self._num_met, self._min_gateways)

    @property
    def part(self) -> float:
        """The part of each limit that this gateway and those with a recent record grant."""
        return min(1.0, self.share * (1 + len(self._fresh())))

    def _fresh(self, within_s: float = FRESH_S) -> list[_Peer]:
        since_s = self._clock() - within_s
        peers = self._peers.values()
        return [peer for peer in peers if peer.has_advanced and not peer.record.is_last and peer.read_s >= since_s]

    def _name_of(self, key: str, limit: str) -> str:
        return f"{key}/{self._day if limit == 'day' else limit}"

    def _purses(self) -> dict[str, Purse]:
        return {
            self._name_of(key, name): purse
            for key, usage in self._usages().items()
            for name, purse in usage.purses.items()
        }

    def was_used(self) -> bool:
        """Return whether a key was used at this gateway since the last record."""
        return sum([usage.num_asked for usage in self._usages().values()]) != self._num_asked

    def record(self, day: str, *, is_last: bool = False) -> GatewayRecord:
        """Return the record to publish. After the last one all are last: `run` may still publish."""
        if day != self._day:
            fresh = self._fresh()
            self._peers = {name: peer for name, peer in self._peers.items() if peer in fresh or peer.gift is not None}
            for usage in self._usages().values() if self._day else ():
                usage.begin_day()
            self._day = day
        now_s, purses = self._clock(), self._purses()
        self._number += 1
        self.is_busy = self.was_used()
        self._num_asked = sum([usage.num_asked for usage in self._usages().values()])
        if self.has_begun and not self._has_ended:
            self._hold()
            for peer in self._peers.values():
                if peer.gift is not None and now_s > peer.gift_ends_s:
                    self._keep_room(purses, peer.gift.amounts)
            self._give(now_s, purses, is_last=is_last)
        self._has_ended |= is_last
        used = {name: use for name, purse in purses.items() if (use := purse.use(now_s)) is not None}
        return GatewayRecord(
            self._number,
            self._has_ended,
            now_s,
            self._wall(),
            self._place or 0,
            self.share if self.has_begun else 0.0,
            self._num_asked,
            {name: peer.gift for name, peer in self._peers.items() if peer.gift is not None},
            {name: peer.taken for name, peer in self._peers.items() if peer.taken},
            used if self.has_begun else {},
        )

    def merge(self, records: Mapping[str, GatewayRecord]) -> None:
        """Take the records of the day; until this gateway has begun, with its own."""
        now_s, purses = self._clock(), self._purses()
        own = records.get(self._name)
        if self._has_ended:
            return
        self._met_s += max(0.0, now_s - max(self._read_s, self._met_s) - FRESH_S)  # not read: proves nothing
        self._read_s = now_s
        for name, record in records.items():
            peer = self._peers.get(name)
            if peer is None:
                if name != self._name and len(self._peers) < MAX_GATEWAYS:
                    self._peers[name] = _Peer(record, now_s)
            elif record.number > peer.record.number:
                self.is_busy |= record.num_asked != peer.record.num_asked
                self._num_met -= record.is_last and peer.has_advanced
                peer.record, peer.read_s, peer.has_advanced = record, now_s, True
                if self.has_begun:
                    self._settle(peer, purses, now_s)
        num_here = 1 + len(self._fresh())
        if num_here >= self._num_met or now_s - self._met_s > GONE_S:
            self._num_met, self._met_s = num_here, now_s
        if not self.has_begun:
            self._find_place(now_s, None if own is None else own.place)

    def missed(self) -> bool:
        """Record that nothing could be read. Return whether that has lasted."""
        return self._clock() - self._read_s > FRESH_S

    def _find_place(self, now_s: float, published: int | None) -> None:
        """Choose a place, and begin once it is published and no other gateway chose it before."""
        waiting = [peer for peer in self._peers.values() if self._may_hold(peer, now_s)]
        held = {peer.record.place for peer in waiting}
        beyond = next(place for place in range(self._min_gateways, 2 * MAX_GATEWAYS) if place not in held)
        free = [place for place in range(self._min_gateways) if place not in held] or [beyond]
        if self._place in free:
            is_certain = self._place < self._min_gateways or all(peer.has_advanced for peer in waiting)
            if published == self._place and is_certain:
                self.begin()
        elif self._place not in held or random.random() < 0.5:  # of two that chose the same, one shall move
            ended_s = {peer.record.place: peer.record.wall_s for peer in self._peers.values()}
            self._place = max(free, key=lambda place: (ended_s.get(place, 0.0), random.random()))

    def _may_hold(self, peer: _Peer, now_s: float) -> bool:
        return not peer.record.is_last and now_s - peer.read_s < HELD_S

    @property
    def is_ready(self) -> bool:
        """Whether this gateway has begun, and was given its part if it began with nothing."""
        is_beyond = self._place is not None and self._place >= self._min_gateways
        return self.has_begun and (not is_beyond or any(peer.taken for peer in self._peers.values()))

    def begin(self) -> None:
        """Begin to grant, in the chosen place or a new one."""
        if self.has_begun:
            return
        now_s, wall_s, place = self._clock(), self._wall(), self._place
        ended = [peer.record for peer in self._peers.values() if not self._may_hold(peer, now_s)]
        here = [record for record in ended if record.place == place and record.share]
        last = max(here, key=lambda record: record.wall_s, default=None)
        is_beyond = place is not None and place >= self._min_gateways
        self.has_begun = True
        self._hold()
        for name, purse in self._purses().items():
            owned = last.owned(name, purse, wall_s) if last is not None else 0.0 if is_beyond else purse.part
            purse.own(now_s, min(owned, 0.0) if is_beyond and purse.is_rate else owned)

    def _hold(self) -> None:
        share = self.share
        for key, usage in self._usages().items():
            if usage.share != share:
                usage.hold(share, lambda name, purse, key=key: self._elsewhere(self._name_of(key, name), purse))  # type: ignore[misc]

    def _elsewhere(self, name: str, purse: Purse) -> float:
        """Return what the others have left of a limit."""
        return sum(self._party(peer, name, purse)[0] for peer in self._fresh())

    def _settle(self, peer: _Peer, purses: Mapping[str, Purse], now_s: float) -> None:
        """Take the gift in a new record, and what it proves that its owner has not taken."""
        record, gift = peer.record, peer.gift
        found = record.gifts.get(self._name)
        if found is not None and found.number > peer.taken and found.until_s > now_s:
            peer.taken = found.number
            self._move(purses, found.amounts, 1.0)
        if gift is not None:
            is_taken = record.taken.get(self._name, 0) >= gift.number
            if is_taken or record.is_last or record.clock_s > gift.until_s:
                peer.gift = None
                self._keep_room(purses, gift.amounts)
                self._move(purses, gift.amounts, 0.0 if is_taken else 1.0)

    def _move(self, purses: Mapping[str, Purse], amounts: Mapping[str, float], times: float) -> None:
        self.is_busy = True
        for name, amount in amounts.items():
            if (purse := purses.get(name)) is not None:
                purse.add(self._clock(), times * amount)

    def _keep_room(self, purses: Mapping[str, Purse], names: Iterable[str]) -> None:
        """Keep the room of gifts that may still be taken."""
        now_s, peers = self._clock(), self._peers.values()
        gifts = [peer.gift.amounts for peer in peers if peer.gift is not None and now_s <= peer.gift_ends_s]
        for name in names:
            if (purse := purses.get(name)) is not None:
                purse.keep_room(now_s, sum([amounts.get(name, 0.0) for amounts in gifts]))

    def _party(self, peer: _Peer, name: str, purse: Purse) -> tuple[float, float, float]:
        """Return what a peer has left, its weight, and the most that it may hold."""
        use, part = peer.record.purses.get(name), peer.record.share * purse.limit
        left, demand = (part, 0.0) if use is None else (use.owned - use.open, use.demand)
        return left, demand + (_IDLE_WEIGHT * purse.limit if part else 0.0), part if purse.is_rate else math.inf

    def _arriving(self) -> Counter[tuple[str, str]]:
        """Return the amounts that are given and not yet taken, by gateway and purse."""
        arriving: Counter[tuple[str, str]] = Counter()
        for giver, peer in self._peers.items():
            gifts = [(giver, to, gift) for to, gift in peer.record.gifts.items()]
            for name, to, gift in gifts if peer.gift is None else [*gifts, (self._name, giver, peer.gift)]:
                taker = self._peers.get(to)
                if taker is not None and taker.record.taken.get(name, 0) < gift.number:
                    arriving.update({(to, purse): amount for purse, amount in gift.amounts.items()})
        return arriving

    def _give(self, now_s: float, purses: Mapping[str, Purse], *, is_last: bool) -> None:
        """Give to the others what is theirs by demand, one gift each at a time; in the last record all that they use."""
        fresh = [(name, peer) for name, peer in self._peers.items() if peer in self._fresh(GIFT_S / 2)]
        amounts: list[dict[str, float]] = [{} for _ in fresh]
        arriving = self._arriving()
        for name in purses if is_last else {name for _, peer in fresh for name in peer.record.purses}:
            purse = purses.get(name)
            if purse is None:
                continue
            left, weight = purse.left(now_s), 0.0 if is_last else purse.demand.at(now_s) + _IDLE_WEIGHT * purse.limit
            parties = [(*self._party(peer, name, purse), arriving[other, name]) for other, peer in fresh]
            weights = weight + sum(each[1] for each in parties)
            if weights <= 0.0:
                continue
            level = max(0.0, left + sum(held + more for held, _, _, more in parties)) / weights
            mine = max(0.0, left - level * weight)
            lacks = [min(most, level * weight) - held - more for held, weight, most, more in parties]
            spare = mine + sum(-lack for lack in lacks if lack < 0.0)
            for each, lack in zip(amounts, lacks, strict=True):
                given = lack * min(1.0, mine / spare) if spare > 0.0 else 0.0
                if given > 0.0 and lack >= _GRAIN * purse.limit:
                    each[name] = given
        for (_, peer), given_amounts in zip(fresh, amounts, strict=True):
            if peer.gift is None and given_amounts:
                peer.gift = Gift(self._number, peer.record.clock_s + GIFT_S, given_amounts)
                peer.gift_ends_s = now_s + 1.01 * GIFT_S
                self._move(purses, given_amounts, -1.0)
                self._keep_room(purses, given_amounts)
