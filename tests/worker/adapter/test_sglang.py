"""SGLang's API: what is sent, and what its answers mean, with and without repeated tokens."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.responses import JSONResponse, PlainTextResponse, Response

from tests.worker.adapter.scripted_http import ScriptedHttp, scripted_http
from worker.adapter.api import EngineRefusedError, EventSource
from worker.adapter.sglang import SglangApi

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
