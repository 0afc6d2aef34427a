"""TGI's sixteen metrics of queue and batches, under our names, and the spans of batches, at real processes."""

from __future__ import annotations

import asyncio
import re
import secrets
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.otlp import Collector, Span
from tests.faults.client import Outcome, ask, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.part import metrics
from tests.faults.worker_process import Additions
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.e2e

POISON = 4242
"""A token whose step raises."""
LONG, LEAVING = 200, 400
"""Tokens of the request that all others join, and of the one that its client leaves."""
NAMES = {
    "tgi_queue_size": "queue_size",
    "tgi_request_queue_duration": "queue_seconds",
    "tgi_batch_next_size": "batch_size",
    "tgi_batch_current_size": "running_sequences",
    "tgi_batch_current_max_tokens": "running_max_tokens",
    "tgi_batch_concat": "batch_growth_total",
    "tgi_batch_concat_duration": "batch_growth_seconds",
    "tgi_batch_inference_count": "step_seconds_count",
    "tgi_batch_inference_success": "step_seconds_count",
    "tgi_batch_inference_failure": "step_failures_total",
    "tgi_batch_inference_duration": "step_seconds",
    "tgi_batch_forward_duration": "forward_seconds",
    "tgi_batch_decode_duration": "sample_seconds",
    "tgi_batch_filter_duration": "host_seconds",
    "tgi_request_skipped_tokens": "skipped_tokens_total",
    "tgi_request_failure": "request_failures_total",
}


class Worker:
    """The samples of a worker, in TGI's names."""

    def __init__(self, url: str) -> None:
        self._samples = metrics(url)

    def get(self, tgi: str, suffix: str = "", *labels: str) -> float:
        name = f"headstart_worker_{NAMES[tgi]}{suffix}"
        return self._samples.get(name + (f"{{{','.join(labels)}}}" if labels else ""), 0.0)

    def by_kind(self, tgi: str, suffix: str = "") -> dict[str, float]:
        return {kind: self.get(tgi, suffix, kind) for kind in ("prefill", "decode", "mixed")}


def test_the_table_in_the_docs_is_ours() -> None:
    page = (Path(__file__).parents[2] / "docs" / "kubernetes" / "metrics.md").read_text()
    rows = re.findall(r"^\| `(tgi_\w+)[^|]*\| `(\w+)", page, re.MULTILINE)
    assert dict(rows) == NAMES
    assert len(rows) == 16


def prompt(first: int, num_tokens: int) -> list[int]:
    return [100 + (first * 997 + i * 31) % 3900 for i in range(num_tokens)]


class Requests:
    """Clients of one gateway. Those with a trace id ask for a trace."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._http = session()

    async def __aenter__(self) -> Requests:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    def ask(self, ids: list[int], max_tokens: int, trace_id: str = "", on_tokens: Any = None) -> asyncio.Task[Outcome]:
        headers = {"traceparent": f"00-{trace_id or secrets.token_hex(16)}-00f067aa0ba902b7-0{int(bool(trace_id))}"}
        body = completion("", max_tokens=max_tokens) | {"prompt": ids}
        return asyncio.create_task(ask(self._http, self._url, body, headers=headers, on_tokens=on_tokens))

    async def ask_until_it_streams(self, ids: list[int], max_tokens: int, trace_id: str = "") -> asyncio.Task[Outcome]:
        streams = asyncio.Event()
        task = self.ask(ids, max_tokens, trace_id, lambda outcome: streams.set())
        await streams.wait()
        return task


async def test_tgis_metrics_and_the_spans_of_batches(tmp_path: Path, tiny_model: Path) -> None:
    first_trace, second_trace = secrets.token_hex(16), secrets.token_hex(16)
    with Collector() as collector:
        tracing = ["--otlp-endpoint", collector.url]
        topology = Topology(
            num_workers=1,
            worker_args=[*tracing, "--max-num-seqs", "2"],
            gateway_args=[*tracing, "--hold-s", "0"],
            additions=Additions(step_s=0.03, poison_token=POISON),
        )
        with Cluster(tmp_path, tiny_model, topology) as cluster:
            url = cluster.workers[0].url
            before = Worker(url)
            async with Requests(cluster.gateway.url) as requests:
                first = await requests.ask_until_it_streams(prompt(1, 300), LONG, first_trace)
                second = await requests.ask_until_it_streams(prompt(2, 20), LEAVING, second_trace)
                third = requests.ask(prompt(3, 20), 5)  # both slots are taken
                await until(lambda: is_loaded(Worker(url)))
                loaded = Worker(url)
                second.cancel()
                assert (await third).ok
                assert (await requests.ask([*prompt(4, 20), POISON], 5)).status == 500
                assert not first.done(), "it was to be in the batch that failed"
                assert (await first).ok
            await until(lambda: Worker(url).get("tgi_batch_current_size") == 0)
            assert_metrics(before, loaded, Worker(url))
            spans = collector.wait_for(None, lambda spans: is_complete(spans, first_trace))
    assert_spans(spans, first_trace, second_trace)


def is_loaded(worker: Worker) -> bool:
    """Return whether two sequences run and one waits, all in one report."""
    return (worker.get("tgi_batch_current_size"), worker.get("tgi_queue_size")) == (2, 1)


def assert_metrics(before: Worker, loaded: Worker, after: Worker) -> None:
    def grown(tgi: str, suffix: str = "", *labels: str) -> float:
        return after.get(tgi, suffix, *labels) - before.get(tgi, suffix, *labels)

    assert before.get("tgi_queue_size") == after.get("tgi_queue_size") == 0 < loaded.get("tgi_queue_size")
    assert grown("tgi_request_queue_duration", "_count") == 4
    assert grown("tgi_request_queue_duration", "_sum") > 0.03  # the third waited for a step at least
    assert loaded.get("tgi_batch_current_size") == 2
    assert loaded.get("tgi_batch_current_max_tokens") == 300 + LONG + 20 + LEAVING
    assert after.get("tgi_batch_current_max_tokens") == 0

    growths = {reason: grown("tgi_batch_concat", "", reason) for reason in ("idle", "chunking")}
    assert growths == {"idle": 1, "chunking": 3}
    assert grown("tgi_batch_concat_duration", "_count") == 4
    assert 0 < grown("tgi_batch_concat_duration", "_sum") < HANG_S

    successes = after.by_kind("tgi_batch_inference_success")
    failures = after.by_kind("tgi_batch_inference_failure")
    assert failures == {"prefill": 0, "decode": 0, "mixed": 1}
    assert successes["prefill"] >= 1
    assert successes["mixed"] >= 2
    assert successes["decode"] > LONG / 2
    num_steps = sum(successes.values())
    assert grown("tgi_batch_next_size", "_count") == num_steps + 1  # TGI's inference count
    assert num_steps + 1 < grown("tgi_batch_next_size", "_sum") <= 2 * (num_steps + 1)
    duration_s = after.by_kind("tgi_batch_inference_duration", "_sum")
    assert sum(duration_s.values()) > 0.03 * num_steps

    assert after.by_kind("tgi_batch_forward_duration", "_count") == successes
    assert after.by_kind("tgi_batch_decode_duration", "_count") == successes
    forward_s = after.by_kind("tgi_batch_forward_duration", "_sum")
    sample_s = after.by_kind("tgi_batch_decode_duration", "_sum")
    for kind, seconds in duration_s.items():
        assert forward_s[kind] > 0
        assert sample_s[kind] > 0
        assert forward_s[kind] + sample_s[kind] < seconds
    assert grown("tgi_batch_filter_duration", "_count", "update") == num_steps
    assert grown("tgi_batch_filter_duration", "_sum", "update") > 0
    assert after.get("tgi_request_skipped_tokens") == 0  # it moves in test_speculation.py
    assert grown("tgi_request_failure", "", "internal_error") == 1


def named(spans: list[Span], name: str, trace_id: str | None = None) -> list[Span]:
    found = [span for span in spans if (span.service, span.name) == ("headstart-worker", name)]
    return [span for span in found if trace_id in (None, span.trace_id)]


def num_steps(spans: list[Span]) -> int:
    return sum(int(str(span.attributes["headstart.steps"])) for span in spans)


def steps_of(spans: list[Span], trace_id: str) -> tuple[int, int]:
    """Steps of the request by its own spans, and by the batches that link to it."""
    own = [*named(spans, "prefill", trace_id), *named(spans, "decode", trace_id)]
    ids = {span.span_id for span in named(spans, "generate", trace_id)}
    return num_steps(own), num_steps([span for span in named(spans, "batch") if ids & set(span.links)])


def is_complete(spans: list[Span], trace_id: str) -> bool:
    own, linked = steps_of(spans, trace_id)
    return own == linked > 0


def assert_spans(spans: list[Span], first_trace: str, second_trace: str) -> None:
    (first,), (second,) = named(spans, "generate", first_trace), named(spans, "generate", second_trace)
    batches = named(spans, "batch")
    seen = {
        (batch.attributes["headstart.kind"], batch.attributes["headstart.sequences"], batch.links) for batch in batches
    }
    alone, both = (first.span_id,), (first.span_id, second.span_id)
    assert seen >= {("prefill", 1, alone), ("decode", 1, alone), ("mixed", 2, both), ("decode", 2, both)}
    with_others = {(kind, size) for kind, size, links in seen if first.span_id in links and second.span_id not in links}
    assert with_others >= {("mixed", 2), ("decode", 2)}
    assert len(batches) < 20
    assert num_steps(batches) == LONG  # the first was in every one, and each step brought it a token
    for batch in batches:
        assert batch.parent_id == ""
        assert batch.begun_ns < batch.ended_ns
        fields = batch.attributes
        if fields["headstart.kind"] == "decode":
            assert int(str(fields["headstart.tokens"])) == num_steps([batch]) * int(str(fields["headstart.sequences"]))
    assert len({batch.trace_id for batch in batches} - {first_trace, second_trace}) == len(batches)
