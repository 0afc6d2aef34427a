"""Traces and logs of real processes: one request's spans from the client to the engine's steps, and no word of it."""

from __future__ import annotations

import itertools
import json
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.e2e.otlp import Collector, Span
from tests.e2e.serving import SMALL_POOL, Serve

pytestmark = pytest.mark.e2e

PROMPT = "Zanzibar quokkas juggle marmalade. " * 40
GATEWAY, WORKER = "headstart-gateway", "headstart-worker"


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as running:
        yield running


@pytest.fixture(scope="module")
def serve(collector: Collector, tiny_model: Path) -> Iterator[Serve]:
    options = [
        "--gateway-args=--log-format json --access-log",
        "--worker-args=--log-format json --log-level debug " + SMALL_POOL,
    ]
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with Serve("--model", str(tiny_model), "--num-workers", "1", *options, env=environment) as running:
        yield running


def ask(serve: Serve, trace_id: str, *, sampled: bool = True, **fields: object) -> httpx.Response:
    model = serve.model()
    headers = {"traceparent": f"00-{trace_id}-00f067aa0ba902b7-0{int(sampled)}", "tracestate": "vendor=1"}
    body = {"model": model, "messages": [{"role": "user", "content": PROMPT}], "max_tokens": 5, "temperature": 0}
    return serve.post("/v1/chat/completions", body | {"ignore_eos": True} | fields, headers=headers)


def is_whole(spans: list[Span]) -> bool:
    return len(spans) >= 11


def tree(spans: list[Span]) -> dict[tuple[str, str], tuple[str, str] | None]:
    by_id = {span.span_id: span for span in spans}
    parents = {(s.service, s.name): by_id.get(s.parent_id) for s in spans}
    return {key: None if parent is None else (parent.service, parent.name) for key, parent in parents.items()}


@pytest.mark.parametrize("stream", [False, True])
def test_one_trace_from_the_client_to_the_steps(serve: Serve, collector: Collector, stream: bool) -> None:
    trace_id = secrets.token_hex(16)
    answer = ask(serve, trace_id, stream=stream)
    assert answer.status_code == 200, answer.text
    spans = collector.wait_for(trace_id, is_whole)
    root, attempt = (GATEWAY, "POST /v1/chat/completions"), (GATEWAY, "generate")
    assert tree(spans) == {
        root: None,
        (GATEWAY, "validate"): root,
        (GATEWAY, "tokenise"): root,
        (GATEWAY, "route"): root,
        attempt: root,
        (GATEWAY, "first token"): attempt,
        (GATEWAY, "stream"): attempt,
        (WORKER, "generate"): attempt,
        (WORKER, "queue"): (WORKER, "generate"),
        (WORKER, "prefill"): (WORKER, "generate"),
        (WORKER, "decode"): (WORKER, "generate"),
    }
    named = {(span.service, span.name): span for span in spans}
    assert named[root].parent_id == "00f067aa0ba902b7"
    assert named[root].attributes["headstart.request_id"] == answer.headers["x-request-id"]
    assert named[root].attributes["http.response.status_code"] == 200
    assert named[root].attributes["gen_ai.usage.output_tokens"] == 5
    assert named[WORKER, "prefill"].attributes["headstart.steps"] == len(named[WORKER, "prefill"].events) >= 1
    assert named[WORKER, "decode"].attributes["headstart.steps"] == 4
    num_computed = sum(int(str(fields["tokens"])) for _, fields in named[WORKER, "prefill"].events)
    worker = named[WORKER, "generate"].attributes
    assert num_computed + int(str(worker["headstart.cached_tokens"])) == worker["gen_ai.usage.input_tokens"]
    order = [named[WORKER, name] for name in ("queue", "prefill", "decode")]
    for earlier, later in itertools.pairwise(order):
        assert earlier.begun_ns <= earlier.ended_ns == later.begun_ns <= later.ended_ns
    assert not any(span.failed for span in spans)


def test_a_refused_request_is_a_trace_too(serve: Serve, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    answer = ask(serve, trace_id, temperature="quokka")
    assert answer.status_code == 400
    spans = collector.wait_for(trace_id, lambda spans: len(spans) >= 2)
    assert {span.name: span.failed for span in spans} == {"POST /v1/chat/completions": False, "validate": True}
    assert {span.attributes.get("error.type") for span in spans} == {None, "InvalidRequestError"}


def test_what_the_client_has_not_sampled_is_not_traced(serve: Serve, collector: Collector) -> None:
    unsampled, sampled = secrets.token_hex(16), secrets.token_hex(16)
    for trace_id in (unsampled, sampled):
        assert ask(serve, trace_id, sampled=trace_id == sampled).status_code == 200
    collector.wait_for(sampled, is_whole)
    assert unsampled not in {span.trace_id for span in collector.spans}
    assert all(span.parent_id for span in collector.spans if span.name == "generate"), "a worker began its own trace"


def test_spans_tell_nothing_of_the_text(serve: Serve, collector: Collector) -> None:
    """Spans have neither text nor token ids, which a tokenizer turns into text: numbers are single, never in lists."""
    trace_id = secrets.token_hex(16)
    answer = ask(serve, trace_id).json()
    collector.wait_for(trace_id, is_whole)
    words = {"quokka", "marmalade", "Zanzibar"} | set(re.findall(r"\w{4,}", answer["choices"][0]["message"]["content"]))
    for span in collector.spans:
        values = [*span.attributes.items(), *(item for _, fields in span.events for item in fields.items())]
        for key, value in values:
            assert type(value) in (str, int, float, bool), (span.name, key, value)
            assert not any(word.lower() in str(value).lower() for word in words), (span.name, key, value)
            assert len(str(value)) < 100


def test_logs_are_json_with_the_ids_and_without_the_text(serve: Serve, collector: Collector) -> None:
    trace_id = secrets.token_hex(16)
    request_id = ask(serve, trace_id).headers["x-request-id"]
    line = serve.wait_for_line(re.compile(rf'^\[gateway\] (.*"{request_id}".*)'))[1]
    record = json.loads(line)
    assert (record["level"], record["logger"]) == ("INFO", "server.access")
    assert (record["request_id"], record["trace_id"]) == (request_id, trace_id)
    assert (record["route"], record["status"], record["output_tokens"]) == ("chat", 200, 5)
    assert record["prompt_tokens"] > 100
    for written in serve.lines:
        text = written.partition("] ")[2]
        if written.startswith("[gateway] ") or (written.startswith("[worker-0] ") and text.startswith("{")):
            assert {"time", "level", "logger", "message"} <= json.loads(text).keys()
        assert "quokka" not in written.lower()


@pytest.mark.parametrize("module", ["server.gateway", "worker.main"])
def test_without_an_endpoint_opentelemetry_is_not_even_imported(module: str) -> None:
    heavy = ("opentelemetry.sdk.trace", "opentelemetry.exporter", "google.protobuf", "requests", "pythonjsonlogger")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
