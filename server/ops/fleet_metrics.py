"""Gauges of the fleet for the metrics page."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from server.router.router import Router
from server.workers.fleet import Fleet, state_of


class FleetMetrics(Collector):
    """The fleet as this gateway knows it, read at each scrape, so that no request pays for it.

    The vllm gauges are those of the model server protocol of the Gateway API inference extension, which sees a gateway
    as the server of the models behind it. Models whose workers are all gone are named too.
    """

    def __init__(self, fleet: Fleet, router: Router) -> None:
        self._fleet = fleet
        self._router = router

    def collect(self) -> Iterable[GaugeMetricFamily]:
        models = sorted({worker.model for worker in self._fleet.workers()})
        by_model = {model: self._fleet.candidates(model, None) for model in models}
        yield GaugeMetricFamily(
            "headstart_index_blind",
            "1 while routing goes without the shared index.",
            float(self._router.index_state()["blind"]),
        )
        yield GaugeMetricFamily(
            "headstart_requests_booked",
            "Requests of this gateway that are at workers.",
            float(self._router.scorer.num_outstanding()),
        )
        workers = GaugeMetricFamily("headstart_workers", "Live workers by state.", labels=("model", "state"))
        waiting = GaugeMetricFamily("vllm:num_requests_waiting", "Sequences that wait.", labels=("model_name",))
        running = GaugeMetricFamily("vllm:num_requests_running", "Sequences that run.", labels=("model_name",))
        usage = GaugeMetricFamily("vllm:kv_cache_usage_perc", "Used part of the KV pools.", labels=("model_name",))
        pools = GaugeMetricFamily(
            "vllm:cache_config_info", "The KV pools.", labels=("model_name", "block_size", "num_gpu_blocks")
        )
        broken = self._fleet.broken()
        for model, candidates in by_model.items():
            states = [state_of(candidate, broken) for candidate in candidates]
            for state in ("serving", "draining", "broken"):
                workers.add_metric((model, state), states.count(state))
            loads = [candidate.load for candidate in candidates]
            waiting.add_metric((model,), sum(load.num_waiting for load in loads))
            running.add_metric((model,), sum(load.num_running for load in loads))
            num_blocks = sum(load.num_blocks for load in loads)
            num_free = sum(load.num_free_blocks for load in loads)
            usage.add_metric((model,), 1.0 - num_free / num_blocks if num_blocks else 0.0)
            for block_size in sorted({candidate.member.block_size for candidate in candidates}):
                pools.add_metric((model, str(block_size), str(num_blocks)), 1.0)
        yield from (workers, waiting, running, usage, pools)
