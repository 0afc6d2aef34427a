"""Bodies of /v1/messages: the same prompt as a chat's, what is refused by name, and what changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from server.schema.fields import ModelFields
from server.schema.messages import COUNT_TOKENS, MESSAGES, MessagesRequest
from tests.server.api.test_messages import PATH, TOOL, body
from tests.server.api.test_tools import WEATHER
from tests.server.gateway_app import gateway
from tests.server.messages_grammar import check_error
from tests.server.scripted_worker import Says, ScriptedWorker
from tests.server.test_app import post
from tests.server.test_fields import DOCUMENT, FIELD

MESSAGES_PAGE = DOCUMENT.with_suffix("") / "messages.md"
CACHED: Any = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
INPUT: Any = {"city": "Köln", "days": [1, 2.0, 10**30], "now": None}
USE: Any = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": INPUT, **CACHED}
CALLED: Any = {
    "id": "toolu_1",
    "type": "function",
    "function": {"name": "get_weather", "arguments": json.dumps(INPUT, ensure_ascii=False)},
}
TEMPLATES = {
    "without tools": None,
    "with tools": "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.tool_calls | tojson if m.tool_calls }}|"
    "{{ m.tool_call_id }}]{% endfor %}{{ tools | tojson if tools }}{{ enable_thinking }}{{ reasoning_effort }}",
}


def text(words: str, **fields: Any) -> dict[str, Any]:
    return {"type": "text", "text": words, **fields}


def result(content: Any, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, **fields}


def user(content: Any = "Hi") -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


SYSTEM: Any = {"role": "system", "content": "Be kind."}
ANSWERED: Any = [user(), assistant("I look.", tool_calls=[CALLED]), {"role": "tool", "tool_call_id": "toolu_1"}]
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a text": ({"messages": [user()]}, {"messages": [user()]}),
    "texts": ({"messages": [user([text("a"), text("b", **CACHED)])]}, {"messages": [user([text("a"), text("b")])]}),
    "system": ({"system": "Be kind.", "messages": [user()]}, {"messages": [SYSTEM, user()]}),
    "system in blocks": (
        {"system": [text("Be", **CACHED), text("kind.")], "messages": [user()]},
        {"messages": [{**SYSTEM, "content": "Be\nkind."}, user()]},
    ),
    "system in between": ({"messages": [user(), SYSTEM, user()]}, {"messages": [user(), SYSTEM, user()]}),
    "an empty system": ({"system": "", "messages": [user()]}, {"messages": [user()]}),
    "a system without blocks": ({"system": [], "messages": [user()]}, {"messages": [user()]}),
    "turns in a row": ({"messages": [user("a"), user("b")]}, {"messages": [user("a"), user("b")]}),
    "thoughts": (
        {
            "messages": [
                user(),
                assistant([{"type": "thinking", "thinking": "Hm.", "signature": ""}, text("Yes.")]),
                assistant([{"type": "redacted_thinking", "data": "x"}]),
                user(),
            ]
        },
        {"messages": [user(), assistant("Yes."), assistant(""), user()]},
    ),
    "a call and its result": (
        {"tools": [TOOL | CACHED], "messages": [user(), assistant([text("I look."), USE]), user([result("rain")])]},
        {"tools": [WEATHER], "messages": [*ANSWERED[:2], {**ANSWERED[2], "content": "rain"}]},
    ),
    "results and a text": (
        {
            "tools": [TOOL],
            "messages": [
                user(),
                assistant([text("I look."), USE]),
                user([result([text("a"), text("b")]), result(None), text("And?"), text("So?")]),
            ],
        },
        {
            "tools": [WEATHER],
            "messages": [
                *ANSWERED[:2],
                {**ANSWERED[2], "content": "a\nb"},
                {**ANSWERED[2], "content": ""},
                user("And?\nSo?"),
            ],
        },
    ),
    "an error": (
        {
            "messages": [
                user(),
                assistant([text("I look."), USE]),
                user([result("no", is_error=True), result([text("no")], is_error=True)]),
            ]
        },
        {"messages": [*ANSWERED[:2], *({**ANSWERED[2], "content": f"Error:{gap}no"} for gap in " \n")]},
    ),
    "arguments that are no object": (
        {"messages": [user(), *[assistant([{**USE, "input": value}]) for value in ("a", -7, None, [1])], user()]},
        {
            "messages": [
                user(),
                *[
                    assistant("", tool_calls=[CALLED | {"function": {"name": "get_weather", "arguments": text}}])
                    for text in ('"a"', "-7", "null", "[1]")
                ],
                user(),
            ]
        },
    ),
    "no use of tools": (
        {"tools": [TOOL], "tool_choice": {"type": "none"}, "messages": [user()]},
        {"tools": [WEATHER], "tool_choice": "none", "messages": [user()]},
    ),
    "the beginning of an answer": (
        {"messages": [user(), assistant("The answer (")]},
        {"messages": [user(), assistant("The answer (")], "continue_final_message": True},
    ),
    "switches": (
        {"messages": [user()], "thinking": {"type": "enabled"}, "output_config": {"effort": "high"}},
        {"messages": [user()], "chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "high"},
    ),
}


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("name", PAIRS)
async def test_the_prompt_is_that_of_the_chat(says: Says, name: str, template: str) -> None:
    source = TEMPLATES[template]
    worker = says("x", **({} if source is None else {"chat_template": source}))
    ours, chat = PAIRS[name]
    async with gateway(worker) as target:
        for path, fields in ((PATH, ours), ("/v1/chat/completions", chat)):
            status, _, raw = await post(target.url, {"model": "tiny", "max_tokens": 8, "seed": 1, **fields}, path)
            assert status == 200, raw
        status, _, raw = await post(target.url, {"model": "tiny", **ours}, f"{PATH}/count_tokens")
    one, other = worker.received
    assert list(one.prompt_ids) == list(other.prompt_ids)
    assert (one.root, one.sampling) == (other.root, other.sampling)
    assert json.loads(raw) == {"input_tokens": len(one.prompt_ids)}


IMAGE: Any = {"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}
FORMAT: Any = {"type": "json_schema", "schema": {"type": "object"}}
TOO_LONG: Any = {"messages": [user("word " * 3000)]}
WEB: Any = {"type": "web_search_20250305", "name": "web_search"}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": [user([])]}, "messages[0].content"),
    ({"messages": [user([{"type": "tool_result"}])]}, "messages[0].content[0].tool_use_id"),
    ({"messages": [user([USE])]}, "messages[0].content[0].type is 'tool_use'"),
    ({"messages": [assistant([{"type": "tool_use", "id": "a", "name": "b"}]), user()]}, "messages[0].content[0].input"),
    ({"messages": [assistant([{**USE, "id": ""}]), user()]}, "messages[0].content[0]"),
    ({"messages": [user(), assistant([USE])]}, "messages end with a tool_use"),
    ({"messages": [user([{"type": "text"}])]}, "messages[0].content[0].text"),
    (TOO_LONG, "prompt is too long: "),
    ({"system": [IMAGE]}, "system[0].type"),
    ({"tools": [WEB], "tool_choice": {"type": "any"}}, "cannot run web_search_20250305"),
    (
        {"tools": [TOOL, WEB], "tool_choice": {"type": "tool", "name": "web_search"}},
        "tool_choice names web_search_20250305",
    ),
    ({"tools": [{**TOOL, "input_schema": {"type": "string"}}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "name": "bad name"}]}, "tools[0].name"),
    ({"tools": [{**TOOL, "name": None}]}, "tools[0].name"),
    ({"tools": [TOOL, {**TOOL, "description": "other"}]}, "tools[1].name"),
    ({"tools": [{**TOOL, "input_examples": [{}]}]}, "tools[0].input_examples"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool"}}, "tool_choice.name"),
    ({"tools": [TOOL], "tool_choice": {"type": "tool", "name": "g"}}, "tool_choice"),
    ({"tool_choice": "auto"}, "tool_choice"),
    ({"thinking": {"type": "enabled", "other": 1}}, "thinking"),
    ({"output_config": {"format": {"type": "regex", "schema": {}}}}, "output_config.format.type"),
    ({"output_config": {"task_budget": 5}}, "output_config.task_budget"),
    ({"output_format": {"type": "regex", "schema": {}}}, "output_format.type"),
    ({"output_format": FORMAT, "output_config": {"format": FORMAT}}, "output_format and output_config.format"),
    ({"output_format": FORMAT, "structured_outputs": {"regex": "a"}}, "output_format"),
    ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "context_management.edits"),
    ({"container": {"skills": [{"type": "custom", "skill_id": "s"}]}}, "container"),
    ({"inference_geo": "eu"}, "inference_geo"),
    ({"temperature": 1.5}, "temperature"),
    ({"stop_sequences": ["a"] * 33}, "stop_sequences"),
    ({"stop_sequences": "a"}, "stop_sequences"),
    ({"stop": "a"}, "stop is not offered here"),
    ({"service_tier": "flex"}, "service_tier"),
    ({"metadata": {"user_id": 5}}, "metadata.user_id"),
]


@pytest.mark.parametrize("path", [PATH, f"{PATH}/count_tokens"])
async def test_the_error_names_the_field(says: Says, path: str) -> None:
    worker: ScriptedWorker = says("x")
    async with gateway(worker) as target:
        for fields, named in REFUSED:
            status, headers, raw = await post(target.url, body(**fields), path)
            if fields is TOO_LONG and path != PATH:
                assert status == 200, "a prompt that is too long is counted all the same"
                continue
            assert (status, headers["content-type"]) == (400, "application/json"), (fields, raw)
            error = check_error(raw, headers)
            assert error["type"] == "invalid_request_error"
            assert named in error["message"]
    assert worker.received == []


def test_the_document_lists_every_field() -> None:
    fields = {*MessagesRequest.__struct_fields__} - {*ModelFields.__struct_fields__}
    documented = set(FIELD.findall(MESSAGES_PAGE.read_text(encoding="utf-8")))
    assert fields | {"temperature", "metadata", "service_tier"} <= documented
    assert COUNT_TOKENS.refused.keys() - MESSAGES.refused.keys() <= {"max_tokens"}


HINTS: dict[str, Any] = {
    **CACHED,
    "service_tier": "standard_only",
    "speed": "fast",
    "betas": ["fast-mode-2026-02-01"],
    "fallbacks": [{"model": "another"}],
    "inference_geo": "global",
    "container": {"id": None, "skills": []},
    "mcp_servers": [],
    "thread": None,
    "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
    "output_config": {"task_budget": {"type": "tokens", "total": 5000}},
    "thinking": {"type": "between_tools"},
    "metadata": {"user_id": None},
    "diagnostics": {"previous_message_id": None},
    "user_profile_id": "u",
    "some_field_of_tomorrow": 5,
}


async def test_hints_change_nothing(says: Says) -> None:
    worker = says("x")
    tool = {**TOOL, **CACHED, "type": "custom", "eager_input_streaming": True}
    tool |= {"defer_loading": False, "allowed_callers": ["direct"], "input_examples": []}
    async with gateway(worker) as target:
        for fields in ({"tools": [TOOL]}, *({"tools": [tool], key: value} for key, value in HINTS.items())):
            headers = {"anthropic-version": "2023-06-01", "anthropic-beta": "x"} if worker.received else {}
            status, _, raw = await post(target.url, body(seed=1, **fields), f"{PATH}?beta=true", **headers)
            assert status == 200, (fields, raw)
    first, *others = ((request.sampling, tuple(request.prompt_ids)) for request in worker.received)
    assert set(others) == {first}
