"""Messages and Responses in front of an engine: chats to it, and answers of their own API to clients."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from server.api.engine.chats import chat_of, keep_images
from server.api.messages import messages_intent
from server.api.prompts.items import responses_intent
from server.schema.decoding import TextLimit
from server.schema.messages import MESSAGES
from server.schema.requests import RESPONSES
from tests.server.api.engine_worker import WORDS, EngineWorker, engine_gateway
from tests.server.test_app import post, post_once

USER: Final = {"role": "user", "content": "Hi"}
PATHS: Final = ("/v1/messages", "/v1/responses")
PARAMETERS: Final = {"type": "object", "properties": {"city": {"type": "string"}}}


def body_of(path: str, *messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    turns = list(messages) or [USER]
    of_api: dict[str, Any] = {"input": turns} if path == "/v1/responses" else {"messages": turns, "max_tokens": 50}
    return {"model": "tiny"} | of_api | fields


async def chat(path: str, *messages: dict[str, Any], images: bool = False, **fields: Any) -> dict[str, Any]:
    """Return the chat that is made of a body."""
    raw = json.dumps(body_of(path, *messages, **fields)).encode()
    if path == "/v1/responses":
        intent = responses_intent(await RESPONSES.read(raw, TextLimit))
    else:
        intent = await messages_intent(await MESSAGES.read(raw, TextLimit))
    if images:
        keep_images(intent.conversation.messages)
    made: dict[str, Any] = json.loads(chat_of(intent))
    return made


def named(raw: bytes) -> list[tuple[str, dict[str, Any]]]:
    """Return the events of a stream, each with its name."""
    found = [each.partition("\ndata: ") for each in raw.decode().strip().split("\n\n") if each.startswith("event: ")]
    return [(name.removeprefix("event: "), json.loads(data)) for name, _, data in found]


def text_of(events: list[tuple[str, dict[str, Any]]]) -> str:
    deltas = [event.get("delta", "") for name, event in events if name.endswith("delta")]
    return "".join(each if isinstance(each, str) else each.get("text", "") for each in deltas)


@pytest.mark.parametrize("path", PATHS)
async def test_streams_go_on_at_another_engine(engines: list[EngineWorker], path: str) -> None:
    """As chats do, with each token once and the usage of the whole."""
    engines[0].dies_after = 2
    budget = {"thinking": {"type": "enabled", "budget_tokens": 9}} if path == PATHS[0] else {}
    _, _, raw = await post_once(engine_gateway(*engines), body_of(path, stream=True, **budget), path)
    events = named(raw)
    assert text_of(events) == "".join(WORDS)
    assert events[-1][0] in ("message_stop", "response.completed")
    (usage,) = [e["usage"] for n, e in events if n == "message_delta"] or [events[-1][1]["response"]["usage"]]
    assert usage["output_tokens"] == 5
    assert list(engines[1].received[0].choices[0].output_ids) == [10, 11]


@pytest.mark.parametrize("path", PATHS)
async def test_lost_thoughts_end_with_an_error(engines: list[EngineWorker], path: str) -> None:
    """Clients read the type of each event from its name. Codex waits for `response.failed`."""
    engines[0].parts, engines[0].dies_after = [{"reasoning": "a"}, {"reasoning": "b"}, {"content": "c"}], 2
    _, _, raw = await post_once(engine_gateway(*engines), body_of(path, stream=True), path)
    events = named(raw)
    names = [name for name, _ in events]
    assert names[-1] == {PATHS[0]: "error", PATHS[1]: "response.failed"}[path]
    assert "error" in names
    if path == "/v1/responses":
        assert [event["sequence_number"] for _, event in events] == list(range(len(events)))
        assert events[-1][1]["response"]["error"]["code"] == "worker_lost"


@pytest.mark.parametrize("stream", [True, False])
async def test_calls_have_the_engines_ids(engines: list[EngineWorker], stream: bool) -> None:
    """Some templates have rules about them. The names and the inputs are the client's."""
    calls = [
        {"index": 0, "id": "functions.f:0", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"a": 1}'}},
        {"index": 1, "id": "functions.g:1", "function": {"name": "g", "arguments": '{"input": "x\\ny"}'}},
    ]
    if stream:
        engines[0].parts = [{"content": "Hm. "}, *({"tool_calls": [call]} for call in calls)]
    else:
        whole = [calls[0] | {"function": {"name": "f", "arguments": '{"a": 1}'}}, calls[2]]
        engines[0].message = {"role": "assistant", "content": "Hm. ", "tool_calls": whole}
    tools = [{"type": "function", "name": "f", "parameters": PARAMETERS}, {"type": "custom", "name": "g"}]
    async with engine_gateway(engines[0]) as target:
        _, _, raw = await post(target.url, body_of(PATHS[1], tools=tools, stream=stream), PATHS[1])
        response = named(raw)[-1][1]["response"] if stream else json.loads(raw)
        text, call, custom = response["output"]
        assert text["content"][0]["text"] == "Hm. "
        assert (call["call_id"], call["name"], call["arguments"]) == ("functions.f:0", "f", '{"a": 1}')
        assert (custom["type"], custom["call_id"], custom["input"]) == ("custom_tool_call", "functions.g:1", "x\ny")
        tools = [{"name": name, "input_schema": PARAMETERS} for name in "fg"]
        _, _, raw = await post(target.url, body_of(PATHS[0], tools=tools, stream=stream), PATHS[0])
    if stream:
        started = [e["content_block"] for n, e in named(raw) if n == "content_block_start"]
        assert [each.get("id") for each in started] == [None, "functions.f:0", "functions.g:1"]
        assert [e["delta"]["stop_reason"] for n, e in named(raw) if n == "message_delta"] == ["tool_use"]
    else:
        message = json.loads(raw)
        assert [each.get("input") for each in message["content"]] == [None, {"a": 1}, {"input": "x\ny"}]
        assert message["stop_reason"] == "tool_use"


async def test_instructions_are_those_that_were_sent(engines: list[EngineWorker]) -> None:
    """Also next to a developer's message, where the template takes one system message only."""
    engines[0].refuses_roles = ("developer",)
    body = body_of(PATHS[1], {"role": "developer", "content": "d"}, USER, instructions="i")
    _, headers, raw = await post_once(engine_gateway(engines[0]), body, PATHS[1])
    assert json.loads(raw)["instructions"] == "i"
    assert "developer" in headers["x-headstart-repaired"]


@pytest.mark.parametrize("path", PATHS)
async def test_a_length_above_the_context_is_cut(engines: list[EngineWorker], path: str) -> None:
    """Agents ask for more than the context has room for, whatever the prompt."""
    length = {"max_output_tokens": 10_000} if path == PATHS[1] else {"max_tokens": 10_000}
    status, _, raw = await post_once(engine_gateway(engines[0]), body_of(path, **length), path)
    assert status == 200, raw
    (request,) = engines[0].received
    assert request.call is not None
    assert request.call.path == "/v1/chat/completions"
    asked = json.loads(request.call.body)["max_completion_tokens"]
    assert asked == request.sampling.max_tokens == 2048 - len(request.prompt_ids)


async def test_log_probabilities_are_those_of_the_engine(engines: list[EngineWorker]) -> None:
    top = [{"token": "a", "logprob": -0.5, "bytes": [97]}]
    entry = {"token": "b", "logprob": -1.5, "bytes": [98], "top_logprobs": top}
    engines[0].message = {"role": "assistant", "content": "b"}
    engines[0].logprobs = {"content": [entry]}
    body = body_of(PATHS[1], top_logprobs=1, include=["message.output_text.logprobs"])
    _, _, raw = await post_once(engine_gateway(engines[0]), body, PATHS[1])
    assert json.loads(raw)["output"][0]["content"][0]["logprobs"] == [entry]
    sent = json.loads(engines[0].received[0].call.body)  # type: ignore[union-attr]
    assert (sent["logprobs"], sent["top_logprobs"]) == (True, 1)


async def test_blocks_of_messages_are_those_of_vllm() -> None:
    """One text for the system and for each result; images of a result are the user's; thoughts and calls are kept."""
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    result = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, {"type": "image", "source": source}]
    used = {"type": "tool_use", "id": "c", "name": "f", "input": {"a": 1}}
    made = await chat(
        PATHS[0],
        {"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "text", "text": ""}]},
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "t"}, used]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": result}]},
        {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "https://a/b.png"}}]},
        images=True,
        system=[{"type": "text", "text": "s"}, {"type": "text", "text": "t"}],
        thinking={"type": "enabled", "budget_tokens": 9},
        output_config={"effort": "low", "format": {"type": "json_schema", "schema": PARAMETERS}},
        stop_sequences=["."],
    )
    called = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
    images = [
        {"type": "image_url", "image_url": {"url": url}} for url in ("data:image/png;base64,AAAA", "https://a/b.png")
    ]
    assert made["messages"] == [
        {"role": "system", "content": "st"},
        {"role": "user", "content": "x"},
        {"role": "assistant", "reasoning": "t", "content": [], "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "a\nb"},
        {"role": "user", "content": images[:1]},
        {"role": "user", "content": images[1:]},
    ]
    assert (made["thinking_token_budget"], made["stop"]) == (9, ["."])
    assert made["response_format"]["json_schema"]["schema"] == PARAMETERS


async def test_items_of_responses_are_those_of_vllm() -> None:
    made = await chat(
        PATHS[1],
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]},
        {"type": "custom_tool_call", "call_id": "c", "name": "g", "input": "y"},
        {"type": "custom_tool_call_output", "call_id": "c", "output": "z"},
        {"role": "user", "content": [{"type": "input_image", "image_url": "data:image/png;base64,AAAA"}]},
        images=True,
        instructions="i",
        tools=[{"type": "custom", "name": "g", "description": "d"}],
        tool_choice={"type": "custom", "name": "g"},
        parallel_tool_calls=False,
    )
    assert [each["role"] for each in made["messages"]] == ["system", "user", "assistant", "tool", "user"]
    assert made["messages"][2]["reasoning"] == "t"
    assert made["messages"][2]["tool_calls"][0]["function"] == {"name": "g", "arguments": '{"input": "y"}'}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert made["messages"][4]["content"] == [image]
    assert made["tool_choice"] == {"type": "function", "function": {"name": "g"}}
    assert made["parallel_tool_calls"] is False
