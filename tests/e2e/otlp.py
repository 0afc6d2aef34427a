"""An OTLP/HTTP collector in this process: keeps the spans that real processes send it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from tests.waiting import HANG_S


@dataclass(frozen=True)
class Span:
    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    begun_ns: int
    ended_ns: int
    failed: bool
    attributes: dict[str, object]
    events: tuple[tuple[str, dict[str, object]], ...]
    links: tuple[str, ...]
    """Ids of spans."""


class Collector:
    """Use it as a context manager; `url` is what OTEL_EXPORTER_OTLP_ENDPOINT wants."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._spans: list[Span] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                collector._take(self.path, self.rfile.read(int(self.headers["content-length"])))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def wait_for(
        self, trace_id: str | None, complete: Callable[[list[Span]], bool], timeout_s: float = HANG_S
    ) -> list[Span]:
        """The spans of a trace, or of all, once they are complete."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not complete(found := [s for s in self._spans if trace_id in (None, s.trace_id)]):
                left_s = deadline_s - time.monotonic()
                assert left_s > 0, [(span.service, span.name) for span in found]
                self._changed.wait(left_s)
        return found

    @property
    def spans(self) -> list[Span]:
        with self._changed:
            return list(self._spans)

    def _take(self, path: str, body: bytes) -> None:
        assert path == "/v1/traces", path
        message = ExportTraceServiceRequest.FromString(body)
        with self._changed:
            for resource in message.resource_spans:
                service = str(_fields(resource.resource.attributes)["service.name"])
                for scope in resource.scope_spans:
                    self._spans += [_span(service, span) for span in scope.spans]
            self._changed.notify_all()


def _span(service: str, span: object) -> Span:
    from opentelemetry.proto.trace.v1.trace_pb2 import Span as Message
    from opentelemetry.proto.trace.v1.trace_pb2 import Status

    assert isinstance(span, Message)
    return Span(
        service,
        span.name,
        span.trace_id.hex(),
        span.span_id.hex(),
        span.parent_span_id.hex(),
        span.start_time_unix_nano,
        span.end_time_unix_nano,
        span.status.code == Status.STATUS_CODE_ERROR,
        _fields(span.attributes),
        tuple((event.name, _fields(event.attributes)) for event in span.events),
        tuple(link.span_id.hex() for link in span.links),
    )


def _fields(pairs: list[KeyValue] | object) -> dict[str, object]:
    return {pair.key: _value(pair.value) for pair in pairs}  # type: ignore[attr-defined]


def _value(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    return None if kind is None else getattr(value, kind)
