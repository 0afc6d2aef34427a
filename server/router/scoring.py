"""One routing decision, and what follows from it: no I/O, no clock, no event loop, so that a simulator can drive it.

    candidates + books + overlay -> options -> policy -> the least score, equals at random -> booked at once

Booking happens in the same turn as the choice, so a burst sees its own picks.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median_high
from typing import Final

from cache.records import Candidate, WorkerMember
from cache.types import GatewayId, WorkerId
from server.rates import DecayedSum
from server.router.cost import CostModel
from server.router.load_tracker import Booking, WorkerBook
from server.router.pending_prefixes import Overlay, Speculation
from server.router.placement import RouteRequest
from server.router.policies import FleetView, Option, Policy
from server.router.policies.base import mean_draw

_MIN_TOKENS_PER_S: Final = 1e-3
"""Reports come from Redis, where anybody may have written them: what is slower makes sums of seconds infinite."""
_FEW_BLOCKS: Final = 1e-3
"""Decayed to less, what was released is too long ago to say anything."""


@dataclass(frozen=True, slots=True)
class DispatchSettings:
    cost: CostModel = field(default_factory=CostModel)
    workers_share: bool = False
    """Workers do as ours does: half of a step to the oldest prefill, half to the shortest other. False: one by one."""
    default_prefill_tokens_per_s: float = 2000.0
    """For a worker that has measured nothing, when none of its peers has."""
    speculate: bool = True
    publish_delay_s: float = 0.3
    """From a worker's first token until the index is sure to know the prompt's blocks."""
    speculation_ttl_s: float = 900.0
    max_waiting: int = 1024
    """A worker with so many requests in its queue gets no more."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Why a worker was chosen, or not: one line of an explanation."""

    option: Option
    score: float | None
    """None: guarded."""
    guard: str | None
    index_tokens: int
    overlay_tokens: int


@dataclass(frozen=True, slots=True)
class _Known:
    """What one decision takes from the fleet for each worker."""

    prefill_tokens_per_s: float
    hold_s: float


class Assignment:
    """A decision: the request is on the worker's book until `close`."""

    __slots__ = ("_booking", "_dispatcher", "_request", "_speculation", "num_cached_tokens", "option")

    def __init__(
        self,
        dispatcher: Dispatcher,
        request: RouteRequest,
        option: Option,
        booking: Booking,
        speculation: Speculation | None,
    ) -> None:
        self._dispatcher = dispatcher
        self._request = request
        self._booking = booking
        self._speculation = speculation
        self.option = option
        self.num_cached_tokens: int | None = None

    def prefill_started(self, num_cached_tokens: int, now_s: float) -> None:
        """The worker has taken it from its queue and found so many tokens cached."""
        if self.num_cached_tokens is None:
            self.num_cached_tokens = num_cached_tokens
            num_uncached = max(0, self._request.num_prompt_tokens - num_cached_tokens)
            own_s = self._dispatcher.settings.cost.own_s(num_uncached, self.option.prefill_tokens_per_s)
            self._booking.start(own_s, now_s)

    def first_token(self, now_s: float) -> None:
        self._booking.first_token()
        if self._speculation is not None:
            self._dispatcher.overlay.confirm(self._speculation, now_s)
            self._speculation = None

    def close(self, now_s: float) -> bool:
        """False: closed before. What was not confirmed by a first token is no longer believed."""
        if self._speculation is not None:
            self._dispatcher.overlay.remove(self._speculation)
            self._speculation = None
        closed = self._booking.close()
        if closed and self._booking.started_s is not None:
            self._dispatcher.released(self._booking.num_blocks, now_s - self._booking.started_s, now_s)
        return closed


class Dispatcher:
    """The books, the overlay and the policy of one gateway."""

    def __init__(self, gateway_id: GatewayId, policy: Policy, settings: DispatchSettings, rng: random.Random) -> None:
        self.settings = settings
        self.overlay = Overlay(publish_delay_s=settings.publish_delay_s, ttl_s=settings.speculation_ttl_s)
        self._gateway_id = gateway_id
        self._policy = policy
        self._rng = rng
        self._books: dict[WorkerId, WorkerBook] = {}
        self._released = DecayedSum(settings.cost.window_s)
        self._held_s = DecayedSum(settings.cost.window_s)

    def book(self, member: WorkerMember) -> WorkerBook:
        """The book of this epoch; requests booked on an earlier one keep theirs."""
        book = self._books.get(member.worker_id)
        if book is None or book.epoch != member.epoch:
            book = self._books[member.worker_id] = WorkerBook(member.epoch, self.settings.cost.window_s)
        return book

    @property
    def num_outstanding(self) -> int:
        """Requests on the books of the workers' present epochs."""
        return sum(book.num_outstanding for book in self._books.values())

    def forget(self, worker_id: WorkerId) -> None:
        """The worker is gone for good."""
        self._books.pop(worker_id, None)

    def released(self, num_blocks: int, held_s: float, now_s: float) -> None:
        """For `Assignment` alone: a request has ended that held its blocks for so long."""
        self._released.add(num_blocks, now_s)
        self._held_s.add(num_blocks * held_s, now_s)

    def hold_s(self, now_s: float) -> float:
        """For how long a block is held, mean of what ended lately; 0.0 while nothing is known."""
        num_blocks = self._released.at(now_s)
        return self._held_s.at(now_s) / num_blocks if num_blocks > _FEW_BLOCKS else 0.0

    def dispatch(
        self,
        request: RouteRequest,
        candidates: Sequence[Candidate],
        guards: Sequence[str | None],
        now_s: float,
        *,
        trace: list[Choice] | None = None,
        book: bool = True,
    ) -> Assignment | None:
        """Choose and book; None when every candidate is guarded, or nothing shall be booked.

        `guards` has one entry a candidate, None where nothing speaks against it. `trace` receives one Choice a
        candidate.
        """
        self.overlay.expire(now_s)
        known = _Known(self._common_rate(candidates), self.hold_s(now_s))
        options, matches = [], []
        for candidate in candidates:
            option, overlay_tokens = self._option(request, candidate, known, now_s)
            options.append(option)
            matches.append(overlay_tokens)
        guards = [guard or self._full(option) for guard, option in zip(guards, options, strict=True)]
        open_options = [option for option, guard in zip(options, guards, strict=True) if guard is None]
        scores: Sequence[float] = ()
        if open_options:
            recent_s = sum(option.recent_s for option in options)
            fleet = FleetView(self.settings.cost, recent_s, len(options), self._rng.random if book else mean_draw)
            scores = self._policy.scores(request, open_options, fleet)
        if trace is not None:
            self._explain(trace, candidates, options, matches, guards, scores)
        if not (open_options and book):
            return None
        best = min(scores)
        ties = [option for option, score in zip(open_options, scores, strict=True) if score == best]
        return self._assign(request, ties[0] if len(ties) == 1 else self._rng.choice(ties), now_s)

    def _assign(self, request: RouteRequest, option: Option, now_s: float) -> Assignment:
        member = option.member
        num_blocks = -(-request.num_prompt_tokens // member.block_size)
        booking = self.book(member).book(option.own_s, num_blocks, now_s, num_new_blocks=option.num_new_blocks)
        speculation = None
        if self.settings.speculate and request.hashes:
            speculation = self.overlay.add(member.worker_id, member.epoch, request.hashes, now_s)
        self._policy.placed(request, option)
        return Assignment(self, request, option, booking, speculation)

    def _option(self, request: RouteRequest, candidate: Candidate, known: _Known, now_s: float) -> tuple[Option, int]:
        member, load = candidate.member, candidate.load
        book = self.book(member)
        book.observe(load, now_s - candidate.load_age_s, self._gateway_id)
        block_size = member.block_size
        most_tokens = max(0, request.num_prompt_tokens - 1)
        overlay_blocks = self.overlay.matched(member.worker_id, member.epoch, request.hashes)
        matched_tokens = min(max(candidate.matched_blocks, overlay_blocks) * block_size, most_tokens)
        rate = max(_MIN_TOKENS_PER_S, book.prefill_rate(known.prefill_tokens_per_s, now_s))
        cost = self.settings.cost
        own_s = cost.own_s(request.num_prompt_tokens - matched_tokens, rate)
        wait_s, num_delayed = (
            book.shared_wait_s(own_s, now_s) if self.settings.workers_share else (book.wait_s(now_s), 0.0)
        )
        num_blocks = -(-request.num_prompt_tokens // block_size)
        num_new_blocks = num_blocks - matched_tokens // block_size
        num_held = load.num_blocks - load.num_free_blocks + book.arriving_blocks(now_s)
        room_s = 0.0
        if known.hold_s and load.num_blocks:
            usage = (num_held + num_new_blocks) / load.num_blocks
            room_s = cost.room_s(usage, load.num_blocks / max(1, num_blocks), known.hold_s)
        num_others = max(0, load.num_running + load.num_waiting - book.num_outstanding)
        option = Option(
            member=member,
            matched_tokens=matched_tokens,
            own_s=own_s,
            wait_s=wait_s,
            room_s=room_s,
            num_new_blocks=num_new_blocks,
            num_delayed=num_delayed,
            recent_s=book.recent_s(now_s),
            num_outstanding=book.num_outstanding + num_others,
            num_waiting=max(book.num_queued, load.num_waiting),
            active_blocks=book.num_blocks,
            kv_usage=1.0 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0,
            num_blocks=load.num_blocks,
            unseen_s=book.unseen_s(now_s),
            queued_s=book.queued_s,
            prefill_tokens_per_s=rate,
        )
        return option, min(overlay_blocks * block_size, most_tokens)

    def _common_rate(self, candidates: Sequence[Candidate]) -> float:
        """For workers that have measured nothing yet, or not lately: the median, so that a new one is not preferred."""
        rates = [c.load.prefill_tokens_per_s for c in candidates if c.load.prefill_tokens_per_s > 0.0]
        return median_high(rates) if rates else self.settings.default_prefill_tokens_per_s

    def _full(self, option: Option) -> str | None:
        return "queue full" if option.num_waiting >= self.settings.max_waiting else None

    def _explain(
        self,
        trace: list[Choice],
        candidates: Sequence[Candidate],
        options: Sequence[Option],
        overlay_tokens: Sequence[int],
        guards: Sequence[str | None],
        scores: Sequence[float],
    ) -> None:
        remaining = iter(scores)
        for candidate, option, tokens, guard in zip(candidates, options, overlay_tokens, guards, strict=True):
            score = None if guard is not None else next(remaining)
            index_tokens = candidate.matched_blocks * candidate.member.block_size
            trace.append(Choice(option, score, guard, index_tokens, tokens))
