"""/v1/messages: what becomes of a body, the answer and its events, and errors in Anthropic's shape."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from server.api.messages import MessagesFormatter
from server.auth.identity import digest_text
from server.auth.limits import AuthThrottle
from server.request.choice import ChoiceDelta
from server.schema.messages import MessagesRequest
from server.text.output_parser import OutputRules
from tests.server.api.test_tools import CALL, WEATHER
from tests.server.gateway_app import gateway
from tests.server.messages_grammar import check_error, check_message, events_of, read_stream
from tests.server.scripted_worker import Die, Refuse, Says, script_of
from tests.server.test_app import post, post_once
from worker.wire import Grammar, Started, Tokens

PATH = "/v1/messages"
TOOL: Any = {
    "name": "get_weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}
THINKS = "{{ messages[0].content }}{{ 'so ' * 16 }}{{ enable_thinking }}{# <think> #}"


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 256, "messages": [{"role": "user", "content": "Weather?"}], **fields}


async def answer_of(says: Says, text: str, bundle: dict[str, Any] | None = None, **fields: Any) -> dict[str, Any]:
    """Return the message for a worker's text; assert that the stream has the same, except for ids."""
    worker = says(text, **(bundle or {}))
    worker.num_cached_tokens = 16
    async with gateway(worker) as target:
        status, headers, raw = await post(target.url, body(**fields), PATH)
        assert (status, headers["content-type"]) == (200, "application/json"), raw
        streamed_status, headers, stream = await post(target.url, body(**fields, stream=True), PATH)
    assert streamed_status == 200
    assert headers["content-type"].startswith("text/event-stream")
    whole = check_message(json.loads(raw))
    assert without_ids(read_stream(stream)) == without_ids(whole)
    return whole


def without_ids(message: dict[str, Any]) -> dict[str, Any]:
    content = [{key: value for key, value in block.items() if key != "id"} for block in message["content"]]
    return {**message, "id": "", "content": content}


def test_a_stream_keeps_no_text_of_what_it_has_sent() -> None:
    request = MessagesRequest(model="m", messages=[], max_tokens=9, stream=True)
    spec: Any = SimpleNamespace(request_id="msg_1")
    formatter = MessagesFormatter(request, spec, OutputRules())
    for _ in range(99):
        formatter._add(ChoiceDelta(0, "word ", [], [], None))
    assert len(formatter._texts) <= 1


async def test_text_and_usage(says: Says) -> None:
    worker = says("The capital is Paris. 🎉")
    answer = await answer_of(says, "The capital is Paris. 🎉")
    assert answer["content"] == [{"type": "text", "text": "The capital is Paris. 🎉"}]
    assert (answer["stop_reason"], answer["stop_sequence"], answer["model"]) == ("end_turn", None, "tiny")
    worker.num_cached_tokens = 16
    async with gateway(worker) as target:
        await post(target.url, body(), PATH)
        _, _, counted = await post(target.url, body(), f"{PATH}/count_tokens")
    num_prompt = len(worker.received[0].prompt_ids)
    assert json.loads(counted) == {"input_tokens": num_prompt}
    usage = answer["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"]) == (num_prompt - 16, 16)
    assert (usage["cache_creation_input_tokens"], usage["output_tokens"]) == (0, len(worker.reply) + 1)


async def test_a_call_is_a_block_with_its_input(says: Says) -> None:
    answer = await answer_of(says, CALL, tools=[TOOL])
    text, call = answer["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert call == {"type": "tool_use", "id": call["id"], "name": "get_weather", "input": {"city": "Köln"}}
    assert answer["stop_reason"] == "tool_use"


async def test_only_the_first_call_where_parallel_ones_are_disabled(says: Says) -> None:
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    for fields, num_calls in (({}, 2), ({"tool_choice": choice}, 1)):
        answer = await answer_of(says, f"{CALL}\n{CALL.partition('.')[2]}", tools=[TOOL], **fields)
        assert [block["type"] for block in answer["content"]] == ["text", *["tool_use"] * num_calls]


async def test_text_after_a_call_is_a_block_of_its_own(says: Says) -> None:
    answer = await answer_of(says, f"{CALL}\nDone.", tools=[TOOL])
    assert [block["type"] for block in answer["content"]] == ["text", "tool_use", "text"]


async def test_a_named_tool_is_called_by_a_grammar(says: Says) -> None:
    fields: Any = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
    answer = await answer_of(says, '{"city": "Rome"}', **fields)
    [call] = answer["content"]
    assert (call["name"], call["input"], answer["stop_reason"]) == ("get_weather", {"city": "Rome"}, "tool_use")
    worker = says("{}")
    async with gateway(worker) as target:
        await post(target.url, body(**fields), PATH)
        await post(target.url, body(tools=[TOOL], tool_choice={"type": "any"}), PATH)
    named, required = (request.sampling.grammar for request in worker.received)
    assert named == Grammar("json_schema", json.dumps(TOOL["input_schema"] | {"x-guidance": {"lenient": True}}))
    assert required is not None
    assert json.loads(required.text)["minItems"] == 1


@pytest.mark.parametrize("arguments", ['{"city": "Ro', "[1]", "5", "{'city': 1}"])
async def test_arguments_that_are_no_object_are_not_lost(says: Says, arguments: str) -> None:
    worker = says(arguments)
    fields: Any = {"tools": [TOOL], "tool_choice": {"type": "tool", "name": "get_weather"}}
    _, _, raw = await post_once(gateway(worker), body(**fields, max_tokens=len(worker.reply)), PATH)
    answer = json.loads(raw)
    assert answer["content"][0]["input"] == {"INVALID_JSON": arguments}
    assert answer["stop_reason"] == "max_tokens", "a cut call is no call to run"


async def test_thoughts_are_blocks(says: Says) -> None:
    text = "<think>Hm. 4?</think>Yes, 4."
    thoughts = {"type": "thinking", "thinking": "Hm. 4?", "signature": ""}
    answer = await answer_of(says, text, {"chat_template": THINKS})
    assert answer["content"] == [thoughts, {"type": "text", "text": "Yes, 4."}]
    thinking = {"type": "enabled", "budget_tokens": 2048, "display": "omitted"}
    answer = await answer_of(says, text, {"chat_template": THINKS}, thinking=thinking)
    assert answer["content"][0] == {**thoughts, "thinking": ""}


@pytest.mark.parametrize(
    ("kind", "switch"), [({"type": "enabled", "budget_tokens": 1024}, "True"), ({"type": "disabled"}, "False")]
)
async def test_thinking_is_a_switch_of_the_template(
    says: Says, raw_tokenizer: Tokenizer, kind: Any, switch: str
) -> None:
    worker = says("x", chat_template=THINKS)
    async with gateway(worker) as target:
        await post(target.url, body(thinking=kind), PATH)
        await post(target.url, body(thinking={"type": "adaptive"}), PATH)
        await post(target.url, body(), PATH)
    switched, *plain = (raw_tokenizer.decode(list(request.prompt_ids)) for request in worker.received)
    assert switched == plain[0] + switch
    assert plain[0] == plain[1]


async def test_why_an_answer_ended(says: Says) -> None:
    answer = await answer_of(says, "one two three", stop_sequences=["four", "two"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "two")
    assert answer["content"] == [{"type": "text", "text": "one "}]
    answer = await answer_of(says, "one two three", max_tokens=2)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    answer = await answer_of(says, "")
    assert (answer["content"], answer["stop_reason"]) == ([], "end_turn")


async def test_a_user_and_a_format_reach_router_and_worker(says: Says) -> None:
    worker = says("x")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    config = {"effort": "low", "format": {"type": "json_schema", "schema": schema}}
    async with gateway(worker) as target:
        await post(target.url, body(), PATH)
        await post(target.url, body(output_config=config, metadata={"user_id": "u"}), PATH)
        assert [placement.request.affinity_key for placement in target.router.placements] == [
            None,
            f"{worker.received[0].tenant}/u",
        ]
    assert worker.received[1].sampling.grammar == Grammar(
        "json_schema", json.dumps(schema | {"x-guidance": {"lenient": True}}, separators=(",", ":"))
    )


async def test_a_stream_that_breaks_ends_with_an_error(says: Says) -> None:
    worker = says("one two three")
    worker.behave = script_of(Started(0), Tokens(0, (worker.reply[0],)), then=Die())
    async with gateway(worker, no_successor_timeout_s=0.0) as target:
        status, headers, raw = await post(target.url, body(stream=True), PATH, **{"x-request-id": "abc"})
    assert status == 200
    assert headers["request-id"] == headers["x-request-id"] == "abc"
    *_, last = events_of(raw)
    assert last["type"] == "error"
    assert last["error"]["type"] == "overloaded_error"
    assert last["request_id"] == "abc"


async def test_a_silent_stream_is_kept_alive_by_pings(says: Says) -> None:
    worker = says("one")
    release = asyncio.Event()
    worker.behave = worker.holds(release, 1)
    async with (
        gateway(worker, ping_s=0.02) as target,
        aiohttp.ClientSession() as session,
        session.post(target.url + PATH, json=body(stream=True)) as response,
    ):
        first = await response.content.readuntil(b"\n\n")
        release.set()
        rest = await response.read()
    assert first == b'event: ping\ndata: {"type":"ping"}\n\n'
    assert read_stream(first + rest)["content"] == [{"type": "text", "text": "one"}]


@pytest.mark.parametrize(
    ("refusal", "status", "kind"),
    [
        (Refuse(429, "queue_full"), 429, "rate_limit_error"),
        (Refuse(503, "draining"), 529, "overloaded_error"),
        (Refuse(400, "context_length_exceeded", retryable=False), 400, "invalid_request_error"),
    ],
)
async def test_refusals_of_workers(says: Says, refusal: Refuse, status: int, kind: str) -> None:
    worker = says("x")
    worker.behave = script_of(then=refusal)
    got, headers, raw = await post_once(gateway(worker, no_successor_timeout_s=0.0), body(), PATH)
    assert (got, check_error(raw, headers)["type"]) == (status, kind)


async def test_errors_from_before_the_route(says: Says, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'[[keys]]\ndigest = "{digest_text(b"My Key")}"\ntenant = "one"\nrequests_per_minute = 10\n')
    options: Any = {"api_keys": str(keys), "throttle": AuthThrottle(burst=1000)}
    key = {"x-api-key": "My Key"}
    async with gateway(says("x"), max_body_bytes=2000, **options) as target:
        for path in (PATH, f"{PATH}/count_tokens"):
            for sent, headers, status, kind in (
                (body(), {}, 401, "authentication_error"),
                (body(), {"x-api-key": "wrong"}, 401, "authentication_error"),
                (body(model="none"), key, 404, "not_found_error"),
                (body(system="x" * 3000), key, 413, "request_too_large"),
                (body(), {**key, "content-type": "text/plain"}, 415, "invalid_request_error"),
                (b"{", key, 400, "invalid_request_error"),
            ):
                got, answered, raw = await post(target.url, sent, path, **headers)
                assert (got, check_error(raw, answered)["type"]) == (status, kind), (path, raw)
            got, _, raw = await post(target.url, body(), path, authorization="Bearer My Key")
            assert got == 200, raw
        got, answered, raw = await post(target.url, body(), PATH, **key)
        assert (got, check_error(raw, answered)["type"]) == (429, "rate_limit_error")
        async with aiohttp.ClientSession() as session, session.get(target.url + PATH, headers=key) as response:
            assert (response.status, check_error(await response.read(), response.headers)["type"]) == (
                405,
                "invalid_request_error",
            )
        _, _, raw = await post(target.url, body(), "/v1/chat/completions")
        assert set(json.loads(raw)["error"]) == {"message", "type", "param", "code"}, "other routes keep their shape"


async def test_no_worker_is_overload(says: Says) -> None:
    got, headers, raw = await post_once(gateway(), body(), PATH)
    assert (got, check_error(raw, headers)["type"]) == (529, "overloaded_error")
    assert int(headers["retry-after"]) > 0
