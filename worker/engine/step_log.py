"""What a traced request went through in the engine: when it waited, and which steps computed it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from worker.scheduler.plan import EngineOutput, StepPlan
from worker.scheduler.request import Request, RequestKey
from worker.wire import End, Failed

MAX_STEPS: Final = 64
"""Steps kept one by one of each kind; further ones are counted."""


class StepRecord(NamedTuple):
    """A step as one request saw it. Times on the monotonic clock."""

    begun_s: float
    ended_s: float
    num_tokens: int
    """Of this request."""
    num_sequences: int
    """In the whole batch."""
    num_batch_tokens: int


@dataclass(slots=True, eq=False)
class StepLog:
    """Written by the engine's thread, which only adds: a reader may look at any time, and sees all after the request's
    last frame."""

    prefills: list[StepRecord] = field(default_factory=list)
    decodes: list[StepRecord] = field(default_factory=list)
    num_prefills: int = 0
    num_decodes: int = 0
    begun_s: float | None = None
    """When the request left the queue."""
    first_token_s: float | None = None
    num_cached_tokens: int = 0

    def add(self, record: StepRecord, *, is_prefill: bool) -> None:
        if is_prefill:
            self.num_prefills += 1
        else:
            self.num_decodes += 1
        records = self.prefills if is_prefill else self.decodes
        if len(records) < MAX_STEPS:
            records.append(record)


class StepLogs:
    """The logs of the traced requests in the engine. Used by its thread alone."""

    def __init__(self) -> None:
        self._logs: dict[RequestKey, StepLog] = {}

    def __bool__(self) -> bool:
        return bool(self._logs)

    def open(self, key: RequestKey, log: StepLog) -> None:
        self._logs[key] = log

    def close_ended(self, emissions: Sequence[EngineOutput]) -> None:
        """Forget the requests whose last frames these are."""
        for key, frame in emissions:
            if isinstance(frame, End | Failed):
                self._logs.pop(key, None)

    def begin(self, started: Sequence[Request], now_s: float) -> None:
        """These have left the queue."""
        for request in started:
            if (log := self._logs.get(request.key)) is not None:
                log.begun_s, log.num_cached_tokens = now_s, request.num_cached_tokens

    def add(self, plan: StepPlan, begun_s: float, ended_s: float) -> None:
        """The plan's step has returned; its results are not yet applied."""
        num_tokens: dict[RequestKey, int] = {}
        prefilling: set[RequestKey] = set()
        drawn: set[RequestKey] = set()
        for chunk in plan.chunks.values():
            key = chunk.sequence.request.key
            if key in self._logs:
                num_tokens[key] = num_tokens.get(key, 0) + chunk.num_tokens
                if chunk.is_prefill:
                    prefilling.add(key)
                if chunk.stop == len(chunk.sequence.token_ids):
                    drawn.add(key)
        for key, count in num_tokens.items():
            log = self._logs[key]
            record = StepRecord(begun_s, ended_s, count, len(plan.chunks), plan.num_tokens)
            log.add(record, is_prefill=key in prefilling)
            if key in drawn and log.first_token_s is None:
                log.first_token_s = ended_s
