"""Anthropic's SDK over a gateway: the parts that need what only it sends, the tool runner's threads and the models."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from datetime import UTC, datetime
from typing import Any

import aiohttp
import anthropic
import pytest
from anthropic import beta_async_tool

from tests.server.gateway_app import RunningGateway, gateway
from tests.server.messages_grammar import check_error
from tests.server.scripted_worker import Says, ScriptedWorker
from tests.server.test_app import client as openai_client
from tests.server.test_app import post
from worker.wire import Frame, GenerateRequest

PATH = "/v1/messages"
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


def client(target: RunningGateway) -> anthropic.AsyncAnthropic:
    return anthropic.AsyncAnthropic(base_url=target.url, api_key="none", max_retries=0)


@beta_async_tool
async def get_weather(city: str) -> str:
    """Report the weather of a city."""
    return f"sunny in {city}"


async def test_the_tool_runner_goes_on_without_threads(says: Says) -> None:
    """It asks for a thread by default, and sends whole conversations once that is refused."""
    calls, done = says(CALL), says("Done.")

    async def answers(request: GenerateRequest) -> AsyncIterator[Frame]:
        async for frame in (calls if len(calls.received) == 1 else done).answer(request):
            yield frame

    calls.behave = answers
    messages: Any = [{"role": "user", "content": "Weather in Rome?"}]
    for stream in (False, True):
        calls.received.clear()
        async with gateway(calls) as target, client(target) as sdk:
            runner: Any = sdk.beta.messages.tool_runner(
                model="tiny", max_tokens=100, messages=messages, tools=[get_weather], stream=stream
            )
            answer = await runner.until_done()
            num_refused = target.metrics.answers.sum("messages", 400)
        assert [block.text for block in answer.content] == ["Done."]
        assert num_refused == 1, "once"
        assert len(calls.received) == 2
        assert "sunny in Rome" in says.prompt(calls)


@pytest.mark.parametrize("thread", [{"type": "create"}, {"type": "continue", "previous_message_id": "msg_1"}])
async def test_a_thread_is_refused_with_its_details(says: Says, thread: dict[str, str]) -> None:
    messages = [{"role": "user", "content": "x"}]
    async with gateway(says("x")) as target:
        sent = {"model": "tiny", "max_tokens": 9, "messages": messages, "thread": thread}
        status, headers, raw = await post(target.url, sent, PATH)
        error = check_error(raw, headers)
        assert (status, error["type"], "thread" in error["message"]) == (400, "invalid_request_error", True)
        assert error["details"] == {"error_code": "thread_unsupported_request", "unsupported": ["thread"]}
        status, headers, raw = await post(target.url, {**sent, "thread": None, "temperature": 9}, PATH)
        assert (status, check_error(raw, headers).keys()) == (400, {"type", "message"})


async def test_parsed_answers_by_both_names_of_the_format(says: Says) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    worker = says('{"city": "Rome"}')
    async with gateway(worker) as target:
        for fields in (
            {"output_config": {"format": {"type": "json_schema", "schema": schema}}},
            {"output_format": {"type": "json_schema", "schema": schema}},
        ):
            sent = {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "x"}], **fields}
            assert (await post(target.url, sent, PATH))[0] == 200
    first, second = (request.sampling.grammar for request in worker.received)
    assert first is not None
    assert first == second


NAMES = ["tiny", *(f"alias-{number}" for number in range(1, 5))]


@pytest.fixture
def aliased(says: Says) -> tuple[ScriptedWorker, dict[str, str]]:
    return says("x"), dict.fromkeys(NAMES, "tiny")  # one has a model's own name


async def test_models_in_each_apis_shape(aliased: tuple[ScriptedWorker, dict[str, str]]) -> None:
    worker, aliases = aliased
    async with gateway(worker, aliases=aliases) as target, client(target) as sdk, openai_client(target) as other:
        ours: Any
        for models in (sdk.models, sdk.beta.models):
            listed = [model async for model in models.list(limit=2)]  # page by page
            assert [model.id for model in listed] == NAMES
            for ours in (*listed, await models.retrieve("alias-3")):
                assert (ours.type, ours.display_name, ours.lifecycle) == ("model", ours.id, "active")
                assert ours.created_at == datetime.fromtimestamp(target.models.get("tiny").created, UTC)
                assert (ours.max_input_tokens, ours.max_tokens) == (2048, 2048)
            with pytest.raises(anthropic.NotFoundError) as missing:
                await models.retrieve("none")
            assert missing.value.type == "not_found_error"
        theirs = [model async for model in other.models.list()]
        assert [(model.id, model.object, model.owned_by) for model in theirs] == [
            (name, "model", "headstart") for name in NAMES
        ]
        assert (await other.models.retrieve("alias-3")).object == "model"


async def test_pages_of_models(aliased: tuple[ScriptedWorker, dict[str, str]]) -> None:
    worker, aliases = aliased
    headers = {"anthropic-version": "2023-06-01"}
    async with gateway(worker, aliases=aliases) as target, aiohttp.ClientSession(headers=headers) as session:

        async def page(query: str) -> tuple[list[str], bool]:
            async with session.get(f"{target.url}/v1/models?{query}") as response:
                answer = json.loads(await response.read())
            ids = [model["id"] for model in answer["data"]]
            assert (answer["first_id"], answer["last_id"]) == ((ids[0], ids[-1]) if ids else (None, None))
            return ids, answer["has_more"]

        assert await page("") == (NAMES, False)
        assert await page("limit=1000&after_id=tiny") == (NAMES[1:], False)
        assert await page("limit=2") == (NAMES[:2], True)
        assert await page("limit=2&after_id=alias-1") == (NAMES[2:4], True)
        assert await page("limit=2&after_id=alias-3") == (NAMES[4:], False)
        assert await page("limit=2&before_id=alias-3") == (NAMES[1:3], True)
        assert await page("limit=3&before_id=alias-3") == (NAMES[:3], False)
        assert await page("after_id=alias-4") == ([], False)
        for query in ("limit=0", "limit=1001", "limit=x", "limit=-1", "after_id=none", "before_id=none"):
            async with session.get(f"{target.url}/v1/models?{query}") as response:
                error = check_error(await response.read(), response.headers)
                assert (response.status, query.partition("=")[0] in error["message"]) == (400, True), query
