"""/v1/messages against real processes: the prompts, tokens and cache of chats, streams, and broken bodies."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.schema.messages import MESSAGES, MessagesRequest
from tests.e2e.serving import SMALL_POOL, Serve, cached_tokens, chat
from tests.e2e.test_breadth import bounded_tool
from tests.server.messages_grammar import check_error, check_message, read_stream
from tests.server.test_fuzz import JSON, Mutations
from tests.waiting import HANG_S

pytestmark = pytest.mark.e2e
MODEL = "tiny"
PATH = "/v1/messages"
BLOCK = 16
FUNCTION = bounded_tool()["function"]
TOOL: Any = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": FUNCTION["parameters"]}
SYSTEM = "You are kind. " * 20
BODY: dict[str, Any] = {
    "model": MODEL,
    "max_tokens": 5,
    "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}],
    "messages": [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Hm.", "signature": ""},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "c", "name": "get_weather", "input": {"city": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c", "content": [{"type": "text", "text": "x"}]},
                {"type": "tool_result", "tool_use_id": "c", "content": "x", "is_error": True},
                {"type": "text", "text": "And?"},
            ],
        },
    ],
    "tools": [TOOL],
    "tool_choice": {"type": "auto", "disable_parallel_tool_use": True},
    "thinking": {"type": "enabled", "budget_tokens": 1024},
    "output_config": {"effort": "low", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    "stop_sequences": ["a", "b"],
    "metadata": {"user_id": "u"},
    "temperature": 0.5,
    "top_k": 5,
    "stream": True,
}
FIELDS = [*MessagesRequest.__struct_fields__, *MESSAGES.refused]


@pytest.fixture(scope="module")
def serve(tiny_model: Path) -> Iterator[Serve]:
    worker_args = f"--served-model-name {MODEL} --dtype float32 {SMALL_POOL}"
    args = ["--model", str(tiny_model), "--num-workers", "1", "--threads", "1", "--worker-args", worker_args]
    with Serve(*args) as running:
        yield running


def ok(answer: httpx.Response) -> httpx.Response:
    assert answer.status_code == 200, answer.text
    return answer


def test_a_conversation_by_either_api_is_one(serve: Serve) -> None:
    """Eight turns, every second with a call: equal tokens, and whoever comes second finds all whole blocks."""
    messages: list[dict[str, Any]] = []
    chats: list[dict[str, Any]] = [{"role": "system", "content": SYSTEM}]
    num_found = 0
    for turn in range(8):
        calls = turn % 2 == 0
        question = f"Question {turn}: " + "and so on " * 6
        messages.append({"role": "user", "content": [{"type": "text", "text": question}]})
        chats.append({"role": "user", "content": question})
        body = {"model": MODEL, "max_tokens": 60, "temperature": 0, "system": SYSTEM, "messages": messages}
        body |= {"tools": [TOOL], "tool_choice": {"type": "tool", "name": TOOL["name"]} if calls else {"type": "auto"}}
        function = {"type": "function", "function": {"name": TOOL["name"]}}
        options = {"tools": [bounded_tool()], "tool_choice": function if calls else "auto", "max_tokens": 60}
        counted = ok(serve.post(f"{PATH}/count_tokens", body)).json()["input_tokens"]
        answers = {}
        for by in ("messages", "chat") if turn % 4 < 2 else ("chat", "messages"):
            if by == "messages":
                answers[by] = check_message(ok(serve.post(PATH, body)).json())
                found = answers[by]["usage"]["cache_read_input_tokens"]
                assert answers[by]["usage"]["input_tokens"] + found == counted
            else:
                answer = chat(serve, chats, model=MODEL, **options)
                answers[by] = answer.json()
                found = cached_tokens(answer)
                assert answers[by]["usage"]["prompt_tokens"] == counted
        assert found >= counted - BLOCK, "the second finds what the first has computed"
        num_found += found
        ours, theirs = answers["messages"], answers["chat"]["choices"][0]["message"]
        assert ours["usage"]["output_tokens"] == answers["chat"]["usage"]["completion_tokens"]
        messages.append({"role": "assistant", "content": ours["content"]})
        chats.append({key: theirs[key] for key in ("role", "content", "tool_calls") if theirs.get(key)})
        if not calls:
            assert [block["text"] for block in ours["content"]] == [theirs["content"]]
            continue
        [use], [call] = ours["content"], theirs["tool_calls"]
        assert ours["stop_reason"] == "tool_use"
        assert (use["name"], use["input"]) == (call["function"]["name"], json.loads(call["function"]["arguments"]))
        result = {"type": "tool_result", "tool_use_id": use["id"], "content": f"{turn} degrees"}
        messages.append({"role": "user", "content": [result]})
        chats.append({"role": "tool", "tool_call_id": call["id"], "content": f"{turn} degrees"})
    assert num_found > 8 * BLOCK


def test_a_stream_says_what_the_answer_says(serve: Serve) -> None:
    for number, fields in enumerate(
        (
            {},
            {"stop_sequences": ["e", "a"]},
            {"tools": [TOOL], "tool_choice": {"type": "any"}, "max_tokens": 200},
            {"output_config": BODY["output_config"], "messages": [{"role": "user", "content": "JSON!"}]},
            {"messages": [{"role": "user", "content": "Go on."}, {"role": "assistant", "content": "And so"}]},
        )
    ):
        body = {"model": MODEL, "max_tokens": 40, "temperature": 0, "messages": [{"role": "user", "content": "🎉 now"}]}
        body |= {"cache_salt": f"whole {number}"} | fields
        whole = check_message(ok(serve.post(PATH, body)).json())
        body |= {"cache_salt": f"streamed {number}", "stream": True}
        streamed = read_stream(ok(serve.post(PATH, body)).content)
        for message in (whole, streamed):
            message["id"] = ""
            for block in message["content"]:
                block.pop("id", None)
        assert streamed == whole
        if "tools" in fields:
            assert {block["type"] for block in whole["content"]} == {"tool_use"}


def test_mutated_bodies(serve: Serve) -> None:
    epochs = serve.epochs()
    mutations = Mutations(7, [(PATH, BODY, FIELDS), (f"{PATH}/count_tokens", BODY, FIELDS)])
    num_ok = 0
    with httpx.Client(base_url=serve.url, timeout=HANG_S) as client:
        for _ in range(200):
            path, data = mutations.body()
            answer = client.post(path, content=data, headers=JSON)
            if answer.status_code == 200:
                num_ok += 1
                assert b"event: error" not in answer.content, data
                continue
            assert 400 <= answer.status_code < 500, (data, answer.content)
            kind = check_error(answer.content, answer.headers)["type"]
            assert kind == ("not_found_error" if answer.status_code == 404 else "invalid_request_error"), data
    assert 4 < num_ok < 200, "the mutations neither break everything nor nothing"
    assert serve.epochs() == epochs, "no worker died of a body"
