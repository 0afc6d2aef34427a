"""The health of an engine, as a state machine with one table.

state      the engine                                        requests
starting   no token yet since its start, pause or absence    refused; those from before wait
sure       answers, and makes progress                       sent
doubtful   answers no calls                                  refused; open ones wait
hung       answers, but makes no progress                    refused; open ones go to other workers
paused     reports a pause, or sleeps                        refused; open ones wait
gone       nothing listens at its address                    refused; open ones go to other workers
replaced   another process answers: this worker ends         refused; open ones go to other workers

Progress is a token, a cache event, or a count of the engine that has changed. An answer to a call is no progress: a
process in front of the engine's core may give it. So an engine without progress is asked for one token (a probe).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import StrEnum
from operator import attrgetter
from typing import Final, NamedTuple

from worker.adapter.api import EngineLoad, EngineModel

MAX_FAILED: Final = 3
"""Failed calls in a row until the engine is doubtful."""


class State(StrEnum):
    STARTING = "starting"
    SURE = "sure"
    DOUBTFUL = "doubtful"
    HUNG = "hung"
    PAUSED = "paused"
    GONE = "gone"
    REPLACED = "replaced"


class Sign(StrEnum):
    """An observation that may change the state."""

    TOKEN = "token"
    ANSWER = "answer"
    """It has answered a call."""
    DOUBT = "doubt"
    """It has answered none of `MAX_FAILED` calls."""
    STALL = "stall"
    """It has requests, and has made no progress for `hang_s`."""
    PAUSE = "pause"
    WAKE = "wake"
    CLOSED = "closed"
    """Its port is closed."""
    OTHER = "other"
    """Its facts are not those of the start."""


_ENDS: Final = {Sign.CLOSED: State.GONE, Sign.OTHER: State.REPLACED}
_SEEN: Final = {Sign.PAUSE: State.PAUSED, **_ENDS}
TABLE: Final[Mapping[State, Mapping[Sign, State]]] = {
    # Compilation and captured graphs may take minutes, so that an engine that starts is never hung.
    State.STARTING: {Sign.TOKEN: State.SURE, **_SEEN},
    State.SURE: {Sign.DOUBT: State.DOUBTFUL, Sign.STALL: State.HUNG, **_SEEN},
    State.DOUBTFUL: {Sign.TOKEN: State.SURE, Sign.ANSWER: State.SURE, Sign.STALL: State.HUNG, **_SEEN},
    State.HUNG: {Sign.TOKEN: State.SURE, **_SEEN},
    State.PAUSED: {Sign.WAKE: State.STARTING, **_ENDS},
    State.GONE: {Sign.ANSWER: State.STARTING, Sign.OTHER: State.REPLACED},
    State.REPLACED: {},
}
"""The next state. A sign that is not listed changes nothing."""
IS_LOST: Final = frozenset({State.HUNG, State.GONE, State.REPLACED})
"""States in which open requests go to other workers."""
_gauges: Final = attrgetter("usage", "num_running", "num_waiting", "work")
_UNPROBED: Final = frozenset({State.PAUSED, State.GONE, State.REPLACED})  # in these, no token would come


class EngineFacts(NamedTuple):
    """Facts of one process of an engine. Another process has other facts."""

    started_s: float
    num_blocks: int
    block_size: int
    model: EngineModel
    """Without its LoRA adapters, which may change."""


def facts_of(counts: EngineLoad, model: EngineModel) -> EngineFacts:
    """Return the facts of the process that gave these."""
    return EngineFacts(counts.started_s, counts.num_blocks, counts.block_size, replace(model, loras=()))


class EngineHealth:
    """The state of one engine, moved by signs and `TABLE`. Owned by the event loop of `AdapterEngine`."""

    def __init__(
        self, facts: EngineFacts, *, hang_s: float, probe_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`probe_s`: the silence after which a token is asked for; 0: none is, unless the engine was away."""
        self.state = State.STARTING
        self.why = "the engine has generated no token yet"
        """The reason of a state that is not sure."""
        self.is_slow = False
        """The last call failed: gateways prefer others."""
        self._facts = facts
        self._hang_s = hang_s
        self._probe_s = probe_s
        self._clock = clock
        self._moved_s = self._probed_s = clock()
        self._busy_s: float | None = None
        """Since when it has requests."""
        self._counts: EngineLoad | None = None
        self._num_failed = 0

    @property
    def problem(self) -> str | None:
        """Why no request should come, or None."""
        return None if self.state is State.SURE else self.why

    def apply(self, sign: Sign, why: str = "") -> bool:
        """Apply a sign. Return whether the state has changed."""
        if sign is Sign.TOKEN:
            self.progress()
        before, self.state = self.state, TABLE[self.state].get(sign, self.state)
        if self.state is before:
            return False
        self.why = why or self.why
        self.progress()
        return True

    def progress(self) -> None:
        """Note that the engine's core works."""
        self._moved_s, self._num_failed = self._clock(), 0

    def answered(self, facts: EngineFacts, counts: EngineLoad, *, is_paused: bool, num_open: int) -> bool:
        """Take an answer to the calls for facts and counts. Return whether the state has changed.

        `num_open`: requests of this worker at the engine.
        """
        before, self._counts = self._counts, counts
        self.is_slow, self._num_failed = False, 0
        is_new = self.state is State.GONE and not counts.started_s  # several API servers do not report their start
        is_new |= before is not None and counts.prefill_tokens < before.prefill_tokens
        if is_new or facts != self._facts:
            return self.apply(Sign.OTHER, f"another engine answers: {_differences(self._facts, facts)}")
        if before is None or _gauges(before) != _gauges(counts):
            self.progress()
        has_changed = self.apply(Sign.ANSWER, "the engine answers again, and has generated no token yet")
        if is_paused or counts.sleeps:
            return self.apply(Sign.PAUSE, "the engine is paused or sleeps") or has_changed
        has_changed |= self.apply(Sign.WAKE, "the engine is awake, and has generated no token yet")
        return self.check(counts.num_running + counts.num_waiting + num_open) or has_changed

    def failed(self, why: str, *, is_closed: bool, num_open: int) -> bool:
        """Take a failed call. Return whether the state has changed."""
        self.is_slow = True
        self._num_failed += 1
        if is_closed:
            return self.apply(Sign.CLOSED, why)
        has_changed = self._num_failed >= MAX_FAILED and self.apply(Sign.DOUBT, why)
        counts = self._counts
        others = 0 if counts is None else counts.num_running + counts.num_waiting
        return self.check(others + num_open) or has_changed

    def check(self, num_requests: int) -> bool:
        """Return whether the engine, which has this many requests, hangs since this call."""
        now_s = self._clock()
        if not num_requests:
            self._busy_s = None
            return False
        self._busy_s = now_s if self._busy_s is None else self._busy_s
        if now_s - max(self._moved_s, self._busy_s) < self._hang_s:
            return False
        return self.apply(Sign.STALL, f"the engine has made no progress for {self._hang_s:g} s")

    def asks_for_token(self) -> bool:
        """Return whether a token should be asked for now, and note that it is."""
        now_s = self._clock()
        if self.state in _UNPROBED or (self.state is State.SURE and not self._probe_s):
            return False
        if self.state is State.SURE and now_s - max(self._moved_s, self._probed_s) < self._probe_s:
            return False
        self._probed_s = now_s
        if self._busy_s is None:
            # An idle engine may hang already. It counts as busy from before this, so that a late token is a stall.
            self._busy_s = now_s - min(self._probe_s, self._hang_s / 2)
        return True


def _differences(before: EngineFacts, now: EngineFacts) -> str:
    named = zip(EngineFacts._fields, before, now, strict=True)
    found = [f"{name}: {old!s:.300} -> {new!s:.300}" for name, old, new in named if old != new]
    return "; ".join(found) or "it was away, or its totals are lower"
