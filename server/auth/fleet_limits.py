"""Limits of keys over all gateways, pure: what each gateway owns of a limit, and what it gives to the others.

A counter that all gateways share would hold only while all of them read it. So there is none. Each gateway owns a share
of every limit, and grants what it owns without asking. Redis carries signed records, and whoever writes there without
the secret can delay, remove or repeat them only. Each rule below holds under all of that:

    shares    all shares together are at most 1. N is `--limits-gateways`, or the number of gateways that have not
              ended if that is more. A share falls to 1/N at once. It rises only into room that the records of all
              others leave. A record names all gateways that its owner has seen, and one that is only named has 1/N.
    gifts     a gateway may give what it owns. It takes the amount from its purse first. The other takes it once, until
              a time of its own clock that it published itself. What it did not take returns when it proves that.
    the end   a gateway has ended when its last record states it, or its process is gone. Absence is no
              proof: only after 15 minutes of sound reads without a record does it count as one.

So granted amounts are owned amounts: at most the limit, and one request for each gateway whose part is below one. An
old record can only move less. Without Redis nothing moves, and each gateway has its share. A debt stays in its purse.
Gifts follow demand, so a key that is used through one gateway gets nearly all of its limit there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta, Struct

from cache.records import Count
from server.auth.identity import MAX_KEYS
from server.auth.limits import GIFT_S, KeyUsage, Purse, PurseUse

FRESH_S: Final = 1.5
"""A gateway whose record has not advanced for this time is away."""
GONE_S: Final = 900.0
"""It has ended if others' records have been read for this time without it."""
MAX_GATEWAYS: Final = 1024
_IDLE_WEIGHT: Final = 0.001
"""The demand of a gateway without requests, as a part of its share."""
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
    """Everything that one gateway publishes. A purse's name is `KEY/LIMIT`."""

    number: Count
    """Grows with each record of the gateway."""
    is_last: bool
    day: str
    clock_s: float
    place: str
    """The process, for gateways of the same machine."""
    share: Annotated[float, Meta(ge=0.0, le=1.0)]
    num_asked: Count
    gateways: Annotated[frozenset[str], Meta(max_length=MAX_GATEWAYS)]
    """The others that have not ended, in its view."""
    gifts: Annotated[dict[str, Gift], Meta(max_length=MAX_GATEWAYS)]
    taken: Annotated[dict[str, Count], Meta(max_length=MAX_GATEWAYS)]
    """The number of the last gift of each gateway."""
    purses: Annotated[dict[str, PurseUse], Meta(max_length=4 * MAX_KEYS)]


@dataclass(slots=True, eq=False)
class _Peer:
    """Another gateway."""

    record: GatewayRecord
    advanced_s: float
    """When its record was first read, or last advanced."""
    has_ended: bool = False
    is_past: bool = False
    """Its share was left to others."""
    taken: int = 0
    gift: Gift | None = None
    """Given, and neither taken nor returned."""


class FleetLimits:
    """This gateway's share of all limits. Owned by the event loop."""

    def __init__(
        self,
        name: str,
        usages: Callable[[], Mapping[str, KeyUsage]],
        clock: Callable[[], float],
        *,
        min_gateways: int = 1,
        place: str = "",
        is_gone: Callable[[str], bool] = lambda place: False,
    ) -> None:
        """`usages` returns the keys with limits. `is_gone`: whether the process at a place has certainly ended."""
        self._name = name
        self._usages = usages
        self._clock = clock
        self._min_gateways = min_gateways
        self._place = place
        self._is_gone = is_gone
        self._peers: dict[str, _Peer] = {}
        self._number = 0
        self._has_ended = False
        self._day = ""
        self._num_asked = 0
        self._share = 0.0
        self._intact_s = math.inf
        """Since when reads have been answered with the own last record, without a gap."""
        self._read_s = -math.inf
        self.is_busy = False
        """A key was used, here or elsewhere, between the last two records."""
        for usage in usages().values():
            usage.share("", 0.0, lambda name, purse: 1.0, self._elsewhere)

    @property
    def part(self) -> float:
        """The part of each limit that the gateways with a recent record hold together."""
        return min(1.0, self._share + sum(peer.record.share for peer in self._fresh()))

    def _fresh(self, within_s: float = FRESH_S) -> list[_Peer]:
        since_s = self._clock() - within_s
        return [peer for peer in self._peers.values() if not peer.has_ended and peer.advanced_s >= since_s]

    def _living(self) -> dict[str, _Peer]:
        return {name: peer for name, peer in self._peers.items() if not peer.has_ended}

    def _purses(self) -> dict[str, Purse]:
        return {f"{key}/{name}": purse for key, usage in self._usages().items() for name, purse in usage.purses.items()}

    def was_used(self) -> bool:
        """Return whether a key was used at this gateway since the last record."""
        return sum([usage.num_asked for usage in self._usages().values()]) != self._num_asked

    def record(self, day: str, *, is_last: bool = False) -> GatewayRecord:
        """Return the record to publish. After the last one all are last: `run` may still publish."""
        if day != self._day:
            self._peers, self._day = self._living(), day
            for usage in self._usages().values():
                usage.begin_day()
        now_s, purses = self._clock(), self._purses()
        self._number += 1
        self._has_ended |= is_last
        self.is_busy = self.was_used()
        self._num_asked = sum([usage.num_asked for usage in self._usages().values()])
        if not self._has_ended:
            self._give(now_s, purses)
        living = self._living()
        used = {name: use for name, purse in purses.items() if (use := purse.use(now_s)) is not None}
        gifts = {name: peer.gift for name, peer in living.items() if peer.gift is not None}
        return GatewayRecord(
            self._number,
            self._has_ended,
            day,
            now_s,
            self._place,
            self._share,
            self._num_asked,
            frozenset(living),
            gifts,
            {name: peer.taken for name, peer in living.items() if peer.taken},
            used,
        )

    def merge(self, records: Mapping[str, GatewayRecord], *, is_intact: bool) -> None:
        """Take the other gateways' records. `is_intact`: this gateway's last one was found as it was written."""
        now_s, purses = self._clock(), self._purses()
        if self._has_ended:
            return
        if not is_intact or now_s - self._read_s > FRESH_S:
            self._intact_s = now_s
        self._read_s = now_s
        for name, record in records.items():
            peer = self._peers.get(name)
            if peer is None and len(self._peers) < MAX_GATEWAYS:
                peer = self._peers[name] = _Peer(record, now_s)
            elif peer is None or record.number <= peer.record.number:
                continue
            self.is_busy |= record.num_asked != peer.record.num_asked
            peer.record, peer.advanced_s, peer.has_ended = record, now_s, False
            self._settle(peer, purses, now_s)
        for peer in self._living().values():
            is_away = now_s - peer.advanced_s > FRESH_S
            is_gone = is_away and now_s - max(self._intact_s, peer.advanced_s) >= GONE_S
            if peer.record.is_last or is_gone or (is_away and self._is_gone(peer.record.place)):
                peer.has_ended, peer.gift = True, None
        self._hold_share()

    def missed(self) -> bool:
        """Record that nothing could be read. Return whether that has lasted."""
        self._hold_share()
        return self._clock() - self._read_s > FRESH_S

    def _settle(self, peer: _Peer, purses: Mapping[str, Purse], now_s: float) -> None:
        """Take the gift in a new record, and what it proves that its owner has not taken."""
        record, gift = peer.record, peer.gift
        found = record.gifts.get(self._name)
        if found is not None and found.number > peer.taken and found.until_s > now_s:
            peer.taken = found.number
            self._move(purses, found.amounts, 1.0, record.day)
        if gift is not None:
            is_taken = record.taken.get(self._name, 0) >= gift.number
            if is_taken or record.is_last or record.clock_s > gift.until_s:
                peer.gift = None
                self._move(purses, gift.amounts, 0.0 if is_taken else 1.0, record.day)

    def _move(self, purses: Mapping[str, Purse], amounts: Mapping[str, float], times: float, day: str) -> None:
        self.is_busy = True
        for name, amount in amounts.items():
            purse = purses.get(name)
            if purse is not None and (day == self._day or not name.endswith("/day")):
                purse.add(self._clock(), times * amount)
                purse.owed -= 0.0 if purse.is_rate else times * amount

    def _hold_share(self) -> None:
        """Hold the share that the others leave; before anything was read, that of the options."""
        living = self._living()
        named = {name for peer in living.values() for name in peer.record.gateways} - {self._name, *self._peers}
        num_gateways = max(1 + len(living) + len(named), self._min_gateways)
        room = 1.0 - sum(peer.record.share for peer in living.values()) - len(named) / num_gateways
        share = 1.0 / num_gateways
        if self._read_s > -math.inf:
            share = min(share, max(self._share, room))
        left = [peer for peer in self._peers.values() if peer.has_ended and not peer.is_past]
        if num_gateways > self._min_gateways and not (left and self._share):
            left += living.values()
        self._share = share
        for key, usage in self._usages().items():
            if usage.fleet_share != share:
                usage.share(key, share, lambda name, purse: self._full(name, purse, left), self._elsewhere)
        for peer in self._peers.values():
            peer.is_past = peer.has_ended

    def _full(self, name: str, purse: Purse, left: Sequence[_Peer]) -> float:
        """Return how full the part of a purse is that others have left, as their records prove."""
        least = math.inf
        for peer in [*left, *self._living().values()] if purse.is_rate else left:
            use, is_killed = peer.record.purses.get(name), peer.has_ended and not peer.record.is_last
            if is_killed and (purse.is_rate or name.endswith("/day")):  # it may have used all since its last record
                return 0.0
            if use is None or purse.is_rate or not peer.has_ended or not peer.record.share:
                least = min(least, 0.0 if use is not None else 1.0)
            else:
                least = min(least, 1.0 - use.owed / (peer.record.share * purse.limit))
        return 1.0 if least == math.inf else least

    def _elsewhere(self, name: str, purse: Purse) -> float | None:
        """Return what the others have left of a limit; None if no record is recent."""
        fresh = self._fresh()
        return sum(self._party(peer, name, purse)[0] for peer in fresh) if fresh else None

    def _party(self, peer: _Peer, name: str, purse: Purse) -> tuple[float, float, float]:
        """Return a peer's level, its weight, and the most that it may hold."""
        share = peer.record.share
        use = peer.record.purses.get(name)
        capacity = purse.capacity(share) if purse.is_rate else math.inf
        idle = _IDLE_WEIGHT * share * purse.limit
        return (purse.capacity(share), idle, capacity) if use is None else (use.level, use.demand + idle, capacity)

    def _give(self, now_s: float, purses: Mapping[str, Purse]) -> None:
        """Give to the others what is theirs by demand, one gift each at a time."""
        fresh = self._fresh(GIFT_S / 2)
        amounts: list[dict[str, float]] = [{} for _ in fresh]
        for name in {name for peer in fresh for name in peer.record.purses}:
            purse = purses.get(name)
            if purse is None:
                continue
            level = purse.level(now_s)
            parties = [self._party(peer, name, purse) for peer in fresh]
            weight = purse.demand.at(now_s) + _IDLE_WEIGHT * self._share * purse.limit
            total, weights = level + sum(each[0] for each in parties), weight + sum(each[1] for each in parties)
            if weights <= 0.0 or total <= 0.0:
                continue
            mine = max(0.0, level - total * weight / weights)
            lacks = [min(most, total * weight / weights) - held for held, weight, most in parties]
            spare = mine + sum(-lack for lack in lacks if lack < 0.0)
            for each, lack in zip(amounts, lacks, strict=True):
                given = lack * min(1.0, mine / spare) if spare > 0.0 else 0.0
                if given > 0.0 and lack >= _GRAIN * purse.limit:
                    each[name] = given
        for peer, given_amounts in zip(fresh, amounts, strict=True):
            if peer.gift is None and given_amounts:
                peer.gift = Gift(self._number, peer.record.clock_s + GIFT_S, given_amounts)
                self._move(purses, given_amounts, -1.0, self._day)
