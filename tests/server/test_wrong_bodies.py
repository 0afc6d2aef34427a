"""Wrong bodies on every route: a status, the API's own shape of errors, the field by its path, and what it takes."""

from __future__ import annotations

import codecs
import json
from typing import Any

import pytest

from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import chat, post

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
Wrong = tuple[dict[str, Any], str, str]
"""Fields, the path that the error names, and words of the remedy."""
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
        ({"stream_options": {}}, "stream_options", "only allowed with stream: true"),
        ({"reasoning_effort": "super"}, "reasoning_effort", "use one of none, minimal, low, medium, high, xhigh, max"),
        ({"service_tier": "gold"}, "service_tier", "use one of auto, default, flex"),
        ({"response_format": {"type": "yaml"}}, "response_format.type", "use one of text, json_object, json_schema"),
        ({"tools": [{"type": "function", "function": {"name": ""}}]}, "tools[0].function.name", "must match"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"logit_bias": {"cat": 1}}, "logit_bias", "token ids from 0 to"),
        ({"logit_bias": {"5": "x"}}, "logit_bias", "a value in it is wrong: Expected `float`"),
        ({"model": None}, "model", "Expected `str`"),
    ],
    "/v1/completions": [
        ({"prompt": None}, "prompt", "must not be empty"),
        ({"prompt": ["x", 1]}, "prompt[1]", "non-empty string or a non-empty list of token ids"),
        ({"prompt": [10**9]}, "prompt", "token ids from 0 to"),
        ({"best_of": 1, "n": 2}, "best_of", "at least n"),
        ({"logprobs": 99}, "logprobs", "<= 20"),
    ],
    "/v1/messages": [
        ({"max_tokens": None}, "max_tokens", "Expected `int`"),
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
    ],
    "/v1/responses": [
        ({"input": 5}, "input", "Expected `str | array`"),
        ({"input": [{"type": "smell"}]}, "input[0].type", "can be message, function_call"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format.type", "use one of text, json_object, json_schema"),
        ({"reasoning": {"effort": "x"}}, "reasoning.effort", "use one of none, minimal"),
        ({"truncation": "maybe"}, "truncation", "use one of auto, disabled"),
        ({"previous_response_id": "r"}, "previous_response_id", "send the whole input"),
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
        ({}, name, "is required") for name in ("messages", "input", "tokens") if name in SMALL[path]
    ]
    async with gateway(worker) as target:
        for fields, param, remedy in [*WRONG[path], *(missing if path != "/tokenize" else [])]:
            body = {**SMALL[path], **fields}
            if not fields:
                del body[param]
            status, _, raw = await post(target.url, body, path)
            error = error_of(raw, path)
            assert (status, error.get("param", param)) == (400, param), raw
            assert error["message"].startswith(param), raw
            assert remedy in error["message"], raw
            assert "\n" not in error["message"]
        for text in NO_JSON:
            status, _, raw = await post(target.url, text, path)
            assert (status, error_of(raw, path).get("param")) == (400, None), raw
            assert "The body" in error_of(raw, path)["message"]
        for text in [
            codecs.BOM_UTF8 + b"{}",
            *('{"model": "tiny"}'.encode(f"utf-16{end}") for end in ("", "-le", "-be")),
        ]:
            status, _, raw = await post(target.url, text, path)
            assert (status, "send UTF-8" in error_of(raw, path)["message"]) == (400, True), raw
        status, _, raw = await post(target.url, {**SMALL[path], "model": "gpt-9"}, path)
        assert status == 404, raw
        assert "GET /v1/models lists: tiny" in error_of(raw, path)["message"]
        assert worker.received == []


def error_of(raw: bytes, path: str) -> dict[str, Any]:
    """Return the error, in the shape of the route's API."""
    answer = json.loads(raw)
    error: dict[str, Any] = answer["error"]
    if path == "/v1/messages":
        assert (answer["type"], set(error)) == ("error", {"type", "message"}), raw
    else:
        assert (set(answer), set(error)) == ({"error"}, {"message", "type", "param", "code"}), raw
    return error


BAD = [
    (b"", None, 400),
    (b"{", None, 400),
    (b"[1]", None, 400),
    (b'{"model":"tiny","messages":[{"role":"user","content":"\\ud800"}]}', None, 400),
    (b'{"model":"tiny","messages":' + b"[" * 5000, "messages[0]", 400),
    (b'{"model":"tiny","metadata":' + b'{"a":' * 5000, "metadata", 400),
    (chat(logit_bias={"5": "x"}), "logit_bias", 400),
    (chat(metadata={"k" * 70: "v"}), "metadata", 400),
    (chat(metadata={"k": "v" * 600}), "metadata", 400),
    (b'{"model":"tiny","audio":' + b'{"a":' * 5000, None, 400),
    (chat(model="nope"), "model", 404),
    (chat(model=""), "model", 400),
    ({"model": "tiny"}, "messages", 400),
    (chat(messages=[]), "messages", 400),
    (chat(messages=[{"role": "wizard", "content": "x"}]), "messages[0].role", 400),
    (chat(messages=[{"role": "user"}]), "messages[0].content", 400),
    (chat(messages=[{"role": "user", "content": [{"type": "hologram"}]}]), "messages[0].content[0].type", 400),
    (chat(max_tokens=-1), "max_tokens", 400),
    (chat(max_tokens=0), "max_tokens", 400),
    (chat(max_tokens=10**6), "messages", 400),
    (chat(max_tokens=10**30), "max_tokens", 400),
    (chat(max_tokens="five"), "max_tokens", 400),
    (chat(temperature=2.5), "temperature", 400),
    (b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":1e309}', "temperature", 400),
    (b'{"model":"tiny","messages":[{"role":"user","content":"x"}],"temperature":NaN}', None, 400),
    (chat(top_logprobs="three"), "top_logprobs", 400),
    (chat(top_logprobs=3), "top_logprobs", 400),
    (chat(logit_bias={"foo": 0}), "logit_bias", 400),
    (chat(logit_bias={"99999": 0}), "logit_bias", 400),
    (chat(n=0), "n", 400),
    (chat(n=129), "n", 400),
    (chat(stop=["a"] * 33), "stop", 400),
    (chat(stop=[""]), "stop", 400),
    (chat(seed=2**63), "seed", 400),
    (chat(stream=False, stream_options={"include_usage": True}), "stream_options", 400),
    (chat(audio={"voice": "x"}), "audio", 400),
    (chat(web_search_options={}), "web_search_options", 400),
    (chat(modalities=["audio"]), "modalities", 400),
    (chat(tools=[], tool_choice="required"), "tool_choice", 400),
    (chat(tool_choice="required"), "tool_choice", 400),
    (chat(chat_template="{{ 1 }}"), "chat_template", 400),
    (chat(chat_template_kwargs={"messages": []}), "chat_template_kwargs", 400),
    (chat(response_format={"type": "json_schema"}), "response_format.json_schema", 400),
    (chat(response_format={"type": "xml"}), "response_format.type", 400),
    (chat(prompt_embeds="x"), "prompt_embeds", 400),
    (chat(messages=[{"role": "user", "content": "word " * 3000}]), "messages", 400),
]


@pytest.mark.parametrize("stream", [False, True])
async def test_bad_input_is_refused_before_any_200(worker: ScriptedWorker, stream: bool) -> None:
    async with gateway(worker) as target:
        for body, param, status in BAD:
            if isinstance(body, dict):
                body = {"stream": stream, **body}
            got, headers, raw = await post(target.url, body)
            error = json.loads(raw)["error"]
            assert (got, error["param"]) == (status, param), (body, error)
            assert set(error) == {"message", "type", "param", "code"}
            assert headers["content-type"] == "application/json"
        got, _, raw = await post(target.url, {"model": "tiny", "prompt": [9999]}, "/v1/completions")
        assert (got, json.loads(raw)["error"]["param"]) == (400, "prompt")
        for prompt in ("", [], None, [[]], [1, "x"], {"a": 1}, 3, [True]):
            got, _, raw = await post(target.url, {"model": "tiny", "prompt": prompt}, "/v1/completions")
            assert got == 400, prompt
    assert worker.received == []


async def test_context_length_error_has_its_code(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, chat(messages=[{"role": "user", "content": "word " * 3000}]))
    assert json.loads(raw)["error"]["code"] == "context_length_exceeded"
