"""A worker's samples under vLLM's names, and what its traced requests note of their batches."""

from __future__ import annotations

import pytest

from tests.waiting import HANG_S
from tests.worker.engine.threaded_engine import BLOCK_SIZE, ThreadedEngine
from tests.worker.scheduler.engine import generate
from worker.contracts.engine import EngineOutput, RequestKey, StepLog
from worker.contracts.metrics import VllmNames, WorkerMetrics
from worker.engine import inflight
from worker.wire import Tokens


def test_vllms_names_have_the_same_values(threaded: ThreadedEngine) -> None:
    threaded.metrics.registry.register(VllmNames(threaded.metrics, "m"))

    def vllm(name: str) -> float | None:
        return threaded.metrics.registry.get_sample_value(f"vllm:{name}", {"model_name": "m"})

    prompt = range(2 * BLOCK_SIZE + 1)
    for i in range(3):
        threaded.submit(i, generate(prompt, 6))
        threaded.wait(RequestKey(i))
    threaded.settle()
    threaded.engine.mailbox.call(threaded.engine._reporter.report).result()
    assert vllm("prefix_cache_queries_total") == 3 * len(prompt)
    assert vllm("prefix_cache_hits_total") == threaded.counted("cached_tokens_total") == 2 * 2 * BLOCK_SIZE
    assert vllm("num_preemptions_total") == 0
    for name, own in (("queue", "queue"), ("prefill", "prefill"), ("decode", "decode")):
        assert vllm(f"request_{name}_time_seconds_count") == 3
        assert vllm(f"request_{name}_time_seconds_sum") == threaded.counted(f"{own}_seconds_sum")
    assert threaded.metrics.render().count(b"# TYPE vllm:num_preemptions_total counter") == 1


def test_an_abort_in_the_queue_is_no_prefill(threaded: ThreadedEngine) -> None:
    threaded.runner.gate.clear()
    threaded.submit(0, generate([1, 2, 3], 2))
    assert threaded.runner.entered.acquire(timeout=HANG_S)
    waiting = threaded.submit(1, generate([4, 5, 6], 2))
    threaded.engine.abort(waiting)
    threaded.runner.gate.set()
    for key in range(2):
        threaded.wait(RequestKey(key))
    threaded.settle()
    for name in ("queue", "prefill", "decode"):
        assert threaded.counted(f"{name}_seconds_count") == 1


def test_an_adapter_has_none() -> None:
    """Its engine exports them under the same names: sums would count twice."""
    assert b"vllm:" not in WorkerMetrics().render()


def test_tokens_that_come_together_are_counted_one_by_one() -> None:
    metrics = WorkerMetrics()
    metrics.count_outputs([EngineOutput(RequestKey(0), Tokens(0, ids)) for ids in ((1,), (1, 2, 3), (1, 2))])
    assert metrics.registry.get_sample_value("headstart_worker_output_tokens_total") == 6
    assert metrics.registry.get_sample_value("headstart_worker_skipped_tokens_total") == 3


@pytest.mark.parametrize("kind", ["prefill", "decode", "mixed"])
def test_step_failures_begin_at_zero(kind: str) -> None:
    registry = WorkerMetrics().registry
    assert registry.get_sample_value("headstart_worker_step_failures_total", {"kind": kind}) == 0


def test_consecutive_decodes_of_the_same_requests_are_one_batch(threaded: ThreadedEngine) -> None:
    """The second request is not traced: it only shows in the number of sequences."""
    log = StepLog()
    threaded.runner.gate.clear()
    threaded.submit(0, generate([1, 2, 3], 40), log)
    threaded.submit(1, generate([4, 5, 6], 10))
    threaded.runner.gate.set()
    for key in range(2):
        threaded.wait(RequestKey(key))
    threaded.settle()
    assert sum(batch.num_steps for batch in log.batches) == log.prefill.num_steps + log.decode.num_steps == 40
    assert all(batch.members == [log] for batch in log.batches)
    assert {(batch.kind, batch.num_sequences) for batch in log.batches} >= {("decode", 2), ("decode", 1)}
    assert len(log.batches) <= 5
    for batch in log.batches:
        assert batch.begun_s < batch.ended_s
        if batch.kind == "decode":
            assert batch.num_tokens == batch.num_sequences * batch.num_steps
    threaded.wait(threaded.submit(2, generate([7], 1)))
    assert not threaded.engine._in_flight.step_logs, "the log of a request that has ended is kept"


def test_a_request_keeps_the_first_of_many_batches(threaded: ThreadedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inflight, "MAX_RECORDED_STEPS", 3)
    log = StepLog()
    threaded.runner.gate.clear()
    threaded.submit(0, generate([0, 2, 3], 40), log)
    for i in range(1, 5):
        threaded.submit(i, generate([i, 2, 3], 5 * i))
    threaded.runner.gate.set()
    threaded.wait(RequestKey(0))
    assert len(log.batches) == 3
    assert log.decode.num_steps == 39
