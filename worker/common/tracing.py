"""OpenTelemetry spans of a worker: off by default, and then OpenTelemetry is not imported.

    generate                       parent: the gateway's attempt, by the request's traceparent
      |-- queue
      |-- prefill                  an event for each step that computed a part of the prompt
      +-- decode                   an event for each of the first steps

Attributes are names, counts and codes: never text, token ids or the messages of errors.
Spans are made when the stream ends, from what the engine has noted down: nothing of it stands in a step's way.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Final

from worker.engine.step_log import StepLog, StepRecord
from worker.wire import End, Failed, GenerateRequest

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span, Tracer

SERVICE: Final = "headstart-worker"
SHUTDOWN_S: Final = 2.0
_ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")


def wanted(endpoint: str | None, environment: Mapping[str, str]) -> bool:
    """Whether spans are to be sent. Raises ValueError for what cannot be followed."""
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"--otlp-endpoint must be an http:// or https:// URL, got {endpoint!r}")
    if environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or environment.get("OTEL_TRACES_EXPORTER") == "none":
        return False
    if endpoint is None and not any(environment.get(name) for name in _ENDPOINTS):
        return False
    for name in ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL"):
        if environment.get(name, "http/protobuf") != "http/protobuf":
            raise ValueError(f"{name}: only http/protobuf is spoken, got {environment[name]!r}")
    return True


def open_tracing(endpoint: str | None, instance: str) -> Tracing | None:
    """None: not wanted. `endpoint` is the base URL of an OTLP/HTTP collector; else the OTEL_ variables say it."""
    return Tracing(_provider(endpoint, instance)) if wanted(endpoint, os.environ) else None


def _provider(endpoint: str | None, instance: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    attributes = {"service.version": version("headstart"), "service.instance.id": instance}
    if "OTEL_SERVICE_NAME" not in os.environ:
        attributes["service.name"] = SERVICE
    provider = TracerProvider(resource=Resource.create(attributes), shutdown_on_exit=False)
    url = None if endpoint is None else f"{endpoint.rstrip('/')}/v1/traces"
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=url)))
    return provider


class Tracing:
    """Owner of the exporter. `close` sends what is left, within SHUTDOWN_S."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("headstart")

    def begin(self, request: GenerateRequest) -> StreamTrace | None:
        """None: this request is not sampled."""
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {"traceparent": request.traceparent, "tracestate": request.tracestate}
        parent = TraceContextTextMapPropagator().extract({key: text for key, text in carrier.items() if text})
        span = self._tracer.start_span(
            "generate",
            parent,
            SpanKind.SERVER,
            {
                "headstart.request_id": request.request_id,
                "gen_ai.usage.input_tokens": len(request.prompt_ids),
                "headstart.choices": len(request.choices),
                "headstart.resumed_tokens": sum(len(choice.output_ids) for choice in request.choices),
            },
        )
        return StreamTrace(self._tracer, span) if span.is_recording() else None

    def close(self) -> None:
        closing = threading.Thread(target=self._provider.shutdown, name="tracing", daemon=True)
        closing.start()
        closing.join(SHUTDOWN_S)


class StreamTrace:
    """The spans of one request, from its arrival. `steps` is for the engine to fill."""

    __slots__ = ("_begun_s", "_ns", "_span", "_tracer", "steps")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        self._begun_s = time.monotonic()
        self._ns = time.time_ns() - int(self._begun_s * 1e9)
        """From the monotonic clock to the wall's."""
        self.steps = StepLog()

    def end(self, last: End | Failed | None) -> None:
        """`last` is the stream's last frame; None: its reader left before."""
        from opentelemetry.trace import set_span_in_context

        log, now_s = self.steps, time.monotonic()
        parent = set_span_in_context(self._span)
        self._part("queue", parent, self._begun_s, log.begun_s or now_s)
        if log.begun_s is not None:
            prefilled_s = log.first_token_s or now_s
            self._part("prefill", parent, log.begun_s, prefilled_s, log.prefills, log.num_prefills)
            if log.num_decodes:
                self._part("decode", parent, prefilled_s, now_s, log.decodes, log.num_decodes)
        self._span.set_attribute("headstart.cached_tokens", log.num_cached_tokens)
        if isinstance(last, Failed):
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR)
            self._span.set_attribute("error.type", last.code)
        elif last is None:
            self._span.set_attribute("headstart.aborted", True)
        self._span.end(self._at(now_s))

    def _part(
        self,
        name: str,
        parent: Context,
        begun_s: float,
        ended_s: float,
        steps: Sequence[StepRecord] = (),
        num_steps: int | None = None,
    ) -> None:
        span = self._tracer.start_span(name, parent, start_time=self._at(begun_s))
        if num_steps is not None:
            span.set_attribute("headstart.steps", num_steps)
        for step in steps:
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
