"""Forms of requests and answers that clients beyond OpenAI's own send and expect."""

from __future__ import annotations

import json
from typing import Any

import aiohttp
import pytest

from tests.server.api.test_tools import WEATHER
from tests.server.conftest import ANSWER
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.sse_grammar import events
from tests.server.test_app import chat, post
from worker.wire import Grammar

SCHEMA: Any = {"type": "object", "properties": {"a": {"type": "string"}}}


async def error_of(url: str, body: Any, path: str = "/v1/chat/completions") -> dict[str, Any]:
    status, _, raw = await post(url, body, path)
    assert status == 400, raw
    error: dict[str, Any] = json.loads(raw)["error"]
    return error


@pytest.mark.parametrize(
    "formatted",
    [
        {"type": "json_object", "schema": SCHEMA},
        {"type": "json_object", "value": SCHEMA},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
    ],
)
async def test_a_schema_is_honoured_wherever_it_stands(worker: ScriptedWorker, formatted: dict[str, Any]) -> None:
    async with gateway(worker) as target:
        for path, body in (
            ("/v1/chat/completions", chat()),
            ("/v1/completions", {"model": "tiny", "prompt": "x"}),
        ):
            assert (await post(target.url, {**body, "response_format": formatted}, path))[0] == 200
    for request in worker.received:
        text = json.dumps(SCHEMA | {"x-guidance": {"lenient": True}}, separators=(",", ":"))
        assert request.sampling.grammar == Grammar("json_schema", text)


async def test_white_space_of_json(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        structured = {"json": SCHEMA, "disable_any_whitespace": True}
        assert (await post(target.url, chat(structured_outputs=structured)))[0] == 200
        for structured, param in (
            ({"regex": "a", "disable_any_whitespace": True}, "structured_outputs.disable_any_whitespace"),
            ({"json": SCHEMA, "whitespace_pattern": " "}, "structured_outputs.whitespace_pattern"),
            ({"json": SCHEMA, "structural_tag": {}}, None),
            ({"json": SCHEMA, "structural_tag": {"a": 1}}, "structured_outputs.structural_tag"),
        ):
            if param is not None:
                assert (await error_of(target.url, chat(structured_outputs=structured)))["param"] == param
    (request,) = worker.received
    assert request.sampling.grammar is not None
    assert request.sampling.grammar.compact


async def test_streamed_completions_show_their_prompts_tokens(worker: ScriptedWorker) -> None:
    body = {"model": "tiny", "prompt": ["The capital", "of"], "n": 2, "return_token_ids": True, "max_tokens": 2}
    async with gateway(worker) as target:
        _, _, whole = await post(target.url, body, "/v1/completions")
        for more in ({}, {"echo": True}):
            _, _, raw = await post(target.url, {**body, **more, "stream": True}, "/v1/completions")
            shown: dict[int, list[int]] = {}
            for event in events(raw):
                for choice in event["choices"] if event != "[DONE]" else ():
                    if "prompt_token_ids" in choice:
                        assert choice["index"] not in shown, "once for each choice"
                        shown[choice["index"]] = choice["prompt_token_ids"]
            assert shown == {c["index"]: c["prompt_token_ids"] for c in json.loads(whole)["choices"]}


async def test_small_errors_say_what_is_wrong(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        error = await error_of(target.url, chat(logit_bias={"3": 1, "99999": 2}))
        assert "'99999'" in error["message"]
        error = await error_of(target.url, chat(stop_token_ids=[1, 88888]))
        assert "88888" in error["message"]
        raw = json.dumps(chat()).replace("capital", r"capital \ud800").encode()
        error = await error_of(target.url, raw)
        assert "surrogate" in error["message"]
        assert r"\ud800" in error["message"]
        for name in ("prefix", "partial"):
            partial = {"role": "assistant", "content": "x", name: True}
            error = await error_of(target.url, chat(messages=[{"role": "user", "content": "x"}, partial]))
            assert (error["param"], error["code"]) == (f"messages[1].{name}", "unsupported_parameter")
    assert worker.received == []


async def test_a_trailing_slash_is_no_other_route(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target, aiohttp.ClientSession() as session:
        assert (await post(target.url, chat(), "/v1/chat/completions/"))[0] == 200
        for path in ("/v1/models/", "/v1/models/tiny/", "/health/ready/", "/version//"):
            async with session.get(target.url + path, allow_redirects=False) as response:
                assert response.status == 200, path


FLAT: Any = {"type": "function", **WEATHER["function"]}
CURSOR: Any = {
    "model": "tiny",
    "input": [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "input_text", "text": "Hi"}]},
        {"type": "function_call", "call_id": "c1", "name": "get_weather", "arguments": '{"city": "Oslo"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
    ],
    "tools": [FLAT],
    "tool_choice": {"type": "auto"},
    "reasoning": {"effort": "medium", "summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 99,
    "user": "u",
}


SEND: Any = {"type": "object", "properties": {"messages": {"type": "array"}, "input": {"type": "string"}}}


@pytest.mark.parametrize(
    "tool",
    [FLAT, FLAT | {"parameters": SEND}, WEATHER, {"type": "custom", "name": "ApplyPatch", "format": {"type": "text"}}],
)
async def test_a_body_of_responses_at_chats_has_a_chats_answer(worker: ScriptedWorker, tool: dict[str, Any]) -> None:
    """Cursor sends `input` to /chat/completions, with tools of either form, and reads chunks."""
    body = {**CURSOR, "tools": [tool]}
    async with gateway(worker) as target:
        status, _, whole = await post(target.url, body)
        options = {"stream": True, "stream_options": {"include_usage": True}}
        _, _, streamed = await post(target.url, {**body, **options})
        assert (await post(target.url, body, "/v1/responses"))[0] == 200
    assert status == 200, whole
    answer, chunks = json.loads(whole), list(events(streamed))
    assert (answer["object"], answer["choices"][0]["message"]["content"]) == ("chat.completion", ANSWER)
    assert chunks.pop() == "[DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert "".join(each["delta"].get("content", "") for chunk in chunks for each in chunk["choices"]) == ANSWER
    assert chunks[-1]["usage"] == answer["usage"]
    first, again, responses = worker.received
    assert first.prompt_ids == again.prompt_ids == responses.prompt_ids
    assert first.sampling.max_tokens == 99


@pytest.mark.parametrize("word", ["max_tokens", "max_completion_tokens"])
async def test_a_body_of_responses_at_chats_may_have_chats_words(worker: ScriptedWorker, word: str) -> None:
    """SDKs send a chat's length next to `input`; the length that responses have goes first."""
    body = {"model": "tiny", "input": "Hi", word: 3, "reasoning_effort": "low"}
    async with gateway(worker) as target:
        status, headers, _ = await post(target.url, body)
        assert (status, headers["x-headstart-ignored"]) == (200, "reasoning.effort"), "the template has no efforts"
        assert (await post(target.url, {**body, "max_output_tokens": 5}))[0] == 200
        assert (await error_of(target.url, {**body, word: "many"}))["param"] == word
        assert (await error_of(target.url, body, "/v1/responses"))["param"] in body, "it has no such words"
    assert [request.sampling.max_tokens for request in worker.received] == [3, 5]


async def test_a_wrong_body_of_responses_at_chats_is_named(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        assert (await error_of(target.url, {**CURSOR, "input": []}))["param"] == "input"
        assert (await error_of(target.url, {**CURSOR, "stream_options": {"include_usage": 3}}))["param"] == (
            "stream_options.include_usage"
        )
        assert (await error_of(target.url, {"model": "tiny", "input": None}))["param"] == "messages"
        assert (await error_of(target.url, chat(input="x")))["param"] == "input", "one of both"
        said = chat(messages=[{"role": "user", "content": '"input": 1'}], metadata={"input": "x"})
        assert (await post(target.url, said))[0] == 200
        tool = {"type": "function", "function": {"name": "send", "parameters": SEND}}
        assert (await post(target.url, chat(tools=[tool])))[0] == 200


async def test_an_empty_id_of_a_call_is_an_id(worker: ScriptedWorker) -> None:
    """Servers without ids have given it, and their clients send it back."""
    call = {"id": "", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    said = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "", "content": "x"}]
    async with gateway(worker) as target:
        assert (await post(target.url, chat(messages=said)))[0] == 200


async def test_a_type_of_null_is_an_absent_one(worker: ScriptedWorker) -> None:
    """The official SDK dumps it so."""
    function = {"name": "f", "arguments": "{}"}
    async with gateway(worker) as target:
        for given in ({}, {"type": None}):
            item = {**given, "role": "user", "content": "hi"}
            assert (await post(target.url, {"model": "tiny", "input": [item]}, "/v1/responses"))[0] == 200
            messages = [{"role": "assistant", "tool_calls": [{**given, "id": "a", "function": function}]}]
            assert (await post(target.url, chat(messages=messages)))[0] == 200
    prompts = [request.prompt_ids for request in worker.received]
    assert prompts[:2] == prompts[2:]
