"""The spans of one request at a worker, made when its stream ends from the notes of the engine's step log.

generate                       parent: the gateway's attempt, by the request's traceparent
  |-- queue
  |-- prefill                  an event for each step that computed a part of the prompt
  +-- decode                   an event for each of the first steps
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from worker.common.tracing import Tracing, as_parent, mark_failed
from worker.engine.protocol import RecordedSteps, StepLog
from worker.wire import End, Failed, GenerateRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.trace import Span, Tracer


class StreamTrace:
    """The spans of one request, from its arrival. The engine fills `steps`."""

    __slots__ = ("_begun_s", "_ns", "_span", "_tracer", "steps")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._begun_s = time.monotonic()
        self._ns = time.time_ns() - int(self._begun_s * 1e9)  # from the monotonic clock to the wall's
        self.steps = StepLog()

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
        return None if span is None else cls(tracing.tracer, span)

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

    def _part(
        self, name: str, parent: Context, begun_s: float, ended_s: float, steps: RecordedSteps | None = None
    ) -> None:
        span = self._tracer.start_span(name, parent, start_time=self._at(begun_s))
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
