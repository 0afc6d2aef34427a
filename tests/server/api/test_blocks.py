"""Parts that are no text, for a model of text: their text or a line in their place, by every API."""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from tests.server.api.test_tools import CALL, WEATHER
from tests.server.gateway_app import gateway
from tests.server.messages_grammar import check_error, events_of
from tests.server.scripted_worker import Says
from tests.server.test_app import post, post_once

CHAT: Final = "/v1/chat/completions"
MESSAGES: Final = "/v1/messages"
RESPONSES: Final = "/v1/responses"
TEXT: Final = {"type": "text", "text": "What is it?"}
IMAGE: Final = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}}
DOCUMENT: Final = {"type": "document", "title": "Minutes", "source": {"type": "text", "data": "All agreed."}}
PARTED: Final = {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "Page 1."}]}}
FOUND: Final = {
    "type": "search_result",
    "source": "https://example.com",
    "title": "A page",
    "content": [{"type": "text", "text": "What it says."}],
}
USE: Final = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "read", "input": {}}]}


def user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def result(*parts: Any) -> dict[str, Any]:
    return user({"type": "tool_result", "tool_use_id": "c1", "content": list(parts)})


def body(path: str, *messages: Any, **fields: Any) -> dict[str, Any]:
    name = "input" if path == RESPONSES else "messages"
    limit = {"max_tokens": 5} if path == MESSAGES else {}
    return {"model": "tiny", name: list(messages), **limit, **fields}


LEFT_OUT: Final[dict[str, tuple[str, dict[str, Any], str, str]]] = {
    "a tool's picture": (MESSAGES, body(MESSAGES, user(TEXT), USE, result(IMAGE)), "image", "image"),
    "a picture after a text": (MESSAGES, body(MESSAGES, user(TEXT, IMAGE)), "image", "image"),
    "a PDF": (
        MESSAGES,
        body(MESSAGES, user({"type": "document", "title": "Plan", "source": {"type": "base64", "data": "JVBERi0="}})),
        "document: Plan",
        "document",
    ),
    "an image of a chat": (
        CHAT,
        body(CHAT, user(TEXT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,iVBO"}})),
        "image_url",
        "image_url",
    ),
    "sound": (
        CHAT,
        body(CHAT, user({"type": "input_audio", "input_audio": {"data": "", "format": "wav"}})),
        *2 * ("input_audio",),
    ),
    "an image of responses": (RESPONSES, body(RESPONSES, user({"type": "input_image"})), *2 * ("input_image",)),
    "a picture as an output": (
        RESPONSES,
        body(
            RESPONSES,
            {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image"}]},
        ),
        *2 * ("input_image",),
    ),
}


@pytest.mark.parametrize("name", LEFT_OUT)
async def test_a_line_is_in_the_place_of_media(says: Says, name: str) -> None:
    path, given, shown, kind = LEFT_OUT[name]
    worker = says("x")
    async with gateway(worker) as target:
        status, headers, raw = await post(target.url, given, path)
        assert (status, headers["x-headstart-ignored"]) == (200, kind), raw
    assert f"[{shown}: left out, as this model reads text]" in says.prompt(worker)
    async with gateway(worker, strict_blocks=True) as target:
        status, headers, raw = await post(target.url, given, path)
        assert status == 400
        assert f"is '{kind}'".encode() in raw


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_documents_of_text_are_read(says: Says, path: str) -> None:
    worker = says("x")
    async with gateway(worker, strict_blocks=True) as target:
        status, headers, raw = await post(target.url, body(path, user(DOCUMENT, PARTED, FOUND)), path)
        assert status == 200, raw
        assert "x-headstart-ignored" not in headers
    assert "Minutes\nAll agreed.\nPage 1.\nA page\nhttps://example.com\nWhat it says." in says.prompt(worker)


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_half_a_pair_in_a_document_is_refused(says: Says, path: str) -> None:
    given = json.dumps(body(path, user(DOCUMENT, FOUND))).replace("All agreed.", "\\ud83d")
    status, _, raw = await post_once(gateway(says("x")), given.encode(), path)
    assert (status, b"half of a surrogate pair" in raw) == (400, True), raw


async def test_a_text_part_without_its_text_is_named(says: Says) -> None:
    async with gateway(says("x")) as target:
        for path in (CHAT, RESPONSES):
            kind = "text" if path == CHAT else "input_text"
            _, _, raw = await post(target.url, body(path, user({"type": kind})), path)
            error = json.loads(raw)["error"]
            assert error["param"].endswith("[0].content[0].text"), error
            assert error["message"].endswith("is required."), error


@pytest.mark.parametrize("choice", [{"type": "function", "name": "get_weather"}, {"type": "auto"}])
async def test_chats_take_tools_and_choices_of_responses(says: Says, choice: dict[str, Any]) -> None:
    nested, flat = says("x"), says("x")
    tool = {"type": "function", **WEATHER["function"]}
    custom = {"type": "custom", "name": "patch", "format": {"type": "text"}}
    async with gateway(nested) as target:
        tools = [WEATHER, {"type": "custom", "custom": {"name": "patch", "format": {"type": "text"}}}]
        assert (await post(target.url, body(CHAT, user(TEXT), tools=tools)))[0] == 200
    async with gateway(flat) as target:
        status, _, raw = await post(target.url, body(CHAT, user(TEXT), tools=[tool, custom], tool_choice=choice))
        assert status == 200, raw
    assert says.prompt(nested) == says.prompt(flat)


async def test_null_results_are_empty(says: Says) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    chat = [{"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_call_id": "c1", "content": None}]
    items = [
        {"type": "function_call", "call_id": "c1", "name": "read", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": None},
        {"type": "message", "role": "assistant", "content": None},
    ]
    async with gateway(says("x")) as target:
        assert (await post(target.url, body(CHAT, user(TEXT), *chat)))[0] == 200
        assert (await post(target.url, body(RESPONSES, *items), RESPONSES))[0] == 200


@pytest.mark.parametrize("value", [5.0, "5"])
async def test_whole_numbers_in_another_form(says: Says, value: object) -> None:
    worker = says("x")
    async with gateway(worker) as target:
        for path, name in ((CHAT, "max_tokens"), (MESSAGES, "max_tokens"), (RESPONSES, "max_output_tokens")):
            assert (await post(target.url, body(path, user(TEXT), top_k=value) | {name: value}, path))[0] == 200
        assert (await post(target.url, body(CHAT, user(TEXT), max_tokens=5.5)))[0] == 400
    assert {(request.sampling.max_tokens, request.sampling.top_k) for request in worker.received} == {(5, 5)}


async def test_the_tokens_of_responses_are_counted(says: Says) -> None:
    worker = says("x")
    given = body(RESPONSES, user({"type": "input_text", "text": "What is it?"}), instructions="Be brief.")
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, given, f"{RESPONSES}/input_tokens")
        _, _, answer = await post(target.url, given, RESPONSES)
        status, _, refused = await post(target.url, given, f"{RESPONSES}/compact")
    counted = json.loads(raw)
    assert counted == {"object": "response.input_tokens", "input_tokens": json.loads(answer)["usage"]["input_tokens"]}
    assert status == 400
    assert b"compaction is not offered: send a summary" in refused


async def test_errors_have_the_shape_of_the_clients_api(says: Says) -> None:
    """Anthropic's SDK names its version to every address, also to one that is not here."""
    async with gateway(says("x")) as target:
        status, found, raw = await post(target.url, {}, "/v1/complete", **{"anthropic-version": "2023-06-01"})
        assert status == 404
        assert check_error(raw, found)["type"] == "not_found_error"
        _, _, raw = await post(target.url, {}, "/v1/complete")
        assert "param" in json.loads(raw)["error"]


async def test_a_call_that_is_cut_does_not_look_whole(says: Says) -> None:
    """Wherever its answer is cut: without all of its arguments, the input shows what is there of them."""
    tool = {"name": "get_weather", "input_schema": WEATHER["function"]["parameters"]}
    worker = says(CALL)
    async with gateway(worker) as target:
        for length in range(1, len(worker.reply)):
            given = body(MESSAGES, user(TEXT), tools=[tool]) | {"max_tokens": length}
            _, _, raw = await post(target.url, given, MESSAGES)
            _, _, stream = await post(target.url, given | {"stream": True}, MESSAGES)
            message, events = json.loads(raw), events_of(stream)
            assert message["stop_reason"] == "max_tokens"
            assert {} not in [block.get("input") for block in message["content"]], length
            num_begun = sum(event.get("content_block", {}).get("type") == "tool_use" for event in events)
            written = "".join(event.get("delta", {}).get("partial_json", "") for event in events)
            assert (num_begun > 0) == (written != ""), length
