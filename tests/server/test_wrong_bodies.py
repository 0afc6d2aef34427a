"""Wrong bodies on every route: a status, the API's own shape of errors, the field by its path, and what it takes."""

from __future__ import annotations

import gzip
import json
from typing import Any

import pytest

from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_agent_fields import loaded
from tests.server.test_app import post, post_once

MESSAGE = [{"role": "user", "content": "x"}]
SMALL: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"model": "tiny", "messages": MESSAGE},
    "/v1/completions": {"model": "tiny", "prompt": "x"},
    "/v1/messages": {"model": "tiny", "messages": MESSAGE, "max_tokens": 2},
    "/v1/responses": {"model": "tiny", "input": "x"},
    "/v1/embeddings": {"model": "tiny", "input": "x"},
    "/tokenize": {"model": "tiny", "messages": MESSAGE},
    "/detokenize": {"model": "tiny", "tokens": [1]},
}
NO_FUNCTION = {"role": "assistant", "tool_calls": [{"id": "c", "type": "function"}]}
ITEM = {"id": "msg_1", "encrypted_content": "x"}
FOREIGN_ITEMS = ("computer_call", "item_reference", "compaction")
Wrong = tuple[dict[str, Any], str, str]
"""Fields, the path that the error names, and words of the remedy."""
SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}


def named(name: str, **fields: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, **fields}}


TOOL = named("read", parameters=SCHEMA)
WRONG_FORMATS: list[tuple[dict[str, Any], str]] = [
    ({"type": "json_schema"}, "json_schema"),
    ({"type": "json_schema", "json_schema": {"name": "s"}}, "json_schema.schema"),
    ({"type": "json_object", "json_schema": {"name": "s", "schema": SCHEMA}}, "json_schema"),
    ({"type": "json_object", "schema": SCHEMA, "value": SCHEMA}, "value"),
    ({"type": "text", "schema": SCHEMA}, "schema"),
]
"""Formats without a schema, or with two, and the field to blame."""
WRONG: dict[str, list[Wrong]] = {
    "/v1/chat/completions": [
        ({"messages": None}, "messages", "Expected `array`"),
        ({"messages": []}, "messages", ">= 1"),
        ({"messages": ["x"]}, "messages[0]", "Expected `object`"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "must be one of developer, system"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "is required"),
        ({"messages": [*MESSAGE, NO_FUNCTION]}, "messages[1].tool_calls[0].function", "is required"),
        ({"messages": [*MESSAGE, {"role": "tool", "content": "x"}]}, "messages[1].tool_call_id", "is required"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text", "is required"),
        ({"temperature": "hot"}, "temperature", "Expected `float"),
        ({"temperature": True}, "temperature", "Expected `float"),
        ({"max_tokens": 10**60}, "max_tokens", "<= 2147483647"),
        ({"n": 0}, "n", ">= 1"),
        ({"top_logprobs": 3}, "top_logprobs", "needs logprobs: true"),
        ({"reasoning_effort": "super"}, "reasoning_effort", "use one of none, minimal, low, medium, high, xhigh, max"),
        ({"service_tier": "gold"}, "service_tier", "use one of auto, default, flex"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "use one of text, json_object, json_schema"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "must match"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"logit_bias": {"cat": 1}}, "logit_bias", "token ids from 0 to"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "a value in it is wrong: Expected `float`"),
        ({"model": None}, "model", "Expected `str`"),
        ({"model": ""}, "model", ">= 1"),
        (
            {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
            "messages[0].content[0].type",
            "must be text",
        ),
        ({"max_tokens": -1}, "max_tokens", ">= 0"),
        ({"max_tokens": 0}, "max_tokens", ""),
        ({"max_tokens": "five"}, "max_tokens", "Expected `int | null`"),
        ({"metadata": {"k" * 70: "v"}}, "metadata", ""),
        ({"metadata": {"k": "v" * 600}}, "metadata", ""),
        ({"temperature": 2.5}, "temperature", "<= 2"),
        ({"top_k": 10**12}, "top_k", "<="),
        ({"top_logprobs": "three"}, "top_logprobs", "Expected `int | null`"),
        ({"logit_bias": {"99999": 0}}, "logit_bias", ""),
        ({"logit_bias": {"-1": 1}}, "logit_bias", ""),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", ""),
        ({"n": 129}, "n", "<= 128"),
        ({"n": -1}, "n", ">= 1"),
        ({"stop": ["a"] * 33}, "stop", "at most 32"),
        ({"stop": [""]}, "stop", ""),
        ({"seed": 2**63}, "seed", ""),
        ({"seed": 2**64}, "seed", ""),
        ({"audio": {"voice": "x"}}, "audio", ""),
        ({"web_search_options": {}}, "web_search_options", "is not offered"),
        ({"modalities": ["audio"]}, "modalities", ""),
        ({"tools": [], "tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"chat_template": "{{ 1 }}"}, "chat_template", ""),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", ""),
        ({"chat_template_kwargs": {"tokenize": True}}, "chat_template_kwargs", ""),
        ({"kv_transfer_params": {"url": "http://169.254.169.254"}}, "kv_transfer_params", ""),
        ({"prompt_embeds": "x"}, "prompt_embeds", ""),
        *(({"response_format": format_}, f"response_format.{field}", "") for format_, field in WRONG_FORMATS),
        ({"tools": [TOOL], "tool_choice": {"type": "any"}}, "tool_choice", "is none, auto, required, one function"),
        ({"tools": [{"name": "read", "input_schema": SCHEMA}]}, "tools[0].type", "is required"),
        ({"tools": [{"type": "function"}]}, "tools[0].function", "is"),
        (
            {"tools": [named("read", parameters={"type": "string"})]},
            "tools[0].function.parameters",
            "with type: object",
        ),
        ({"tools": [named("mcp.read")]}, "tools[0].function.name", "must match"),
        ({"messages": [*MESSAGE, {"role": "user", "content": None}]}, "messages[1].content", "is required"),
    ],
    "/v1/completions": [
        ({"prompt": None}, "prompt", "must not be empty"),
        ({"prompt": ["x", 1]}, "prompt[1]", "non-empty string or a non-empty list of token ids"),
        ({"prompt": [10**9]}, "prompt", "token ids from 0 to"),
        *(({"prompt": prompt}, "prompt", "") for prompt in ("", [], {"a": 1}, 3)),
        ({"prompt": [[]]}, "prompt[0]", "non-empty"),
        ({"prompt": [True]}, "prompt", "Expected `int`"),
        ({"best_of": 1, "n": 2}, "best_of", "at least n"),
        ({"max_tokens": -1}, "max_tokens", "Expected `int` >= 0"),
        ({"logprobs": 99}, "logprobs", "<= 20"),
    ],
    "/v1/messages": [
        *(({"max_tokens": limit}, "max_tokens", "Expected `int`") for limit in (None, -1, "five", 1.5)),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "use one of user, assistant, system"),
        (
            {"messages": [{"role": "user", "content": [{"type": "y"}]}]},
            "messages[0].content[0].type",
            "can here be text",
        ),
        ({"thinking": {"type": "maybe"}}, "thinking.type", "use one of enabled, disabled, adaptive"),
        ({"output_config": {"effort": "x"}}, "output_config.effort", "use one of low, medium, high, xhigh, max"),
        ({"tools": [{"name": "f"}]}, "tools[0].input_schema", "type: object"),
        ({"system": [{"type": "text", "text": 1}]}, "system[0].text", "Expected `str"),
        (loaded([{"type": "hologram", "source": {}}]), "messages[2].content[0].content[0].type", "is 'hologram'"),
        (loaded([{"type": "tool_reference"}]), "messages[2].content[0].content[0].tool_name", "is required"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls", "use tool_choice.disable_parallel_tool_use"),
    ],
    "/v1/responses": [
        ({"input": 5}, "input", "Expected `str | array`"),
        ({"input": [{"type": "smell"}]}, "input[0].type", "can be message, function_call"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "use one of text, json_object, json_schema"),
        ({"reasoning": {"effort": "x"}}, "reasoning.effort", "use one of none, minimal"),
        ({"truncation": "maybe"}, "truncation", "use one of auto, disabled"),
        ({"previous_response_id": "r"}, "previous_response_id", "send the whole input"),
        ({"conversation": "c"}, "conversation", ""),
        ({"background": True}, "background", ""),
        ({"truncation": "auto"}, "truncation", ""),
        ({"input": []}, "input", ""),
        *(({"input": [{"type": type_, **ITEM}]}, "input[0].type", "") for type_ in FOREIGN_ITEMS),
        ({"input": [{"role": "wizard", "content": "x"}]}, "input[0]", ""),
        ({"input": [{"role": "user", "content": [{"type": "input_picture"}]}]}, "input[0].content[0].type", ""),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice", "web_search"),
        ({"tools": [{"type": "function", "name": "bad name"}]}, "tools[0].name", "must match"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"max_output_tokens": 0}, "max_output_tokens", ">= 1"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", ""),
        ({"metadata": {"k" * 65: "v"}}, "metadata", ""),
        ({"add_generation_prompt": False}, "add_generation_prompt", "is a field of"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type", "it names a stored item"),
    ],
    "/v1/embeddings": [
        ({"input": None}, "input", "Expected `str | array`"),
        ({"encoding_format": "hex"}, "encoding_format", "use one of float, base64"),
        ({"dimensions": -1}, "dimensions", ">= 1"),
    ],
    "/tokenize": [
        ({"messages": 5}, "messages", "Expected `array`"),
        ({"prompt": "x"}, "prompt", "and messages exclude each other: give one of them"),
    ],
    "/detokenize": [({"tokens": [-1]}, "tokens[0]", ">= 0"), ({"tokens": [10**8]}, "tokens", "token ids from 0 to")],
}
NO_JSON = [b"", b"{", b"[]", b'"x"', b"{'model': 'tiny'}", b'{"model": "tiny",}', b"\0\0", b"model=tiny", b'{"n": NaN}']
NO_JSON += [b'{"model": "caf\xe9"}', '{"model": "tiny"}'.encode("utf-16"), b'{"model": "\\ud83d"}', b"[" * 5000]


@pytest.mark.parametrize("path", SMALL)
async def test_a_wrong_body_is_refused_with_its_field_and_a_remedy(worker: ScriptedWorker, path: str) -> None:
    missing: list[Wrong] = [
        ({}, name, "is required") for name in ("messages", "input", "tokens", "max_tokens") if name in SMALL[path]
    ]
    async with gateway(worker) as target:
        for fields, param, remedy in [*WRONG[path], *(missing if path != "/tokenize" else [])]:
            body = {**SMALL[path], **fields}
            if not fields:
                del body[param]
            for stream in (False, True) if path.startswith("/v1/") and path != "/v1/embeddings" else (False,):
                status, headers, raw = await post(target.url, {"stream": stream, **body}, path)
                error = error_of(raw, path)
                assert (status, headers["content-type"]) == (400, "application/json"), raw
                assert error.get("param", param) == param, raw
                assert error["message"].startswith(param), raw
                assert remedy in error["message"], raw
                assert "\n" not in error["message"]
        for text in NO_JSON:
            status, _, raw = await post(target.url, text, path)
            assert (status, error_of(raw, path).get("param")) == (400, None), raw
            assert "The body" in error_of(raw, path)["message"]
        for text in ('{"model": "tiny"}'.encode(f"utf-16{end}") for end in ("", "-le", "-be")):
            status, _, raw = await post(target.url, text, path)
            assert (status, "send UTF-8" in error_of(raw, path)["message"]) == (400, True), raw
        status, _, raw = await post(target.url, gzip.compress(b"{}"), path)
        assert (status, "needs a content-encoding" in error_of(raw, path)["message"]) == (400, True), raw
        status, _, raw = await post(target.url, {**SMALL[path], "model": "gpt-9"}, path)
        assert status == 404, raw
        assert "GET /v1/models lists: tiny" in error_of(raw, path)["message"]
        assert worker.received == []


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("messages", b"[" * 5000, "messages[0]"),
        ("metadata", b'{"a":' * 5000, "metadata"),
        ("audio", b'{"a":' * 5000, None),
        ("temperature", b"1e309", "temperature"),
        ("temperature", b"NaN", None),
    ],
)
async def test_values_without_bounds_are_refused(
    worker: ScriptedWorker, field: str, value: bytes, param: str | None
) -> None:
    body = b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"%b":%b}' % (field.encode(), value)
    status, _, raw = await post_once(gateway(worker), body)
    assert (status, error_of(raw, "/v1/chat/completions")["param"]) == (400, param)


def error_of(raw: bytes, path: str) -> dict[str, Any]:
    """Return the error, in the shape of the route's API."""
    answer = json.loads(raw)
    error: dict[str, Any] = answer["error"]
    if path == "/v1/messages":
        assert (answer["type"], set(error) - {"details"}) == ("error", {"type", "message"}), raw
    else:
        assert (set(answer), set(error)) == ({"error"}, {"message", "type", "param", "code"}), raw
    return error
