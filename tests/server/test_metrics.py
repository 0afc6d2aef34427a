"""The fleet's gauges, as Prometheus would read them."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from cache.index import Candidate, WorkerLoad, WorkerMember
from cache.types import Epoch, WorkerId
from server.metrics import FleetMetrics


def candidate(name: str, load: WorkerLoad) -> Candidate:
    member = WorkerMember(WorkerId(name), Epoch("e"), f"http://{name}", "m", "n", "cpu", 16, 512, 1)
    return Candidate(member, load, 0)


def test_a_model_without_workers_is_told_as_zero() -> None:
    registry = CollectorRegistry()
    registry.register(FleetMetrics(lambda: ["gone"], list, lambda worker_id: False, lambda: True, lambda: 0))
    labels = {"model": "gone", "state": "serving"}
    assert registry.get_sample_value("headstart_workers", labels) == 0.0
    assert registry.get_sample_value("headstart_index_blind") == 1.0
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", {"model_name": "gone"}) == 0.0


def test_states_and_loads_are_summed_over_the_workers() -> None:
    busy = WorkerLoad(num_running=3, num_waiting=2, num_free_blocks=25, num_blocks=100)
    leaving = WorkerLoad(num_running=1, num_free_blocks=100, num_blocks=100, draining=True)
    candidates = [candidate("a", busy), candidate("b", leaving), candidate("c", busy)]
    registry = CollectorRegistry()
    registry.register(
        FleetMetrics(list, lambda: candidates, lambda worker_id: worker_id == "c", lambda: False, lambda: 0)
    )

    def workers(state: str) -> float | None:
        return registry.get_sample_value("headstart_workers", {"model": "m", "state": state})

    assert [workers(state) for state in ("serving", "draining", "broken")] == [1.0, 1.0, 1.0]
    assert registry.get_sample_value("vllm:num_requests_running", {"model_name": "m"}) == 7.0
    assert registry.get_sample_value("vllm:num_requests_waiting", {"model_name": "m"}) == 4.0
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", {"model_name": "m"}) == 0.5
    pools = {"model_name": "m", "block_size": "16", "num_gpu_blocks": "300"}
    assert registry.get_sample_value("vllm:cache_config_info", pools) == 1.0
