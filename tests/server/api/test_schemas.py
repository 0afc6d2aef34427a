"""JSON Schemas over the three chat APIs: references, what no grammar holds, and nesting."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest

from tests.schema_language import matcher, takes
from tests.server.gateway_app import gateway
from tests.server.schema.test_grammar_schema import REFUSED, RELAXED, SCHEMAS
from tests.server.scripted_worker import Says
from tests.server.test_app import MESSAGES, post
from worker.wire import Grammar

NESTED = {
    "type": "object",
    "properties": {"home": {"$ref": "#/$defs/Place"}, "inner": {"$ref": "#"}},
    "required": ["home"],
    "additionalProperties": False,
    "$defs": {"Place": {"type": "object", "properties": {"n": {"type": "integer"}}, "additionalProperties": False}},
}
GOOD = '{"home": {"n": 1}, "inner": {"home": {}}}'
BAD = ('{"home": {"n": "x"}}', '{"home": {}, "inner": {}}', '{"home": {}, "inner": 1}')
SET = {"type": "object", "properties": {"tags": {"type": "array", "uniqueItems": True}}}
APIS = ("chat", "responses", "messages")
PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}


def body(
    api: str, tool: Any = None, form: Any = None, choice: str | None = None, strict: bool | None = None
) -> dict[str, Any]:
    """A body with a tool `t`, a format, or both; `choice`: auto, required or named."""
    fields: dict[str, Any] = {"model": "tiny"}
    given = {} if strict is None else {"strict": strict}
    match api:
        case "chat":
            fields |= {"messages": MESSAGES}
            tools: Any = [{"type": "function", "function": {"name": "t", "parameters": tool, **given}}]
            choices: Any = {"named": {"type": "function", "function": {"name": "t"}}}
            formatted: Any = {"type": "json_schema", "json_schema": {"name": "f", "schema": form, **given}}
            formatted = {"response_format": formatted}
        case "responses":
            fields |= {"input": "x"}
            tools = [{"type": "function", "name": "t", "parameters": tool, **given}]
            choices = {"named": {"type": "function", "name": "t"}}
            formatted = {"text": {"format": {"type": "json_schema", "name": "f", "schema": form, **given}}}
        case _:
            fields |= {"messages": MESSAGES, "max_tokens": 9}
            tools = [{"name": "t", "input_schema": tool, **given}]
            choices = {"named": {"type": "tool", "name": "t"}, "required": {"type": "any"}, "auto": {"type": "auto"}}
            formatted = {"output_config": {"format": {"type": "json_schema", "schema": form}}}
    if tool is not None:
        fields |= {"tools": tools}
    if form is not None:
        fields |= formatted
    return fields if choice is None else fields | {"tool_choice": choices.get(choice, choice)}


@pytest.mark.parametrize("api", APIS)
async def test_a_forced_call_fits_its_schema_whatever_forces_it(says: Says, api: str) -> None:
    worker = says("{}")
    forms = {
        "named": "%s",
        "required": '[{"name": "t", "parameters": %s}]',
        "auto": '<tool_call>\n{"name": "t", "arguments": %s}\n</tool_call>',
    }
    async with gateway(worker) as target:
        for choice, form in forms.items():
            answer = {"type": "object", "properties": {"a": {"$ref": "#"}}, "additionalProperties": False}
            given = body(api, NESTED, answer if choice == "auto" else None, choice)
            status, headers, raw = await post(target.url, given, PATHS[api])
            assert status == 200, raw
            assert "x-headstart-relaxed" not in headers
            grammar = worker.received[-1].sampling.grammar
            assert grammar is not None
            if choice == "auto":  # the tokenizer of this test has no special tokens
                grammar = Grammar(grammar.kind, _with_markers_as_text(grammar.text))
            start = matcher(grammar)
            assert takes(start, form % GOOD), (choice, grammar.text)
            assert not any(takes(start, form % bad) for bad in BAD), choice
            if choice == "auto":
                assert takes(start, '{"a": {"a": {}}}')
                assert not takes(start, '{"a": {"a": 1}}')


def _with_markers_as_text(lark: str) -> str:
    lines = [
        'call: "<tool_call>" "\\n" body "\\n" "</tool_call>"' if line.startswith("call: ") else line
        for line in lark.splitlines()
    ]
    return "\n".join(lines)


PLACES = {
    "chat": ("tools[t].function.parameters", "response_format.json_schema.schema"),
    "responses": ("tools[t].parameters", "text.format.schema"),
    "messages": ("tools[t].input_schema", "output_config.format.schema"),
}


@pytest.mark.parametrize("api", APIS)
async def test_what_no_grammar_holds_is_named_and_refused_with_strict(says: Says, api: str) -> None:
    worker = says("{}")
    tool_place, format_place = (f"{place}.properties.tags.uniqueItems" for place in PLACES[api])
    async with gateway(worker) as target:
        for choice in ("named", "required"):
            for stream in (False, True):
                given = body(api, SET, choice=choice, strict=False) | {"stream": stream}
                status, headers, raw = await post(target.url, given, PATHS[api])
                assert (status, headers["x-headstart-relaxed"]) == (200, tool_place), raw
        _, headers, _ = await post(target.url, body(api, SET, SET, "auto"), PATHS[api])
        assert headers["x-headstart-relaxed"] == f"{format_place}, {tool_place}"
        num_served = len(worker.received)
        for choice in ("named", "required", "auto"):
            status, _, raw = await post(target.url, body(api, SET, choice=choice, strict=True), PATHS[api])
            assert status == 400
            assert f"{tool_place} cannot be enforced by a grammar" in json.loads(raw)["error"]["message"]
        if api != "messages":
            status, _, raw = await post(target.url, body(api, form=SET, strict=True), PATHS[api])
            assert (status, json.loads(raw)["error"]["param"]) == (400, format_place)
        assert len(worker.received) == num_served


@pytest.mark.parametrize("limit", [3.4028234663852886e38, 1.7976931348623157e308])
@pytest.mark.parametrize("api", APIS)
async def test_limits_of_a_float_are_taken_with_strict(says: Says, api: str, limit: float) -> None:
    """zod writes them for `z.float32()` and `z.float64()`: they are the type, and named all the same."""
    number = {"type": "number", "minimum": -limit, "maximum": limit}
    schema = {"type": "object", "properties": {"x": number}, "required": ["x"], "additionalProperties": False}
    async with gateway(says('{"x": 1}')) as target:
        status, headers, raw = await post(target.url, body(api, schema, choice="named", strict=True), PATHS[api])
        assert status == 200, raw
        assert ".properties.x.minimum, " in headers["x-headstart-relaxed"]
        schema["properties"]["x"] = number | {"maximum": 2**53 + 1}
        status, _, raw = await post(target.url, body(api, schema, choice="named", strict=True), PATHS[api])
        assert (status, "properties.x.maximum" in raw.decode()) == (400, True)


@pytest.mark.parametrize("api", APIS)
async def test_a_tool_that_the_model_may_leave_is_never_compiled(says: Says, api: str) -> None:
    worker = says("x")
    broken = {"type": "object", "properties": {"a": {"$ref": "#/nowhere"}, "b": {"type": "bogus", "not": 1}}}
    async with gateway(worker) as target:
        status, headers, raw = await post(target.url, body(api, broken), PATHS[api])
        assert status == 200, raw
        assert "x-headstart-relaxed" not in headers
        assert worker.received[-1].sampling.grammar is None
        status, headers, raw = await post(target.url, body(api, broken, choice="required"), PATHS[api])
        assert (status, headers["x-headstart-relaxed"]) == (200, f"{PLACES[api][0]}.properties.a.$ref"), raw
        assert worker.received[-1].sampling.grammar is not None


@pytest.mark.parametrize("api", APIS)
async def test_objects_nest_forty_deep(says: Says, api: str) -> None:
    worker = says("{}", max_model_len=8192)
    schema: dict[str, Any] = {"type": "integer"}
    text = "1"
    for _ in range(40):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"], "additionalProperties": False}
        text = '{"a": %s}' % text  # noqa: UP031
    async with gateway(worker) as target:
        for choice, form in (("named", "%s"), ("required", '[{"name": "t", "parameters": %s}]')):
            status, _, raw = await post(target.url, body(api, schema, choice=choice), PATHS[api])
            assert status == 200, raw
            grammar = worker.received[-1].sampling.grammar
            assert grammar is not None
            assert takes(matcher(grammar), form % text)


@pytest.mark.parametrize("api", APIS)
async def test_ordinary_types_are_taken_or_refused_by_name(says: Says, api: str) -> None:
    """Every schema, as a named tool, as a required call and as a format, strict and not."""
    worker = says("{}", max_model_len=8192)
    async with gateway(worker) as target:
        for (name, schema), strict in itertools.product(SCHEMAS.items(), (False, True)):
            is_object = schema.get("type", "" if api == "messages" else "object") == "object"
            choices = ("named", "required") if is_object else ()  # arguments are an object
            bodies = [body(api, schema, choice=choice, strict=strict) for choice in choices]
            if api != "messages" or not strict:
                bodies.append(body(api, form=schema, strict=strict))
            for given in bodies:
                status, headers, raw = await post(target.url, given, PATHS[api])
                is_refused = strict and name in REFUSED
                assert status == (400 if is_refused else 200), (name, raw)
                assert (REFUSED[name].encode() if is_refused else b"") in raw
                relaxed = headers.get("x-headstart-relaxed", "")
                assert bool(relaxed) == (name in RELAXED or (name in REFUSED and not strict)), (name, relaxed)


async def test_schemas_of_outputs_and_completions_are_relaxed_too(says: Says) -> None:
    worker = says("{}")
    async with gateway(worker) as target:
        for schema in (SET, json.dumps(SET)):
            given = {"model": "tiny", "prompt": "x", "structured_outputs": {"json": schema}}
            status, headers, _ = await post(target.url, given, "/v1/completions")
            place = "structured_outputs.json.properties.tags.uniqueItems"
            assert (status, headers["x-headstart-relaxed"]) == (200, place)
