"""The counters of a gateway and the gauges of its fleet, as Prometheus reads them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from msgspec import structs
from prometheus_client import CollectorRegistry
from tokenizers import Tokenizer

from cache.records import Candidate, WorkerLoad
from cache.types import GatewayId
from server.config import GatewayConfig
from server.metrics import LATENCY_S
from server.ops.overview import Overview
from server.router.index_accuracy import IndexAccuracy
from server.usage.day import DayHistory
from server.usage.totals import UsageTotals
from server.workers.fleet import NoIndex
from tests.members import make_member
from tests.server.conftest import ANSWER
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import chat, post
from tests.waiting import until
from worker.contracts.metrics import WorkerMetrics
from worker.wire import TokenizerBundle


async def test_answers_tokens_and_promises_are_counted(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> None:
    worker = ScriptedWorker(bundle, reply=raw_tokenizer.encode(ANSWER).ids, num_cached_tokens=16)
    async with gateway(worker) as target:

        def counted(name: str, **labels: str) -> float:
            return target.metrics.registry.get_sample_value(f"headstart_{name}", labels) or 0.0

        for promised, stream in ((20, True), (20, False), (10, True)):
            target.router.promised_tokens = promised
            assert (await post(target.url, chat(stream=stream)))[0] == 200
        assert (await post(target.url, chat(max_tokens=0)))[0] == 400
        await until(lambda: counted("request_seconds_count", route="chat") == 4)
        assert counted("requests_total", route="chat", status="200") == 3
        assert counted("requests_total", route="chat", status="400") == 1
        assert counted("requests_dropped_total", reason="invalid_request_error") == 1
        assert counted("time_to_first_token_seconds_count") == 2, "of streams"
        assert counted("time_per_output_token_seconds_count") == 2
        assert counted("prompt_tokens_total") == sum(len(request.prompt_ids) for request in worker.received)
        assert counted("output_tokens_total") == 3 * (len(worker.reply) + 1)
        assert counted("promised_cached_tokens_total") == 20 + 20 + 10
        assert counted("cached_tokens_total") == 3 * 16
        assert counted("promise_error_tokens_total", direction="too_much") == 4 + 4
        assert counted("promise_error_tokens_total", direction="too_little") == 6


async def test_vllms_names_by_model(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> None:
    reply = raw_tokenizer.encode(ANSWER).ids
    other = ScriptedWorker(replace(bundle, model="other"), worker_id="w1", reply=reply)
    worker = ScriptedWorker(bundle, reply=reply)
    async with gateway(worker, other) as target:
        registry = target.metrics.registry

        def counted(name: str, model: str = "tiny", **labels: str) -> float | None:
            return registry.get_sample_value(f"vllm:{name}", {"model_name": model, **labels})

        def ours(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"headstart_{name}", labels)

        target.router.members = [worker.member()]
        await post(target.url, chat(stream=True))
        await post(target.url, chat(max_tokens=3, n=2))
        await post(target.url, {"model": "tiny", "prompt": "x", "max_tokens": 2, "stream": True}, "/v1/completions")
        await post(target.url, chat(max_tokens=0))
        target.router.members = []
        assert (await post(target.url, chat()))[0] == 503
        target.router.members = [other.member()]
        await post(target.url, chat(model="other"))
        await until(lambda: (ours("request_seconds_count", route="chat") or 0) == 5)

        prompts = {each: sum(len(request.prompt_ids) for request in each.received) for each in (worker, other)}
        assert counted("prompt_tokens_total") == prompts[worker]
        assert counted("prompt_tokens_total", "other") == prompts[other]
        assert ours("prompt_tokens_total") == sum(prompts.values()), "ours is the sum over models"
        whole = len(reply) + 1
        assert counted("generation_tokens_total") == whole + 2 * 3 + 2
        assert counted("generation_tokens_total", "other") == whole
        assert counted("request_success_total", finished_reason="stop") == 1
        assert counted("request_success_total", finished_reason="length") == 2 + 1
        assert counted("request_success_total", "other", finished_reason="stop") == 1
        assert counted("e2e_request_latency_seconds_count") == 3, "of answers that came to their end, on all routes"
        assert counted("e2e_request_latency_seconds_count", "other") == 1
        assert counted("time_to_first_token_seconds_count") == ours("time_to_first_token_seconds_count") == 2
        assert counted("time_to_first_token_seconds_sum") == ours("time_to_first_token_seconds_sum")
        assert counted("request_time_per_output_token_seconds_count") == 2
        name = "inter_token_latency_seconds"
        assert counted(f"{name}_count") == counted(f"{name}_bucket", le="+Inf") == (whole - 1) + (2 - 1)
        assert counted("request_prompt_tokens_count") == 3
        assert counted("request_generation_tokens_sum") == whole + 2 * 3 + 2


def test_a_bucket_holds_the_longest_request() -> None:
    """A quantile above the last bound would be that bound."""
    longest_s = GatewayConfig(workers=("http://w",)).request_timeout_s
    assert LATENCY_S[-1] >= longest_s
    for histogram in (WorkerMetrics().queue_s, WorkerMetrics().decode_s):
        bounds = [sample.labels["le"] for sample in next(iter(histogram.collect())).samples if "le" in sample.labels]
        assert sorted(map(float, bounds))[-2] >= longest_s


async def test_choices_run_side_by_side(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> None:
    """The time between the tokens of one is not divided by their number."""
    means = []
    for n in (1, 8):
        worker = ScriptedWorker(bundle, reply=raw_tokenizer.encode(ANSWER).ids, pace_s=0.02 / n)
        async with gateway(worker) as target:
            name, value = "vllm:inter_token_latency_seconds", target.metrics.registry.get_sample_value
            await post(target.url, chat(stream=True, n=n))
            total_s, num_gaps = (value(f"{name}_{part}", {"model_name": "tiny"}) or 0 for part in ("sum", "count"))
            means.append(total_s / num_gaps)
    assert min(means) > 0.015


def candidate(name: str, load: WorkerLoad) -> Candidate:
    return Candidate(make_member(name), load, 0)


def fleet_metrics(
    candidates: Sequence[Candidate] = (),
    models: Sequence[str] = ("m",),
    broken: Sequence[str] = (),
    blind: bool = False,
    held_prefills_s: Sequence[float] = (),
    ends: str = "",
    needed: int | None = None,
) -> Overview:
    fleet = SimpleNamespace(
        workers=lambda: [SimpleNamespace(model=model, ends=ends) for model in models],
        candidates=lambda model, root: list(candidates),
        broken=lambda: set(broken),
        refused=list,
    )
    scorer = SimpleNamespace(loads=SimpleNamespace(num_outstanding=lambda: 0))
    router = SimpleNamespace(
        fleet=fleet,
        lookup_failed=blind,
        scorer=scorer,
        queue=SimpleNamespace(prefills_s=lambda model: list(held_prefills_s)),
    )
    needs = SimpleNamespace(needed=lambda model: needed)
    models_seen = SimpleNamespace(state_of=lambda member: ("serving", ""))
    services = SimpleNamespace(requests=SimpleNamespace(metrics=None), models=models_seen)
    api = SimpleNamespace(services=services)
    return Overview(api, router, None, IndexAccuracy(), None, needs, NoIndex(), UsageTotals(), DayHistory())  # type: ignore[arg-type]


def sample_of(name: str, overview: Overview, **labels: str) -> float | None:
    """Return a sample of a fleet as Prometheus reads it."""
    registry = CollectorRegistry()
    registry.register(overview)
    return registry.get_sample_value(name, labels)


def test_a_model_without_workers_counts_as_zero() -> None:
    gone = fleet_metrics(models=["gone"], blind=True)
    assert sample_of("headstart_workers", gone, model="gone", state="serving") == 0.0
    assert sample_of("headstart_index_blind", gone) == 1.0
    assert sample_of("vllm:kv_cache_usage_perc", gone, model_name="gone") == 0.0


@pytest.mark.parametrize(("ends", "num_inexact"), [("", 0.0), ("exact", 0.0), ("inexact", 2.0)])
def test_workers_with_inexact_ends_are_counted(ends: str, num_inexact: float) -> None:
    assert sample_of("headstart_index_inexact_workers", fleet_metrics(models=["a", "b"], ends=ends)) == num_inexact


def test_states_and_loads_are_summed_over_the_workers() -> None:
    busy = WorkerLoad(num_running=3, num_waiting=2, num_free_blocks=25, num_blocks=100)
    leaving = WorkerLoad(num_running=1, num_free_blocks=100, num_blocks=100, draining=True)
    fleet = fleet_metrics([candidate("a", busy), candidate("b", leaving), candidate("c", busy)], broken=["c"])
    for state in ("serving", "draining", "broken"):
        assert sample_of("headstart_workers", fleet, model="m", state=state) == 1.0
    assert sample_of("vllm:num_requests_running", fleet, model_name="m") == 7.0
    assert sample_of("vllm:num_requests_waiting", fleet, model_name="m") == 4.0
    assert sample_of("vllm:kv_cache_usage_perc", fleet, model_name="m") == 0.5
    pools = {"model_name": "m", "block_size": "16", "num_gpu_blocks": "300"}
    assert sample_of("vllm:cache_config_info", fleet, **pools) == 1.0


def test_each_block_size_has_its_pool() -> None:
    small = candidate("a", WorkerLoad(num_free_blocks=0, num_blocks=100))
    large = candidate("b", WorkerLoad(num_free_blocks=100, num_blocks=100))
    large = structs.replace(large, member=replace(large.member, block_size=48))
    registry = CollectorRegistry()
    registry.register(fleet_metrics([small, large]))
    for block_size in ("16", "48"):
        labels = {"model_name": "m", "block_size": block_size, "num_gpu_blocks": "100"}
        assert registry.get_sample_value("vllm:cache_config_info", labels) == 1.0
    assert registry.get_sample_value("vllm:kv_cache_usage_perc", {"model_name": "m"}) == 0.25


def test_the_waiting_prefill_follows_the_load_of_all_gateways() -> None:
    mine, other = GatewayId("mine"), GatewayId("other")
    for queued_s, expected_s in (
        ([{}, {}], 0.0),
        ([{mine: 1.5, other: 2.0}, {other: 0.5}], 4.0),
        ([], 0.0),  # a model without workers
    ):
        loads = [WorkerLoad(queued_prefill_s=each) for each in queued_s]
        fleet = fleet_metrics([candidate(f"w{number}", load) for number, load in enumerate(loads)])
        assert sample_of("headstart_waiting_prefill_seconds", fleet, model="m") == expected_s


@pytest.mark.parametrize("needed", [None, 3])
def test_the_workers_needed_are_no_number_while_unknown(needed: int | None) -> None:
    overview = fleet_metrics(needed=needed)
    assert sample_of("headstart_workers_needed", overview, model="m") == needed
    assert overview.workers_needed() == ({} if needed is None else {"m": needed})


def test_held_requests_wait_too() -> None:
    fleet = fleet_metrics([candidate("w", WorkerLoad(num_waiting=1))], held_prefills_s=(0.5, 2.0))
    assert sample_of("headstart_held_requests", fleet, model="m") == 2.0
    assert sample_of("headstart_held_prefill_seconds", fleet, model="m") == 2.5
    assert sample_of("vllm:num_requests_waiting", fleet, model_name="m") == 3.0
