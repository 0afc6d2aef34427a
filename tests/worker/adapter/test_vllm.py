"""vLLM's API: what is sent, what its answers mean, and the older API without tokens."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tests.worker.adapter.rig import make_request
from tests.worker.adapter.scripted_http import ScriptedHttp, scripted_http, sse
from worker.adapter.api import Chunk, EngineLostError, EngineRefusedError, EventSource, resumed_seed
from worker.adapter.connect import connect
from worker.adapter.vllm import UNSUPPORTED, VllmApi, parse_load, token_body
from worker.common.features import required_features
from worker.config import WorkerConfig
from worker.contracts.metrics import WorkerMetrics
from worker.wire import ChoiceState, Grammar, SamplingDefaults, TokenLogprobs

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
vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="700"} 1.0
vllm:request_prefill_kv_computed_tokens_sum{engine="0",model_name="m"} 512.0
vllm:request_prefill_time_seconds_sum{engine="0",model_name="m"} 2.0
"""
TOKEN_API = "POST /inference/v1/generate"


SPECULATING = METRICS + b'vllm:spec_decode_num_drafts_total{engine="0",model_name="m"} 0.0\n'


@pytest.fixture
def server() -> ScriptedHttp:
    server = ScriptedHttp()
    models = [{"id": "m", "root": "/models/m", "max_model_len": 4096}, {"id": "pirate", "parent": "m"}]
    source = {"publisher": "zmq", "endpoint": "tcp://127.0.0.1:5558", "replay_endpoint": None, "topic": "kv"}
    server.answers |= {
        "GET /version": JSONResponse({"version": "0.32.0"}),
        "GET /inference/v1/generate": Response(status_code=405),
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


async def chunks(api: VllmApi, **fields: Any) -> list[Chunk]:
    request = make_request(**fields)
    return [chunk async for chunk in api.generate(request, request.choices[0], "rid")]


def event(ids: list[int], reason: str | None = None, stop: Any = None, logprobs: Any = None) -> dict[str, Any]:
    choice = {"index": 0, "token_ids": ids, "finish_reason": reason, "stop_reason": stop, "logprobs": logprobs}
    return {"usage": None, "choices": [choice], "routed_experts": None}


USAGE = {"choices": [], "usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 64}}}


async def test_what_it_says_of_itself(api: VllmApi, server: ScriptedHttp) -> None:
    assert await api.version() == "0.32.0"
    assert "logprobs" not in api.unsupported
    model = await api.model()
    assert (model.name, model.source, model.max_model_len, model.loras) == ("m", "/models/m", 4096, ("pirate",))
    assert await api.tokenize("x") == [1, 2]
    assert await api.is_healthy()
    assert await api.event_source() == EventSource("tcp://127.0.0.1:5558", None, "kv")
    await api.reset()
    server.answers |= {
        "GET /kv_event_sources": JSONResponse({"1": {}}),
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


async def test_an_engine_without_the_token_api_is_refused(api: VllmApi, server: ScriptedHttp) -> None:
    del server.answers["GET /inference/v1/generate"]
    with pytest.raises(EngineRefusedError, match="--enable-scale-out"):
        await api.version()


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
    assert (zero.num_running, zero.num_waiting, zero.num_blocks, zero.block_size, zero.usage) == (3, 1, 728, 32, 0.25)
    assert (zero.prefill_tokens, zero.prefill_s, zero.started_s) == (512.0, 2.0, 1795317799.93)
    assert (one.num_running, one.num_waiting, one.num_blocks, one.usage) == (5, 0, 700, 0.5)
    assert not zero.speculates
    assert parse_load(SPECULATING, 0).speculates
    for broken in (b"", b"<html>", METRICS.replace(b"728", b"None"), METRICS.replace(b"num_requests_running", b"x")):
        with pytest.raises(EngineLostError, match="not vLLM's"):
            parse_load(broken, 0)


@given(st.binary(max_size=300), st.integers(0, len(METRICS)))
def test_broken_metrics_are_an_error_of_the_engine(noise: bytes, at: int) -> None:
    with contextlib.suppress(EngineLostError):
        parse_load(METRICS[:at] + noise + METRICS[at:], 0)


async def test_tokens_and_usage(api: VllmApi, server: ScriptedHttp) -> None:
    server.answers[TOKEN_API] = sse(event([5]), event([6, 7]), event([2], "stop"), USAGE)
    assert await chunks(api) == [
        Chunk((5,)),
        Chunk((6, 7)),
        Chunk((2,), None, "stop", 2),
        Chunk(num_cached_tokens=64),
    ]
    body = server.bodies[-1]
    assert body["cache_salt"] == make_request().root.hex()
    assert (body["request_id"], body["stream"]) == ("rid", True)


@pytest.mark.parametrize(
    ("last", "reason", "stop_token_id"),
    [
        (event([9], "stop", 9), "stop", 9),
        (event([2], "stop"), "stop", 2),
        (event([9], "length"), "length", None),
        (event([], "abort"), "abort", None),
    ],
)
async def test_last_tokens(
    api: VllmApi, server: ScriptedHttp, last: Any, reason: str, stop_token_id: int | None
) -> None:
    server.answers[TOKEN_API] = sse(event([5]), last)
    got = await chunks(api, stop_token_ids=(9,))
    assert (got[-1].reason, got[-1].stop_token_id) == (reason, stop_token_id)


async def test_logprobs(api: VllmApi, server: ScriptedHttp) -> None:
    top = [{"token_id": 9, "logprob": -3.0}, {"token_id": 5, "logprob": -0.5}, {"token_id": 6, "logprob": -1.0}]
    content = [{"token_id": 9, "logprob": -3.0, "rank": 7, "top_logprobs": top}]
    server.answers[TOKEN_API] = sse(event([9], "length", logprobs={"content": content}))
    [chunk] = await chunks(api, logprobs=2)
    assert chunk.logprobs == (TokenLogprobs(-3.0, ((5, -0.5), (6, -1.0))),), "the two best, without the sampled one"
    assert server.bodies[-1]["sampling_params"]["logprobs"] == 3, "it has a place of its own among them"
    for wanted, asked in ((0, 0), (19, 20), (20, 20), (30, 30)):
        request = make_request(logprobs=wanted)
        assert token_body(request, request.choices[0], "")["sampling_params"]["logprobs"] == asked


async def test_prompt_logprobs(api: VllmApi, server: ScriptedHttp) -> None:
    found = [None, {"11": {"logprob": -2.0}, "4": {"logprob": -0.1}}]
    server.answers[TOKEN_API] = JSONResponse({"prompt_logprobs": found})
    got = await api.prompt_logprobs(make_request([10, 11], prompt_logprobs=1))
    assert got == [None, TokenLogprobs(-2.0, ((4, -0.1),))]


@pytest.mark.parametrize(
    ("events", "error", "message"),
    [
        ([{"error": {"message": "too long", "type": "x", "param": None, "code": 400}}], EngineRefusedError, "too long"),
        ([{"error": {"message": "oh", "code": 500}}], EngineLostError, "oh"),
        ([event([5]), {"error": "oh"}], EngineLostError, "oh"),
        ([b"data: {nonsense\n\n"], ValueError, "JSON|Expected"),
        ([event([5]), b"data: [1]\n\n"], ValueError, "JSON|Expected"),
        ([{"choices": [{"token_ids": "5"}]}], ValueError, "JSON|Expected"),
    ],
)
async def test_broken_streams(
    api: VllmApi, server: ScriptedHttp, events: list[Any], error: type[Exception], message: str
) -> None:
    """A refusal, too, comes with status 200."""
    server.answers[TOKEN_API] = sse(*events)
    with pytest.raises(error, match=message):
        await chunks(api)


def test_what_is_left_of_a_resumed_choice() -> None:
    request = make_request([1, 2], output_ids=(3, 4), max_tokens=10, min_tokens=3, adapter="pirate")
    choice = request.choices[0]
    body = token_body(request, choice, "rid")
    assert (body["token_ids"], body["model"]) == ([1, 2, 3, 4], "pirate")
    assert (body["sampling_params"]["max_tokens"], body["sampling_params"]["min_tokens"]) == (8, 1)


@given(st.integers(-(2**63), 2**64 - 1), st.integers(0, 500), st.integers(0, 500))
def test_seeds(seed: int, first: int, second: int) -> None:
    def of(num_done: int) -> int:
        return resumed_seed(ChoiceState(0, seed, (1,) * num_done))

    assert 0 <= of(first) < 2**63
    assert of(first) == of(first), "for the engine's sake, not for chance's"
    if first != second and (first and second):
        assert of(first) != of(second)


def test_sampling_parameters() -> None:
    fields: dict[str, Any] = {"top_k": 5, "ignore_eos": True, "stop_token_ids": (9,), "logit_bias": ((4, 1.5),)}
    request = make_request(**fields, allowed_token_ids=(4, 5), frequency_penalty=0.5)
    sampling = token_body(request, request.choices[0], "")["sampling_params"]
    assert sampling["logit_bias"] == {4: 1.5}
    expected = {"top_k": 5, "ignore_eos": True, "stop_token_ids": [9], "allowed_token_ids": [4, 5], "detokenize": False}
    assert expected.items() <= sampling.items()
    for kind, text, value in (
        ("json_schema", "{}", {"json": "{}"}),
        ("json_object", "", {"json_object": True}),
        ("choice", '["a","b"]', {"choice": ["a", "b"]}),
        ("regex", "x+", {"regex": "x+"}),
    ):
        request = make_request(grammar=Grammar(kind, text))
        assert token_body(request, request.choices[0], "")["sampling_params"]["structured_outputs"] == value


@pytest.mark.parametrize(
    "fields",
    [
        {"typical_p": 0.5},
        {"bad_words": ((1,),)},
        {"grammar": Grammar("grammar", "root ::= x")},
        {"grammar": Grammar("regex", "x"), "output_ids": (1,)},
        {"presence_penalty": 1.0, "output_ids": (1,)},
    ],
)
def test_what_it_cannot_do_is_listed(fields: dict[str, Any]) -> None:
    assert set(required_features(make_request(**fields))) & set(UNSUPPORTED)


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
    assert await api.number_format() == expected


async def test_an_engine_that_fails_at_the_start_is_named_by_url(server: ScriptedHttp) -> None:
    server.answers["GET /metrics"] = PlainTextResponse("nothing")
    async with scripted_http(server) as url:
        config = WorkerConfig(engine="vllm", engine_url=url)
        with pytest.raises(OSError, match=r"--engine-url: /metrics is not vLLM's"):
            await connect(config, "http://w", "w", WorkerMetrics(), lambda line: None)
