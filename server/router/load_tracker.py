"""A gateway's books: every request it has sent, from the decision to the end, and what others have sent beside it.

    place        -> queued, with an estimate of its prefill seconds
    start        -> in service: what has elapsed since no longer counts; the estimate is corrected by what was cached
    first_token  -> no longer queued, still outstanding
    close        -> gone; counts once, from whatever state

Other gateways' work is known from the worker's report, which is some milliseconds old; it is aged by that time. A
worker's own report about this gateway is never used for the wait: the books are newer.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import islice

from cache.records import WorkerLoad
from cache.types import Epoch, GatewayId
from server.rates import DecayedSum

_FOLD_S = 2.0
"""Own bookings that no report has confirmed for so long count as assigned without it."""
_OTHERS_MEMORY_S = 60.0
_MAX_UNSEEN_S = 1.0
_RATE_MEMORY_S = 300.0
"""After so long without another measurement a slow worker counts as one that has measured nothing."""
_MAX_COMPARED = 128
"""Requests of a long queue that are looked at one by one; the rest is taken to be like them."""


class Booking:
    """One request on one worker's book."""

    __slots__ = ("_book", "_closed", "_queued", "left_s", "num_blocks", "num_new_blocks", "own_s", "started_s")

    def __init__(self, book: WorkerBook, own_s: float, num_blocks: int, num_new_blocks: int) -> None:
        self._book = book
        self._queued = True
        self._closed = False
        self.own_s = own_s
        self.left_s = own_s
        """Of `own_s`, where workers share themselves out: as of the book's last `shared_wait_s`."""
        self.num_blocks = num_blocks
        self.num_new_blocks = num_new_blocks
        """Of `num_blocks`, those that were not at the worker when it was chosen."""
        self.started_s: float | None = None

    def start(self, own_s: float, now_s: float) -> None:
        """Its prefill begins; `own_s` is the estimate now that the worker has said what it found cached."""
        if self._queued and self.started_s is None:
            self._book.advance(now_s)
            self._book.queued_s += own_s - self.own_s
            self.own_s = self.left_s = own_s
            self.started_s = now_s
            self._book.take_blocks(self, now_s)

    def first_token(self) -> None:
        if self._queued:
            self._queued = False
            self._book.leave_queue(self)

    def close(self) -> bool:
        """False: it was closed before, and nothing changes."""
        if self._closed:
            return False
        self._closed = True
        self.first_token()
        self._book.num_outstanding -= 1
        self._book.num_blocks -= self.num_blocks
        return True


class WorkerBook:
    """What this gateway knows of the work at one epoch of one worker."""

    __slots__ = (
        "_advanced_s",
        "_arriving_blocks",
        "_assigned",
        "_counter_s",
        "_folded_s",
        "_others_s",
        "_others_seen_s",
        "_queue",
        "_rate",
        "_rate_s",
        "_reported_s",
        "_taken",
        "_unreported",
        "_unreported_s",
        "epoch",
        "num_blocks",
        "num_outstanding",
        "queued_s",
    )

    def __init__(self, epoch: Epoch, window_s: float) -> None:
        self.epoch = epoch
        self.num_outstanding = 0
        self.num_blocks = 0
        """Blocks of the outstanding requests, shared ones counted as often as they are shared."""
        self.queued_s = 0.0
        """Estimated prefill seconds of own requests without a first token."""
        self._arriving_blocks = 0
        """New blocks of own requests that no report has shown as held: they wait, or have just begun."""
        self._taken: deque[tuple[float, int]] = deque()
        """When the latter began, and their part."""
        self._queue: dict[Booking, None] = {}
        self._advanced_s = 0.0
        self._assigned = DecayedSum(window_s)
        self._unreported: deque[tuple[float, float]] = deque()
        self._unreported_s = 0.0
        self._folded_s = 0.0
        self._counter_s: float | None = None
        self._reported_s = -math.inf
        self._others_s = 0.0
        self._others_seen_s = -math.inf
        self._rate = 0.0
        self._rate_s = -math.inf
        """When the worker last reported another prefill rate than before: it has measured."""

    @property
    def num_queued(self) -> int:
        """Own requests without a first token."""
        return len(self._queue)

    def book(self, own_s: float, num_blocks: int, now_s: float, *, num_new_blocks: int = 0) -> Booking:
        booking = Booking(self, own_s, num_blocks, num_new_blocks)
        self._arriving_blocks += num_new_blocks
        self._queue[booking] = None
        self.queued_s += own_s
        self.num_outstanding += 1
        self.num_blocks += num_blocks
        self._unreported.append((now_s, own_s))
        self._unreported_s += own_s
        return booking

    def leave_queue(self, booking: Booking) -> None:
        """For `Booking` alone."""
        del self._queue[booking]
        if booking.started_s is None:
            self._arriving_blocks -= booking.num_new_blocks
        self.queued_s = self.queued_s - booking.own_s if self._queue else 0.0

    def take_blocks(self, booking: Booking, now_s: float) -> None:
        """For `Booking` alone: from now on the worker's reports show its blocks."""
        self._taken.append((now_s, booking.num_new_blocks))

    def arriving_blocks(self, now_s: float) -> int:
        """Blocks that own requests will hold, or hold by now, beyond what the last report says."""
        shown_s = max(self._reported_s, now_s - _MAX_UNSEEN_S)
        while self._taken and self._taken[0][0] <= shown_s:
            self._arriving_blocks -= self._taken.popleft()[1]
        return self._arriving_blocks

    def observe(self, load: WorkerLoad, written_s: float, gateway_id: GatewayId) -> None:
        """Take in a report written at `written_s` of our clock. Older or equal ones are ignored."""
        if written_s <= self._reported_s:
            return
        self._reported_s = written_s
        self._others_s = sum(seconds for gateway, seconds in load.queued_prefill_s.items() if gateway != gateway_id)
        if self._others_s > 0.0:
            self._others_seen_s = written_s
        if load.prefill_tokens_per_s != self._rate:
            self._rate = load.prefill_tokens_per_s
            self._rate_s = written_s
        counter_s = load.assigned_prefill_s
        if self._counter_s is not None:
            self._assigned.add(max(0.0, counter_s - self._counter_s - self._folded_s), written_s)
        self._counter_s = counter_s
        self._folded_s = 0.0
        while self._unreported and self._unreported[0][0] <= written_s:
            self._unreported_s -= self._unreported.popleft()[1]

    def prefill_rate(self, common: float, now_s: float) -> float:
        """Tokens a second, where `common` is usual in the fleet.

        A slow measurement is believed less the older it is. Nothing is sent to a worker that counts as slow while
        faster ones are idle, so it would never be measured again.
        """
        if not self._rate:
            return common
        believed = max(0.0, 1.0 - (now_s - self._rate_s) / _RATE_MEMORY_S)
        return max(self._rate, common - believed * (common - self._rate))

    def wait_s(self, now_s: float) -> float:
        """Prefill seconds before a request that came now would begin, at a worker that takes them one by one."""
        own_s = self.queued_s
        for booking in self._queue:
            if booking.started_s is not None:
                own_s -= min(now_s - booking.started_s, booking.own_s)
                break
        return max(0.0, own_s) + self._others_left_s(own_s, now_s)

    def shared_wait_s(self, own_s: float, now_s: float) -> tuple[float, float]:
        """The same at a worker that gives half of itself to the oldest prefill and half to the shortest other, and
        how many prefills there would wait for one of `own_s`.

        The shorter ones go first; meanwhile, and beside it, the oldest has its half. Of other gateways only the sum
        of their work is known: it is taken as old.
        """
        self.advance(now_s)
        left_s = [booking.left_s for booking in islice(self._queue, _MAX_COMPARED) if booking.left_s > 0.0]
        more = max(1.0, len(self._queue) / _MAX_COMPARED)
        old_s = (left_s[0] if left_s else 0.0) + self._others_left_s(sum(left_s), now_s)
        shorter_s = more * sum(seconds for seconds in left_s[1:] if seconds < own_s)
        num_longer = more * sum(seconds >= own_s for seconds in left_s[1:]) + (0.5 if old_s > own_s else 0.0)
        return shorter_s + min(old_s, own_s + shorter_s), num_longer

    def advance(self, now_s: float) -> None:
        """Take off what the started prefills have had since the last call. For `Booking`, before one more starts."""
        elapsed_s = now_s - self._advanced_s
        self._advanced_s = now_s
        oldest = islice(self._queue, _MAX_COMPARED)
        running = [booking for booking in oldest if booking.started_s is not None and booking.left_s > 0.0]
        while elapsed_s > 0.0 and running:
            served = [running[0]]
            if len(running) > 1:
                served.append(min(running[1:], key=lambda booking: booking.left_s))
            step_s = min(elapsed_s, min(booking.left_s for booking in served) * len(served))
            for booking in served:
                booking.left_s -= step_s / len(served)
            elapsed_s -= step_s
            running = [booking for booking in running if booking.left_s > 1e-9]

    def _others_left_s(self, own_s: float, now_s: float) -> float:
        """What is left of other gateways' work beside `own_s` of ours."""
        others_s = self._others_s
        if others_s > 0.0:
            others_s -= (now_s - self._reported_s) * others_s / (others_s + own_s)
        return max(0.0, others_s)

    def unseen_s(self, now_s: float) -> float:
        """For how long others may have sent work here that no report has shown yet; 0 when there are no others."""
        if now_s - self._others_seen_s > _OTHERS_MEMORY_S:
            return 0.0
        return min(_MAX_UNSEEN_S, max(0.0, now_s - self._reported_s))

    def recent_s(self, now_s: float) -> float:
        """Prefill seconds assigned to the worker by everybody, decayed over the window."""
        self._fold(now_s)
        return self._assigned.at(now_s) + self._unreported_s

    def _fold(self, now_s: float) -> None:
        """Without reports own bookings are all that is known: let them decay."""
        while self._unreported and self._unreported[0][0] < now_s - _FOLD_S:
            booked_s, own_s = self._unreported.popleft()
            self._unreported_s -= own_s
            self._folded_s += own_s
            self._assigned.add(own_s, booked_s)
        if not self._unreported:
            self._unreported_s = 0.0
