"""Limits of keys over all gateways, pure: what each gateway publishes of its use, and what it makes of the others'.

Each gateway publishes one record with the use of all keys since its start, and reads those of the others. It takes
their increases from its own buckets, so every gateway has the whole fleet's level, some milliseconds old. No request
waits for this. Gateways that decide at the same time may overdraw a bucket, which then stays overdrawn.

    gateways whose record advances      their use is known
    gateways whose record stays         each is taken to use its share, 1 of N, until it is known to have ended

So without Redis, or with records that were removed, replayed or forged, each gateway grants its own share.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Final

from msgspec import Meta, Struct

from cache.records import Count
from server.auth.identity import MAX_KEYS
from server.auth.limits import KeyUsage, KeyUse

FRESH_S: Final = 1.5
"""A gateway whose record has not advanced for this time is taken to use its share."""
FORGET_S: Final = 10.0
"""It has ended if others' records have been read for this time without it."""
JOIN_S: Final = 5.0
"""After its start a gateway takes the buckets' levels from the others."""
MAX_GATEWAYS: Final = 1024
_UNUSED: Final = KeyUse()


class GatewayRecord(Struct, frozen=True, array_like=True):
    """Everything that one gateway publishes."""

    number: Count
    """Grows with each record of the gateway."""
    is_last: bool
    day: str
    keys: Annotated[dict[str, KeyUse], Meta(max_length=MAX_KEYS)]


@dataclass(slots=True, eq=False)
class _Peer:
    """Another gateway, alive or not."""

    record: GatewayRecord
    advanced_s: float
    """When its record was first read, or last advanced."""
    is_live: bool = False
    is_stale: bool = True
    """This gateway has left it its share since its last record."""


class FleetLimits:
    """The use of all keys over the fleet. Owned by the event loop."""

    def __init__(
        self, usages: Callable[[], Mapping[str, KeyUsage]], clock: Callable[[], float], min_gateways: int = 1
    ) -> None:
        """`usages` returns the keys with limits. `min_gateways`: share as that many while fewer are known."""
        self._usages = usages
        self._clock = clock
        self._min_gateways = min_gateways
        self._peers: dict[str, _Peer] = {}
        self._number = 0
        self._has_ended = False
        self._day = ""
        self._begun_s = clock()
        self._intact_s = -math.inf
        """Since when reads have been answered with the own last record, without a gap."""
        self._read_s = -math.inf
        self.is_busy = False
        """A key was used, here or elsewhere, between the last two records."""
        self.part = 1.0
        """The part of each limit that the known gateways grant together."""
        self._num_used = 0

    def record(self, day: str, *, is_last: bool = False) -> GatewayRecord:
        """Return the record to publish. After the last one all are last: `run` may still publish."""
        usages = self._usages()
        if day != self._day:
            self._day = day
            self._peers = {name: peer for name, peer in self._peers.items() if peer.is_live}
            for usage in usages.values():
                usage.begin_day()
        self._number += 1
        self._has_ended |= is_last
        self.is_busy = self.was_used()
        self._num_used = sum([usage.num_used for usage in usages.values()])
        used = {name: usage.use() for name, usage in usages.items() if usage.num_used}
        return GatewayRecord(self._number, self._has_ended, day, used)

    def was_used(self) -> bool:
        """Return whether a key was used at this gateway since the last record."""
        return sum([usage.num_used for usage in self._usages().values()]) != self._num_used

    def merge(self, records: Mapping[str, GatewayRecord], *, is_intact: bool) -> None:
        """Take the other gateways' records. `is_intact`: this gateway's last one was found as it was written."""
        now_s = self._clock()
        if not is_intact or now_s - self._read_s > FRESH_S:
            self._intact_s = now_s
        self._read_s = now_s
        usages = self._usages()
        for name, record in records.items():
            peer = self._peers.get(name)
            if peer is None:
                known = [(usages[key], use) for key, use in record.keys.items() if key in usages]
                is_sound = all(usage.may_grant(use, use, 0.0) for usage, use in known)
                if is_sound and len(self._peers) < MAX_GATEWAYS:
                    self._peers[name] = _Peer(record, now_s)
            elif record.number > peer.record.number:
                self._take(peer, record, usages, now_s)
        self._apply(now_s, usages)

    def missed(self) -> bool:
        """Record that nothing could be read. Return whether that has lasted."""
        now_s = self._clock()
        self._apply(now_s, self._usages())
        return now_s - self._read_s > FRESH_S

    def _take(self, peer: _Peer, record: GatewayRecord, usages: Mapping[str, KeyUsage], now_s: float) -> None:
        """Take a gateway's increases from the buckets, unless it cannot have granted this since its last record."""
        joins = not peer.is_live and now_s - self._begun_s < JOIN_S
        changes = []
        for name, use in record.keys.items():
            before, usage = peer.record.keys.get(name, _UNUSED), usages.get(name)
            if usage is not None and (joins or use.amounts() != before.amounts()):
                if not usage.may_grant(use, before, now_s - peer.advanced_s):
                    return
                changes.append((usage, use, before))
        for usage, use, before in changes:
            usage.draw(use, before, to_zero=peer.is_stale, joins=joins)
        self.is_busy |= bool(changes)
        peer.record, peer.advanced_s = record, now_s
        peer.is_live, peer.is_stale = not record.is_last, False

    def _apply(self, now_s: float, usages: Mapping[str, KeyUsage]) -> None:
        """Set each key's share of its limits, and what the others have open and spent."""
        if now_s - self._read_s <= FRESH_S and now_s - self._intact_s >= FORGET_S:
            for peer in self._peers.values():
                peer.is_live &= now_s - peer.advanced_s < FORGET_S
        live = [peer for peer in self._peers.values() if peer.is_live]
        fresh = [peer for peer in live if now_s - peer.advanced_s <= FRESH_S]
        for peer in live:
            peer.is_stale |= now_s - peer.advanced_s > FRESH_S
        today = [peer for peer in self._peers.values() if peer.record.day == self._day]
        num_gateways = max(1 + len(live), self._min_gateways if now_s - self._read_s > FRESH_S else 1)
        self.part = (1 + len(fresh)) / num_gateways
        num_open, spent = Counter[str](), Counter[str]()
        for peer in fresh:
            for name, use in peer.record.keys.items():
                num_open[name] += use.num_open
        for peer in today:
            for name, use in peer.record.keys.items():
                spent[name] += use.spent
        for name, usage in usages.items():
            usage.share(1 + len(fresh), num_gateways, num_open.get(name, 0), spent.get(name, 0))
