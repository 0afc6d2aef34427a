"""Routing decisions for people to look at: so many a second in full, the rest counted.

A fleet may decide hundreds of times a second; nobody reads that, and every decision tells of every worker. So a token
bucket takes some in full, the cheapest few candidates of each, evenly while the rate is steady.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from typing import Any, Final

from server.rates import TokenBucket
from server.router.scoring import Choice
from server.router.watcher import Decision

PER_S: Final = 16.0
BURST: Final = 8.0
MAX_CANDIDATES: Final = 8
"""The rest of a decision's candidates are only counted."""
MAX_WAITING: Final = 64
"""Decisions between two frames."""
MAX_RECENT: Final = 50
"""Decisions that a new viewer is shown."""


class DecisionLog:
    """A `DecisionWatcher`, drained by the feed."""

    def __init__(self) -> None:
        self.num_decisions = 0
        """Every decision since somebody began to look, told in full or not."""
        self.recent: deque[dict[str, Any]] = deque(maxlen=MAX_RECENT)
        self._new: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING)
        self._by_request: dict[str, dict[str, Any]] = {}
        self._found: dict[str, int] = {}
        self._bucket = TokenBucket(PER_S, BURST)

    def wants(self, now_s: float) -> bool:
        self.num_decisions += 1
        return self._bucket.take(now_s) == 0.0

    def decided(self, decision: Decision) -> None:
        self._tell(describe(decision))

    def _tell(self, told: dict[str, Any]) -> None:
        if len(self.recent) == MAX_RECENT:
            self._by_request.pop(self.recent[0]["request"], None)
        self.recent.append(told)
        self._by_request[told["request"]] = told
        self._new.append(told)

    def started(self, request_id: str, num_cached_tokens: int) -> None:
        told = self._by_request.get(request_id)
        if told is not None:
            told["found_tokens"] = self._found[request_id] = num_cached_tokens

    def drain(self) -> dict[str, Any] | None:
        """What is new since the last call, or None: decisions, and what workers found of those told before."""
        if not self._new and not self._found:
            return None
        news = {"decisions": list(self._new), "found": self._found}
        self._new.clear()
        self._found = {}
        return news


def describe(decision: Decision) -> dict[str, Any]:
    """The chosen worker first, then the cheapest others; those that could not be chosen come last."""
    request, chosen = decision.request, decision.chosen
    others = [choice for choice in decision.choices if choice.option.member is not chosen.member]
    shown = heapq.nsmallest(MAX_CANDIDATES - 1, others, key=_rank)
    mine = [choice for choice in decision.choices if choice.option.member is chosen.member]
    return {
        "request": request.request_id,
        "at": time.time(),
        "model": request.model,
        "worker": chosen.member.worker_id,
        "prompt_tokens": request.num_prompt_tokens,
        "matched_tokens": chosen.matched_tokens,
        "found_tokens": None,
        "index_answered": decision.index_answered,
        "resumed": request.numerics is not None,
        "num_candidates": len(decision.choices),
        "candidates": [_candidate(choice) for choice in (*mine, *shown)],
    }


def _rank(choice: Choice) -> float:
    return float("inf") if choice.score is None else choice.score


def _candidate(choice: Choice) -> dict[str, Any]:
    option = choice.option
    return {
        "worker": option.member.worker_id,
        "matched_tokens": option.matched_tokens,
        "overlay_tokens": choice.overlay_tokens,
        "wait_s": option.wait_s + option.room_s,
        "prefill_s": option.own_s,
        "cost": choice.score,
        "guard": choice.guard,
    }
