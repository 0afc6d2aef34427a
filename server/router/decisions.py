"""Routing decisions for operators: a sample with its cheapest candidates; the others are counted.

A token bucket takes the sample: evenly, while the rate is constant.
"""

from __future__ import annotations

import heapq
import math
import re
import time
from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, Final

from server.rates import TokenBucket
from server.router.cost import WorkerView
from server.router.placement import Decision, Placement, PlacementListener, Scorer

PER_S: Final = 16.0  # recorded, as many as a viewer can follow: each costs a copy of its views
BURST: Final = 8.0  # recorded at once, for example of one batch
MAX_CANDIDATES: Final = 8
"""Candidates listed for one decision; the others are counted."""
MAX_WAITING: Final = 64
"""Decisions kept between two frames."""
MAX_RECENT: Final = 500
"""Decisions that can be found by their request's id."""
MAX_SHOWN: Final = 50
"""Decisions that a new viewer is shown."""
_TERMS: Final = (
    *("matched_tokens", "index_tokens", "pending_tokens", "kv_wait_s", "eviction_s", "least_eviction_s", "decode_s"),
    *("num_displaced", "fetched_tokens", "fetch_s", "prefill_s", "predicted_ttft_s", "assigned_s", "guard"),
)
"""The parts of a view that an explanation has under their own names."""
_DIGITS: Final = re.compile(r"(?:^|[_-])([0-9a-f]{32})(?:-\d+)?$")
"""The common part of the ids of a request and of its answer."""


class DecisionLog(PlacementListener):
    """Drained by the feed of the ops port while that has viewers."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.has_viewers = False
        self.num_decisions = 0
        """All decisions, recorded or not."""
        self.recent: dict[str, dict[str, Any]] = {}
        """By request id, the oldest first."""
        self._new: deque[dict[str, Any]] = deque(maxlen=MAX_WAITING)
        self._found: dict[str, int | None] = {}
        self._times: dict[str, dict[str, float]] = {}
        self._bucket = TokenBucket(PER_S, BURST)

    def placed(self, placement: Placement, decision: Decision) -> None:
        self.num_decisions += 1
        is_known = self.recent.pop(placement.request.request_id, None) is not None  # a retry replaces its record
        if not is_known and self._bucket.take(self._clock()):
            return
        entry = describe(decision, placement)
        self.recent[entry["request"]] = entry
        if len(self.recent) > MAX_RECENT:
            del self.recent[next(iter(self.recent))]
        if self.has_viewers:
            self._new.append(entry)

    def shown(self) -> list[dict[str, Any]]:
        """Return the last decisions, the oldest first."""
        return list(islice(self.recent.values(), max(0, len(self.recent) - MAX_SHOWN), None))

    def find(self, id_: str) -> list[dict[str, Any]]:
        """Return the recorded decisions of a request, one for each prompt: by its id, its answer's or its client's.

        Of several requests with one id of the client, the last counts.
        """
        if found := self._found_by(id_):
            return found
        last = next((key for key, entry in reversed(self.recent.items()) if entry["client_id"] == id_), None)
        return [] if last is None else self._found_by(last)

    def _found_by(self, id_: str) -> list[dict[str, Any]]:
        digits = _DIGITS.search(id_)
        return [entry for key, entry in self.recent.items() if key == id_ or (digits and digits[1] in key)]

    def started(self, placement: Placement) -> None:
        self.corrected(placement)
        self._reached(placement, "prefill")
        entry, queue_s = self.recent.get(placement.request.request_id), placement.queue_s
        if entry is not None and queue_s is not None:
            entry["times"]["queue"] = max(0.0, round(entry["times"]["prefill"] - queue_s, 4))

    def corrected(self, placement: Placement) -> None:
        request_id = placement.request.request_id
        if (entry := self.recent.get(request_id)) is not None:
            entry["found_tokens"] = placement.num_cached_tokens
            if self.has_viewers:  # they get it with the time of the end, which follows
                self._found[request_id] = placement.num_cached_tokens

    def first_token(self, placement: Placement) -> None:
        self._reached(placement, "first_token")

    def closed(self, placement: Placement) -> None:
        self._reached(placement, "end")

    def _reached(self, placement: Placement, stage: str) -> None:
        """Record the seconds from the decision to this stage."""
        request_id = placement.request.request_id
        if (entry := self.recent.get(request_id)) is not None:
            entry["times"][stage] = round(time.time() - entry["at"], 4)
            if self.has_viewers:
                self._times[request_id] = entry["times"]

    def drain(self) -> dict[str, Any] | None:
        """Return the decisions since the last call, and what became of earlier ones; None without any."""
        if not self._new and not self._times:
            return None
        news = {"decisions": list(self._new), "found": self._found, "times": self._times}
        self._new.clear()
        self._found, self._times = {}, {}
        return news


def describe(decision: Decision, placement: Placement) -> dict[str, Any]:
    """List the chosen worker first, then the cheapest others; guarded ones come last."""
    request, chosen = decision.request, placement.worker

    def rank(worker: WorkerView) -> tuple[bool, float]:
        return worker.member is not chosen, math.inf if worker.score is None else worker.score

    candidates = [
        {
            "worker": worker.member.worker_id,
            "matched_tokens": worker.matched_tokens,
            "pending_tokens": worker.pending_tokens,
            "wait_s": worker.queue_s + worker.kv_wait_s,
            "moved_tokens": worker.cached_tokens - worker.matched_tokens,
            "fetch_s": worker.fetch_s,
            "prefill_s": worker.prefill_s,
            "cost": worker.score,
            "guard": worker.guard,
        }
        for worker in heapq.nsmallest(MAX_CANDIDATES, decision.workers, key=rank)
    ]
    return {
        "request": request.request_id,
        "client_id": request.client_id,
        "at": time.time(),
        "model": request.model,
        "worker": chosen.worker_id,
        "prompt_tokens": request.num_prompt_tokens,
        "matched_tokens": placement.promised_tokens,
        "found_tokens": None,
        "times": {},
        "index_answered": decision.index_answered,
        "resumed": request.numerics is not None,
        "num_candidates": decision.num_candidates,
        "candidates": candidates,
    }


def explained(worker: WorkerView, scorer: Scorer) -> dict[str, Any]:
    """Return every term of the cost at a worker."""
    member, peers = worker.member, worker.peers
    return {
        **{name: getattr(member, name) for name in ("epoch", "ends", "index_problem")},
        **{name: getattr(worker, name) for name in _TERMS},
        "worker": member.worker_id,
        "wait_s": worker.queue_s,
        "fetch_from": None if peers is None else scorer.choose_peer(peers.holders, dry_run=True).worker_id,
        "outstanding": worker.num_outstanding,
        "waiting": worker.num_waiting,
        "cost": worker.score,
    }
