"""A worker's samples under vLLM's names."""

from __future__ import annotations

from tests.worker.engine.threaded_engine import BLOCK_SIZE, ThreadedEngine
from tests.worker.scheduler.engine import generate
from worker.engine.metrics import WorkerMetrics
from worker.engine.protocol import RequestKey


def test_vllms_names_have_the_same_values(threaded: ThreadedEngine) -> None:
    threaded.metrics.add_vllm_names("m")

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


def test_an_adapter_has_none() -> None:
    """Its engine exports them under the same names: sums would count twice."""
    assert b"vllm:" not in WorkerMetrics().render()
