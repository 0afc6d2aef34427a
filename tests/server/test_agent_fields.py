"""Fields of agents and frameworks that no API documents: accepted if harmless, else refused by name.

Sources: the requests of Cline, Roo Code, Continue, Aider, Goose, LangChain, LlamaIndex, the AI SDK and LiteLLM's proxy.
"""

from __future__ import annotations

import json
from typing import Any, Final

import pytest

from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import post

CHAT: Final = "/v1/chat/completions"
COMPLETIONS: Final = "/v1/completions"
RESPONSES: Final = "/v1/responses"
MESSAGES: Final = "/v1/messages"
USER: Final = {"role": "user", "content": "Which files are there?"}
BODIES: Final[dict[str, dict[str, Any]]] = {
    CHAT: {"messages": [USER]},
    COMPLETIONS: {"prompt": "The capital"},
    RESPONSES: {"input": [USER]},
    MESSAGES: {"messages": [USER], "max_tokens": 9},
}
TEXT: Final = {"type": "text", "text": "Two."}
CACHED: Final = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
SCHEMA: Final = {"type": "object", "properties": {"path": {"type": "string"}}}
TOOL: Final = {"type": "function", "function": {"name": "read", "parameters": SCHEMA}}
CLAUDE_TOOL: Final = {"name": "read", "input_schema": SCHEMA}
CALL: Final = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
USE: Final = {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "read", "input": {}}]}
STOPS: Final = [f"<|stop_{number}|>" for number in range(32)]


def history(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"messages": [USER, *messages, USER], **fields}


def said(content: Any = None, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


def called(**fields: Any) -> dict[str, Any]:
    """A conversation with a call that has other fields, and its result."""
    call = {**CALL, "function": {**CALL["function"], **fields}}
    return history(said("", tool_calls=[call]), {"role": "tool", "tool_call_id": "c1", "content": "x"})


def loaded(content: Any) -> dict[str, Any]:
    result = {"type": "tool_result", "tool_use_id": "c1", "content": content}
    return history(USE, {"role": "user", "content": [result]})


ACCEPTED: Final[dict[str, tuple[str, dict[str, Any], dict[str, Any]]]] = {
    "no tools": (CHAT, {"tools": [], "tool_choice": "auto", "parallel_tool_calls": True}, {}),
    "a free choice among no tools": (CHAT, {"tool_choice": "auto"}, {}),
    "no tools in responses": (RESPONSES, {"tools": [], "tool_choice": "auto"}, {}),
    "no tools in messages": (MESSAGES, {"tools": [], "tool_choice": {"type": "auto"}}, {}),
    "the choice of functions": (CHAT, {"function_call": "auto"}, {}),
    "no log probabilities": (CHAT, {"logprobs": False, "top_logprobs": 0}, {}),
    "no reasoning options": (CHAT, {"reasoning": {}}, {}),
    "no media options": (CHAT, {"mm_processor_kwargs": {}, "media_io_kwargs": {"video": None}}, {}),
    "OpenRouter's routing": (
        CHAT,
        {"transforms": ["middle-out"], "provider": {"order": ["x"]}, "usage": {"include": True}, "plugins": []},
        {},
    ),
    "LiteLLM's own": (
        CHAT,
        {"litellm_call_id": "x", "drop_params": True, "num_retries": 2, "extra_body": {}, "api_base": "x"},
        {},
    ),
    "Ollama's own": (CHAT, {"options": {"num_ctx": 8192}, "keep_alive": "5m", "think": None}, {}),
    "cached tools": (CHAT, {"tools": [{**TOOL, **CACHED}]}, {"tools": [TOOL]}),
    "cached system blocks": (MESSAGES, {"system": [{**TEXT, **CACHED}]}, {"system": "Two."}),
    "parallel calls in messages": (
        MESSAGES,
        {"tools": [{**CLAUDE_TOOL, "type": "custom", **CACHED}], "parallel_tool_calls": True},
        {"tools": [CLAUDE_TOOL]},
    ),
    "an answer without content": (CHAT, history(said()), history(said(""))),
    "an answer of thoughts alone": (
        CHAT,
        history(said(reasoning_content="Hm.", tool_calls=[])),
        history(said("", reasoning_content="Hm.")),
    ),
    "an answer as an SDK writes it": (
        CHAT,
        history(said("Two.", refusal=None, annotations=[], audio=None, function_call=None, tool_calls=None)),
        history(said("Two.")),
    ),
    "an answer as LiteLLM writes it": (
        CHAT,
        history(said([{**TEXT, **CACHED, "index": 0}], provider_specific_fields={"a": 1}, thinking_blocks=[])),
        history(said("Two.")),
    ),
    "a call without arguments": (CHAT, called(arguments=""), called(arguments="{}")),
    "a call with null arguments": (CHAT, called(arguments=None), called(arguments="{}")),
    "Claude Code's tool search": (
        MESSAGES,
        loaded([{"type": "tool_reference", "tool_name": "read"}, {"type": "tool_reference", "tool_name": "write"}]),
        loaded("Loaded: read\nLoaded: write"),
    ),
    "an answer's item as the AI SDK sends it": (
        RESPONSES,
        {
            "input": [
                USER,
                {
                    "type": "message",
                    "id": "msg_1",
                    "status": "completed",
                    "role": "assistant",
                    "content": [{"type": "output_text", "text": "Two.", "annotations": [], "logprobs": []}],
                },
            ],
            "previous_response_id": None,
            "include": ["reasoning.encrypted_content", "web_search_call.results"],
            "text": {"format": {"type": "text"}, "verbosity": "medium"},
            "reasoning": {"effort": None, "summary": "auto"},
        },
        {"input": [USER, said("Two.")]},
    ),
}
"""A body's fields, and those of another body with the same prompt and sampling."""


@pytest.mark.parametrize("name", ACCEPTED)
async def test_harmless_fields_change_nothing(worker: ScriptedWorker, name: str) -> None:
    path, *both = ACCEPTED[name]
    async with gateway(worker) as target:
        for fields in both:
            body = {"model": "tiny", "seed": 1, **BODIES[path], **fields}
            status, _, raw = await post(target.url, body, path)
            assert status == 200, raw
    first, second = worker.received
    assert list(first.prompt_ids) == list(second.prompt_ids)
    assert first.sampling == second.sampling


@pytest.mark.parametrize(("path", "field"), [(CHAT, "stop"), (COMPLETIONS, "stop"), (MESSAGES, "stop_sequences")])
async def test_code_completion_may_send_32_stops(worker: ScriptedWorker, path: str, field: str) -> None:
    """Continue sends the stops of its fill-in-the-middle template and of the file's language."""
    async with gateway(worker) as target:
        body = {"model": "tiny", **BODIES[path]}
        assert (await post(target.url, {**body, field: STOPS}, path))[0] == 200
        status, _, raw = await post(target.url, {**body, field: [*STOPS, "x"]}, path)
    assert status == 400
    assert f"{field} takes at most 32 strings" in json.loads(raw)["error"]["message"]


RESULT: Final = {"type": "tool_result", "tool_use_id": "t"}
RETAINED: Final = {"prompt_cache_retention": "24h"}
UNHEARD: Final[dict[str, tuple[str, dict[str, Any], str | None]]] = {
    "a retention in a chat": (CHAT, RETAINED, "prompt_cache_retention"),
    "a retention in a completion": (COMPLETIONS, RETAINED, "prompt_cache_retention"),
    "a retention in a response": (RESPONSES, RETAINED, "prompt_cache_retention"),
    "both": (CHAT, {**RETAINED, **CACHED}, "prompt_cache_retention, cache_control.ttl"),
    "next to a tool": (
        RESPONSES,
        {**RETAINED, "tools": [{"type": "web_search"}]},
        "web_search, prompt_cache_retention",
    ),
    "a message": (MESSAGES, CACHED, "cache_control.ttl"),
    "a system block": (MESSAGES, {"system": [{**TEXT, **CACHED}]}, "cache_control.ttl"),
    "a block": (MESSAGES, {"messages": [{"role": "user", "content": [TEXT, {**TEXT, **CACHED}]}]}, "cache_control.ttl"),
    "a block of a result": (
        MESSAGES,
        {"messages": [{"role": "user", "content": [{**RESULT, "content": [{**TEXT, **CACHED}]}]}]},
        "cache_control.ttl",
    ),
    "a tool": (MESSAGES, {"tools": [{**CLAUDE_TOOL, **CACHED}]}, "cache_control.ttl"),
    "no lifetime": (MESSAGES, {"cache_control": {"type": "ephemeral"}}, None),
    "an odd control": (MESSAGES, {"cache_control": "ephemeral"}, None),
    "no retention": (CHAT, {"prompt_cache_retention": None}, None),
}
"""Lifetimes of a prompt's blocks, and the header that names them."""


@pytest.mark.parametrize("name", UNHEARD)
async def test_lifetimes_are_accepted_and_named(worker: ScriptedWorker, name: str) -> None:
    path, fields, names = UNHEARD[name]
    for strict in (False, "web_search" not in (names or "")):
        async with gateway(worker, strict_tools=strict) as target:
            for stream in (False, True):
                body = {"model": "tiny", **BODIES[path], "stream": stream, **fields}
                status, headers, raw = await post(target.url, body, path)
                assert (status, headers.get("x-headstart-ignored")) == (200, names), raw
