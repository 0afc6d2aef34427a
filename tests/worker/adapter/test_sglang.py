"""SGLang's API: what is sent, and what its answers mean, with and without repeated tokens."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tests.worker.adapter.rig import make_request
from tests.worker.adapter.scripted_http import ScriptedHttp, scripted_http, sse
from worker.adapter.api import Chunk, EngineLostError, EngineRefusedError, EventSource
from worker.adapter.sglang import SglangApi, generate_body
from worker.common.features import required_features
from worker.wire import Grammar, TokenLogprobs

INFO = {
    "version": "0.5.23",
    "page_size": 4,
    "max_total_num_tokens": 4000,
    "kv_events_config": json.dumps(
        {"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://127.0.0.1:5657", "topic": "kv"}
    ),
}
METRICS = """\
sglang:num_running_reqs{dp_rank="0"} 3.0
sglang:num_running_reqs{dp_rank="1"} 4.0
sglang:num_queue_reqs{dp_rank="1"} 2.0
sglang:token_usage{dp_rank="1"} 0.5
"""


@pytest.fixture
def server() -> ScriptedHttp:
    server = ScriptedHttp()
    models = [{"id": "m", "max_model_len": 4096}, {"id": "b", "parent": "m"}, {"id": "a", "parent": "m"}]
    server.answers |= {
        "GET /server_info": JSONResponse(INFO),
        "GET /model_info": JSONResponse({"model_path": "org/m", "tokenizer_path": "org/t"}),
        "GET /v1/models": JSONResponse({"data": models}),
        "GET /metrics": PlainTextResponse(METRICS),
        "GET /health": Response(),
        "POST /tokenize": JSONResponse({"tokens": [1, 2]}),
        "POST /flush_cache": Response(),
    }
    return server


@pytest.fixture
async def api(server: ScriptedHttp) -> AsyncIterator[SglangApi]:
    async with scripted_http(server) as url:
        api = SglangApi(url, key="k", rank=1)
        yield api
        await api.close()


async def chunks(api: SglangApi, **fields: Any) -> list[Chunk]:
    request = make_request(**fields)
    return [chunk async for chunk in api.generate(request, request.choices[0], "rid")]


def event(ids: list[int], done: int, reason: Any = None, **meta: Any) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"completion_tokens": done, "finish_reason": reason, **meta}}


async def test_what_it_says_of_itself(api: SglangApi, server: ScriptedHttp) -> None:
    assert await api.version() == "0.5.23"
    model = await api.model()
    assert (model.name, model.source, model.max_model_len, model.loras) == ("m", "org/t", 4096, ("a", "b"))
    load = await api.load()
    assert (load.num_running, load.num_waiting, load.num_blocks, load.block_size, load.usage) == (4, 2, 1000, 4, 0.5)
    assert await api.tokenize("x") == [1, 2]
    assert await api.is_healthy()
    assert await api.event_source() == EventSource("tcp://*:5558", "tcp://127.0.0.1:5658", "kv")
    await api.reset()
    server.answers |= {
        "GET /server_info": JSONResponse({}),
        "GET /v1/models": JSONResponse({"data": []}),
        "GET /metrics": Response(status_code=404),
        "POST /flush_cache": PlainTextResponse("requests run", 400),
    }
    assert await api.event_source() is None
    assert (await api.load()).num_running == 0
    with pytest.raises(EngineRefusedError, match="requests run"):
        await api.reset()
    with pytest.raises(EngineRefusedError, match="no model"):
        await api.model()


async def test_paths_of_older_versions(api: SglangApi, server: ScriptedHttp) -> None:
    server.answers |= {
        "GET /server_info": Response(status_code=404),
        "GET /get_server_info": JSONResponse({"version": "0.5.9"}),
        "GET /model_info": Response(status_code=404),
        "GET /get_model_info": JSONResponse({"model_path": "org/old"}),
    }
    assert await api.version() == "0.5.9"
    assert (await api.model()).source == "org/old"


@pytest.mark.parametrize(
    ("info", "problem"),
    [
        ({"version": "0.5.19"}, r"SGLang 0\.5\.19 carry no salt.*upgrade to 0\.5\.20"),
        ({"version": "0.4.10.post2"}, "carry no salt"),
        ({"version": "0.5.20.dev7+g1234"}, None),
        ({"version": "0.5.23", "internal_states": [{"memory_usage": {"token_capacity_swa": None}}]}, None),
        ({"version": "1.0.0"}, None),
        ({"version": "unknown"}, None),
        ({"version": "0.5.23", "uses_mamba_radix_cache": True}, "windows or states"),
        ({"version": "0.5.23", "internal_states": [{"memory_usage": {"token_capacity_swa": 5}}]}, "windows or states"),
    ],
)
async def test_index_problem(api: SglangApi, server: ScriptedHttp, info: dict[str, Any], problem: str | None) -> None:
    server.answers["GET /server_info"] = JSONResponse(info)
    found = await api.index_problem()
    assert found is None if problem is None else re.search(problem, found or "")


@pytest.mark.parametrize(
    ("endpoint", "bind", "source"),
    [
        ("tcp://0.0.0.0:5557", None, EventSource("tcp://*:5558", None, "", None)),
        ("tcp://127.0.0.1:5557", True, EventSource("tcp://127.0.0.1:5558", None, "", True)),
    ],
)
async def test_who_binds(
    api: SglangApi, server: ScriptedHttp, endpoint: str, bind: bool | None, source: EventSource
) -> None:
    config = json.dumps({"publisher": "zmq", "endpoint": endpoint, "bind": bind})
    server.answers["GET /server_info"] = JSONResponse({"kv_events_config": config})
    assert await api.event_source() == source


@pytest.mark.parametrize("repeats", [False, True])
async def test_tokens(api: SglangApi, server: ScriptedHttp, repeats: bool) -> None:
    stop = {"type": "stop", "matched": 2}
    sent = [[5], [5, 6], [5, 6, 2]] if repeats else [[5], [6], [2]]
    events = [event(ids, number + 1) for number, ids in enumerate(sent)]
    events[-1] = event(sent[-1], 3, stop, cached_tokens=16)
    server.answers["POST /generate"] = sse(*events)
    got = await chunks(api)
    assert [chunk.token_ids for chunk in got] == [(5,), (6,), (2,), ()]
    assert (got[2].reason, got[2].stop_token_id, got[3].num_cached_tokens) == ("stop", 2, 16)


async def test_logprobs(api: SglangApi, server: ScriptedHttp) -> None:
    meta = {
        "output_token_logprobs": [[-0.5, 5, None], [-0.7, 6, None]],
        "output_top_logprobs": [[[-0.5, 5, None]], [[-0.1, 9, None], [-0.7, 6, None]]],
    }
    server.answers["POST /generate"] = sse(event([5, 6], 2, {"type": "length"}, **meta))
    [chunk, _] = await chunks(api, logprobs=2)
    assert chunk.logprobs == (TokenLogprobs(-0.5, ((5, -0.5),)), TokenLogprobs(-0.7, ((9, -0.1), (6, -0.7))))
    assert server.bodies[-1]["top_logprobs_num"] == 2


@pytest.mark.parametrize(
    ("events", "error"),
    [
        ([{"error": {"message": "too long", "code": 400}}], EngineRefusedError),
        ([{"error": {"message": "oh", "code": 500}}], EngineLostError),
        ([{"error": "oh"}], EngineLostError),
        ([b"data: {nonsense\n\n"], ValueError),
        ([event([5], 1), b"data: [1]\n\n"], ValueError),
    ],
)
async def test_broken_streams(api: SglangApi, server: ScriptedHttp, events: list[Any], error: type[Exception]) -> None:
    server.answers["POST /generate"] = sse(*events)
    with pytest.raises(error):
        await chunks(api)


def test_bodies() -> None:
    request = make_request([1, 2], output_ids=(3,), max_tokens=5, min_tokens=3, adapter="a", logit_bias=((4, 1.0),))
    body = generate_body(request, request.choices[0], "rid", 1)
    assert body["input_ids"] == [1, 2, 3]
    assert (body["lora_path"], body["data_parallel_rank"]) == ("a", 1)
    assert body["cache_salt"] == body["extra_key"] == request.root.hex()
    sampling = body["sampling_params"]
    assert (sampling["max_new_tokens"], sampling["min_new_tokens"], sampling["top_k"]) == (4, 2, -1)
    assert sampling["logit_bias"] == {"4": 1.0}
    for kind, text, expected in (
        ("json_schema", "{}", ("json_schema", "{}")),
        ("json_object", "", ("json_schema", '{"type":"object"}')),
        ("choice", '["a.b","c"]', ("regex", r"(?:a\.b)|(?:c)")),
        ("regex", "x+", ("regex", "x+")),
    ):
        request = make_request(grammar=Grammar(kind, text))
        name, value = expected
        assert generate_body(request, request.choices[0], "rid")["sampling_params"][name] == value


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": (1,)},
        {"typical_p": 0.5},
        {"bad_words": ((1,),)},
        {"prompt_logprobs": 0},
        {"grammar": Grammar("grammar", "root ::= x")},
        {"output_ids": (1,), "frequency_penalty": 1.0},
    ],
)
def test_what_it_cannot_do_is_listed(fields: dict[str, Any]) -> None:
    assert set(required_features(make_request(**fields))) & set(SglangApi.unsupported)
