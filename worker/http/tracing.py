"""The spans of one request at a worker. They are made from the engine's step log when the stream ends.

generate                       parent: the gateway's attempt, by the request's traceparent
  |-- queue
  |-- prefill                  an event for each step that computed a part of the prompt
  +-- decode                   an event for each of the first steps

batch                          a trace of its own, with links to the `generate` spans of its requests

Consecutive steps of one kind over the same traced requests are one batch: a long decode makes one span.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from worker.common.tracing import Tracing, as_parent, mark_failed
from worker.contracts.engine import BatchLog, RecordedSteps, StepLog
from worker.wire import End, Failed, GenerateRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span


class StreamTrace:
    """The spans of one request, from its arrival. The engine fills `steps`."""

    __slots__ = ("_begun_s", "_ns", "_span", "_tracing", "steps")

    def __init__(self, tracing: Tracing, span: Span) -> None:
        self._tracing = tracing
        self._span = span
        self._begun_s = time.monotonic()
        self._ns = time.time_ns() - int(self._begun_s * 1e9)  # from the monotonic clock to the wall's
        self.steps = StepLog(span.get_span_context())

    @classmethod
    def begin(cls, tracing: Tracing, request: GenerateRequest) -> StreamTrace | None:
        """Return None for a request that is not sampled."""
        carrier = {"traceparent": request.traceparent, "tracestate": request.tracestate}
        attributes: dict[str, str | int] = {
            "headstart.request_id": request.request_id,
            "gen_ai.usage.input_tokens": len(request.prompt_ids),
            "headstart.choices": len(request.choices),
            "headstart.resumed_tokens": sum(len(choice.output_ids) for choice in request.choices),
        }
        span = tracing.begin("generate", carrier, attributes)
        return cls(tracing, span) if span.is_recording() else None

    def end(self, last: End | Failed | None) -> None:
        """`last` is the stream's last frame; None: its reader left before."""
        log, now_s = self.steps, time.monotonic()
        parent = as_parent(self._span)
        self._part("queue", parent, self._begun_s, log.begun_s or now_s)
        if log.begun_s is not None:
            prefilled_s = log.first_token_s or now_s
            self._part("prefill", parent, log.begun_s, prefilled_s, log.prefill)
            if log.decode.num_steps:
                self._part("decode", parent, prefilled_s, now_s, log.decode)
        self._span.set_attribute("headstart.cached_tokens", log.num_cached_tokens)
        if isinstance(last, Failed):
            mark_failed(self._span, last.code)
        elif last is None:
            self._span.set_attribute("headstart.aborted", True)
        self._span.end(self._at(now_s))
        self._export_batches(is_over=last is not None)

    def _export_batches(self, *, is_over: bool) -> None:
        """Export what the first of a batch's requests finds when it ends; a reader that has left may be too early."""
        log = self.steps
        log.is_closed = True
        batches, log.batches = log.batches, []
        for batch in batches:
            if not batch.is_exported and (is_over or all(member.is_closed for member in batch.members)):
                batch.is_exported = True
                self._export(batch)

    def _export(self, batch: BatchLog) -> None:
        attributes: dict[str, str | int] = {
            "headstart.kind": batch.kind,
            "headstart.steps": batch.num_steps,
            "headstart.sequences": batch.num_sequences,
            "headstart.tokens": batch.num_tokens,
        }
        links = [member.span for member in batch.members if member.span is not None]
        span = self._tracing.begin_linked("batch", links, attributes, self._at(batch.begun_s))
        span.end(self._at(batch.ended_s))

    def _part(
        self, name: str, parent: Context, begun_s: float, ended_s: float, steps: RecordedSteps | None = None
    ) -> None:
        span = self._tracing.tracer.start_span(name, parent, start_time=self._at(begun_s))
        if steps is not None:
            span.set_attribute("headstart.steps", steps.num_steps)
        for step in () if steps is None else steps.records:
            attributes: dict[str, int | float] = {
                "duration_s": step.ended_s - step.begun_s,
                "tokens": step.num_tokens,
                "batch_sequences": step.num_sequences,
                "batch_tokens": step.num_batch_tokens,
            }
            span.add_event("step", attributes, self._at(step.begun_s))
        span.end(self._at(ended_s))

    def _at(self, time_s: float) -> int:
        return self._ns + int(time_s * 1e9)
