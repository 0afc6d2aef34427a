"""Efforts by every route that renders: taken, and named where they are not the client's. Tools that are strict."""

from __future__ import annotations

from typing import Any, Final

import httpx
import pytest

from tests.server.conftest import bundle_of, trained_tokenizer
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.text.scales import SCALES
from tests.waiting import HANG_S

_MESSAGES: Final = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}]}
_EFFORT: Final = {"output_config": {"effort": "high"}}
ROUTES: Final[dict[str, dict[str, Any]]] = {
    "/v1/chat/completions": {**_MESSAGES, "max_tokens": 1, "reasoning_effort": "high"},
    "/v1/responses": {"model": "tiny", "input": "Hi", "reasoning": {"effort": "high"}},
    "/v1/responses/input_tokens": {"model": "tiny", "input": "Hi", "reasoning": {"effort": "high"}},
    "/v1/messages": {**_MESSAGES, "max_tokens": 1, **_EFFORT},
    "/v1/messages/count_tokens": {**_MESSAGES, **_EFFORT},
    "/tokenize": {**_MESSAGES, "reasoning_effort": "high"},
}


@pytest.mark.parametrize("path", ROUTES)
async def test_the_nearest_effort_is_named(path: str) -> None:
    tokenizer = trained_tokenizer()
    bundle = bundle_of(tokenizer, chat_template=SCALES["low medium xhigh"], max_model_len=1 << 10)
    async with (
        gateway(ScriptedWorker(bundle, reply=[50])) as running,
        httpx.AsyncClient(base_url=running.url, timeout=HANG_S, trust_env=False) as client,
    ):
        answer = await client.post(path, json=ROUTES[path])
        assert (answer.status_code, answer.headers.get("x-headstart-repaired")) == (200, "effort"), answer.text


async def test_strict_tools_have_the_same_prompt() -> None:
    """It is the grammar's. An agent that sets it in some turns finds its prefix."""
    tokenizer = trained_tokenizer()
    bundle = bundle_of(tokenizer, chat_template="{{ tools | tojson }}{{ messages[0].content }}", max_model_len=1 << 10)
    function = {"name": "f", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
    async with (
        gateway(ScriptedWorker(bundle, reply=[50])) as running,
        httpx.AsyncClient(base_url=running.url, timeout=HANG_S, trust_env=False) as client,
    ):
        prompts = []
        for strict in ({}, {"strict": True}, {"strict": False}):
            tools = [{"type": "function", "function": function | strict}]
            answer = await client.post("/tokenize", json=_MESSAGES | {"tools": tools})
            prompts.append(answer.json()["tokens"])
    assert prompts[0] == prompts[1] == prompts[2]
