"""vLLM's API: what it reports, and one token of it."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tests.worker.adapter.scripted_http import ScriptedHttp, scripted_http
from worker.adapter import http, vllm
from worker.adapter.api import EngineLostError, EngineRefusedError, EventSource
from worker.adapter.connect import connect
from worker.adapter.vllm import VllmApi, parse_load
from worker.config import WorkerConfig
from worker.contracts.metrics import WorkerMetrics
from worker.wire import SamplingDefaults

METRICS = b"""\
# HELP vllm:num_requests_running Number of requests
process_start_time_seconds 1.79531779993e+09
vllm:num_requests_running{engine="0",model_name="m"} 3.0
vllm:num_requests_running{engine="1",model_name="m"} 5.0
vllm:num_requests_waiting{engine="0",model_name="m"} 1.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.5
vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="728"} 1.0
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="728"} 1.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 512.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 2.0
"""


PAGES = Path(__file__).parent / "vllm_pages"
"""Pages of vLLM 0.32: the samples that are read."""
SPECULATING = METRICS + b'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0.0\n'


@pytest.fixture
def server() -> ScriptedHttp:
    server = ScriptedHttp()
    models = [{"id": "m", "root": "/models/m", "max_model_len": 4096}, {"id": "pirate", "parent": "m"}]
    source = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5558", "replay_endpoint": None, "topic": "kv"}
    server.answers |= {
        "GET /version": JSONResponse({"version": "0.32.0"}),
        "GET /v1/completions/render": Response(status_code=405),
        "POST /v1/completions/render": Response(status_code=400),
        "GET /v1/models": JSONResponse({"data": models}),
        "GET /metrics": PlainTextResponse(METRICS),
        "GET /health": Response(),
        "GET /kv_event_sources": JSONResponse({"0": source}),
        "POST /tokenize": JSONResponse({"tokens": [1, 2]}),
        "POST /reset_prefix_cache": JSONResponse({"success": True}),
    }
    return server


@pytest.fixture
async def api(server: ScriptedHttp) -> AsyncIterator[VllmApi]:
    async with scripted_http(server) as url:
        api = VllmApi(url)
        yield api
        await api.close()


async def test_what_it_says_of_itself(api: VllmApi, server: ScriptedHttp) -> None:
    assert await api.version() == "0.32.0"
    model = await api.model()
    assert (model.name, model.source, model.max_model_len, model.loras) == ("m", "/models/m", 4096, ("pirate",))
    assert await api.tokenize("x") == [1, 2]
    assert await api.is_healthy()
    assert await api.event_source() == EventSource("tcp://127.0.0.1:5558", None, "kv")
    await api.reset()
    server.answers |= {
        "GET /kv_event_sources": JSONResponse({"1": {"publisher": "null"}}),
        "GET /health": Response(status_code=503),
        "POST /reset_prefix_cache": JSONResponse({"success": False}),
    }
    assert await api.event_source() is None
    assert not await api.is_healthy()
    with pytest.raises(EngineRefusedError, match="in use"):
        await api.reset()
    del server.answers["POST /reset_prefix_cache"], server.answers["GET /kv_event_sources"]
    with pytest.raises(EngineRefusedError, match="VLLM_SERVER_DEV_MODE=1"):
        await api.reset()
    assert await api.event_source() is None
    server.answers["GET /v1/models"] = JSONResponse({"data": []})
    with pytest.raises(EngineRefusedError, match="no model"):
        await api.model()


async def test_an_engine_that_renders_nothing_is_refused(api: VllmApi, server: ScriptedHttp) -> None:
    error = {"message": "Restart vllm serve with --enable-scale-out to enable them.", "code": 403}
    server.answers["POST /v1/completions/render"] = JSONResponse({"error": error}, 403)
    with pytest.raises(EngineRefusedError, match="newer with --enable-scale-out") as refused:
        await api.version()
    assert refused.value.status == 404, "a 403 would be about the key"
    del server.answers["POST /v1/completions/render"]
    with pytest.raises(EngineRefusedError, match="--enable-scale-out"):
        await api.version()


async def test_one_token_has_no_salt_of_a_tenant(api: VllmApi, server: ScriptedHttp) -> None:
    server.answers |= {"POST /v1/chat/completions": Response(status_code=400)}
    server.answers["POST /v1/completions"] = JSONResponse({"choices": [], "usage": {"prompt_tokens": 1}})
    assert await api.probe() is None
    assert server.bodies[-1] == {"model": "m", "prompt": [0], "max_tokens": 1, "temperature": 0}
    usage = {"prompt_tokens": 64, "prompt_tokens_details": {"cached_tokens": 32}}
    server.answers["POST /v1/completions"] = JSONResponse({"choices": [], "usage": usage})
    assert await api.probe([5, 6], "salt") == 32
    assert server.bodies[-1]["cache_salt"] == "salt"


async def test_pause(api: VllmApi, server: ScriptedHttp) -> None:
    assert not await api.is_paused(), "without development mode"
    server.answers["GET /is_paused"] = JSONResponse({"is_paused": True})
    assert await api.is_paused()
    server.answers["GET /is_paused"] = JSONResponse({"error": "no"}, status_code=500)
    assert not await api.is_paused()


def test_a_sleeping_engine_says_so() -> None:
    states = b'vllm:engine_sleep_state{engine="0",sleep_state="%b"} %b\n'
    assert not parse_load(METRICS, 0).sleeps
    for awake in (b"0.0", b"1.0"):
        text = METRICS + states % (b"awake", awake) + states % (b"weights_offloaded", b"1.0")
        assert parse_load(text, 0).sleeps == (awake == b"0.0")


async def test_its_sampling_defaults(api: VllmApi, server: ScriptedHttp) -> None:
    assert await api.sampling_defaults() is None  # without --enable-scale-out
    params = {"temperature": 0.6, "top_p": 0.95, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "max_tokens": 1}
    server.answers["POST /v1/completions/render"] = JSONResponse([{"token_ids": [0], "sampling_params": params}])
    assert await api.sampling_defaults() == SamplingDefaults(temperature=0.6, top_p=0.95)
    for longest, stated in ((40, 40), ((await api.model()).max_model_len - 2, None)):
        chat = {"token_ids": [5, 6], "sampling_params": params | {"max_tokens": longest}}
        server.answers["POST /v1/chat/completions/render"] = JSONResponse(chat)
        assert await api.sampling_defaults() == SamplingDefaults(temperature=0.6, top_p=0.95, max_tokens=stated)


@pytest.mark.parametrize(
    ("config", "drops"),
    [
        ({"method": "eagle3", "disable_eagle_block_drop": False}, True),
        ({"method": "mtp"}, True),
        ({"method": "eagle", "disable_eagle_block_drop": True}, False),
        ({"method": "ngram"}, False),
        ({"method": "draft_model"}, False),
        ({"method": "newest"}, True),
        (None, True),
    ],
)
async def test_which_speculation_drops_the_last_block(
    server: ScriptedHttp, api: VllmApi, config: dict[str, Any] | None, drops: bool
) -> None:
    server.answers["GET /server_info"] = JSONResponse({"vllm_config": {"speculative_config": config}})
    assert not await api.drops_last_block(), "it does not speculate"
    server.answers["GET /metrics"] = PlainTextResponse(SPECULATING.decode())
    assert await api.drops_last_block() is drops
    server.answers["GET /server_info"] = Response(status_code=404)
    assert await api.drops_last_block(), "unknown without development mode"


def test_load_of_a_rank() -> None:
    zero, one = parse_load(METRICS, 0), parse_load(METRICS, 1)
    assert (zero.num_running, zero.num_waiting, zero.num_blocks, zero.block_size, zero.usage) == (3, 1, 364, 32, 0.25)
    assert (zero.prefill_tokens, zero.prefill_s, zero.started_s, zero.ranks) == (512.0, 2.0, 1795317799.93, (0, 1))
    assert (one.num_running, one.num_waiting, one.num_blocks, one.usage) == (5, 0, 364, 0.5)
    assert parse_load(METRICS, None) == zero
    assert not zero.speculates
    assert parse_load(SPECULATING, 0).speculates
    for broken in (b"", b"<html>", METRICS.replace(b"728", b"None"), METRICS.replace(b"cache_config", b"x")):
        with pytest.raises(EngineLostError, match="not vLLM's"):
            parse_load(broken, 0)
    with pytest.raises(EngineRefusedError, match=r"--engine-rank 2: this server has the ranks 0, 1"):
        parse_load(METRICS, 2)


@pytest.mark.parametrize(
    ("page", "rank", "expected"),
    [
        ("two_api_servers_idle", None, (0, 0, 0.0, 64, 0.0, (0,))),
        ("two_api_servers_used", None, (0, 0, 0.0, 64, 9 + 98, (0,))),
        ("two_ranks_idle", 0, (0, 0, 0.0, 64, 0.0, (0, 1))),
        ("two_ranks_idle", 1, (0, 0, 0.0, 64, 0.0, (0, 1))),
        ("two_ranks_used", 0, (0, 0, 0.0, 64, 6 + 76, (0, 1))),
        ("two_ranks_used", 1, (0, 0, 0.0, 64, 3 + 54, (0, 1))),
    ],
)
def test_pages_of_real_servers(page: str, rank: int | None, expected: tuple[Any, ...]) -> None:
    """With several API servers, no gauge has a sample before the first request, and no process its start."""
    load = parse_load((PAGES / f"{page}.txt").read_bytes(), rank)
    found = (load.num_running, load.num_waiting, load.usage, load.num_blocks, load.work, load.ranks)
    assert (found, load.block_size, load.started_s) == (expected, 32, 0.0)
    assert load.reuses_prefixes
    assert not load.sleeps


FAMILIES = sorted({name for name, _, _ in http._SAMPLE.findall(METRICS)} - {vllm._CACHE_CONFIG})


@given(st.sets(st.sampled_from(FAMILIES)), st.sampled_from([0, 1]))
def test_any_family_but_one_may_be_absent(absent: set[bytes], rank: int) -> None:
    """Its count is 0 then, and no other count changes."""
    lines = METRICS.splitlines(keepends=True)
    page = b"".join([line for line in lines if not any(line.startswith(name) for name in absent)])
    whole, load = parse_load(METRICS, rank), parse_load(page, rank)
    names = {vllm._GAUGES.get(name) or vllm._TOTALS[name] for name in absent}
    assert load == replace(whole, **dict.fromkeys(names, 0))


@given(st.data())
def test_samples_of_several_processes(data: st.DataObject) -> None:
    """Processes share a total, and report the same gauge: as now, or as it was."""
    page = METRICS
    for name, labels, value in http._SAMPLE.findall(METRICS):
        if not labels or name == vllm._CACHE_CONFIG:
            continue
        first = data.draw(st.integers(0, int(float(value) * 4))) / 4
        second = float(value) - first if name in vllm._TOTALS else float(value)
        line = b"%b{%b} %b\n" % (name, labels, value)
        parts = [b'%b{%b,pid="%d"} %f\n' % (name, labels, pid, part) for pid, part in ((7, first), (9, second))]
        page = page.replace(line, b"".join(data.draw(st.permutations(parts))))
    assert page != METRICS
    for rank in (0, 1):
        assert parse_load(page, rank) == parse_load(METRICS, rank)


@given(st.binary(max_size=300), st.integers(0, len(METRICS)))
def test_broken_metrics_are_an_error_of_the_engine(noise: bytes, at: int) -> None:
    with contextlib.suppress(EngineLostError, EngineRefusedError):
        parse_load(METRICS[:at] + noise + METRICS[at:], 0)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (
            JSONResponse({"vllm_config": {"model_config": {"dtype": "torch.float32", "quantization": None}}}),
            "float32/dense",
        ),
        (
            JSONResponse({"vllm_config": {"model_config": {"dtype": "torch.bfloat16", "quantization": "fp8"}}}),
            "bfloat16/fp8",
        ),
        (Response(status_code=404), ""),
        (JSONResponse({"vllm_config": "model='m', dtype=torch.float32"}), ""),
        (PlainTextResponse("<html>"), ""),
    ],
)
async def test_the_number_format_is_known_or_not(
    server: ScriptedHttp, api: VllmApi, answer: Response, expected: str
) -> None:
    """Engines of another dtype or quantisation must not continue each other's streams."""
    server.answers["GET /server_info"] = answer
    assert await api.precision() == expected


async def test_an_engine_that_fails_at_the_start_is_named_by_url(server: ScriptedHttp) -> None:
    server.answers["GET /metrics"] = PlainTextResponse("nothing")
    async with scripted_http(server) as url:
        config = WorkerConfig(engine="vllm", engine_url=url)
        with pytest.raises(OSError, match=r"--engine-url: /metrics is not vLLM's"):
            await connect(config, "http://w", "w", WorkerMetrics(), lambda line: None)
