"""Tools of a request: what the model sees, what its output is held to, and how its text is read.

tool_choice   the model sees      its text is read as
none          no tool             content
auto          tools, and is free  its family's format
required      tools, and a list   a list of calls
one function  its schema          that function's arguments

A response_format holds the answer. With tools in `auto` the model may call them instead: it is held to either the
format or to calls as its family writes them.
"""

from __future__ import annotations

import json
from typing import Any, Final

from server.api.sampling import grammar_of, grammar_param
from server.models import ServedModel
from server.schema.requests import ChatRequest
from server.text.output_parser import THINK, OutputRules, ReasoningStart
from worker.wire import Grammar

_SPACES: Final = {"whitespace_flexible": True, "whitespace_pattern": r"[\x20\x0A]{1,40}"}


def output_rules(request: ChatRequest, model: ServedModel, prompt: str) -> OutputRules:
    """Return how the model's text is read. `prompt` is the rendered text: it may have opened the reasoning already."""
    mode = request.tool_mode
    if mode == "named":
        return OutputRules(forced=request.named_tool.name)
    parallel = request.parallel_tool_calls is not False
    if mode == "required":
        return OutputRules(tools="list", parallel=parallel)
    reasoning: ReasoningStart = "none"
    if model.thinks and grammar_of(request.response_format, request.structured_outputs) is None:
        reasoning = "inside" if prompt.rstrip().endswith(THINK) else "maybe"
    if mode == "none":
        return OutputRules(reasoning=reasoning)
    names = frozenset(tool.name for tool in request.usable_tools)
    return OutputRules(reasoning=reasoning, tools=model.tool_format, tool_names=names, parallel=parallel)


def chat_grammar(request: ChatRequest, model: ServedModel) -> tuple[Grammar | None, str]:
    """Return what the whole output is held to, and the field to blame when that cannot be compiled."""
    mode = request.tool_mode
    if mode == "named":
        return Grammar("json_schema", json.dumps(request.named_tool.parameters)), "tools"
    if mode == "required":
        return Grammar("json_schema", json.dumps(_calls_schema(request, "parameters"))), "tools"
    answer = grammar_of(request.response_format, request.structured_outputs)
    if answer is None or mode == "none":
        return answer, grammar_param(request)
    return _answer_or_calls(answer, request, model), "response_format"


def _answer_or_calls(answer: Grammar, request: ChatRequest, model: ServedModel) -> Grammar:
    """Write llguidance's Lark. Source: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md"""
    schema = json.loads(answer.text) if answer.text else {"type": "object"}
    more = "" if request.parallel_tool_calls is False else "*"
    match model.tool_format:
        case "hermes":
            start, end = (_marker(model, marker) for marker in ("<tool_call>", "</tool_call>"))
            call = f'{start} "\\n" body "\\n" {end}'
            calls = f'call ("\\n" call){more}' if more else "call"
            body = _any_call(request, "arguments")
        case "llama3":
            call, calls, body = "body", 'call ("; " call)*' if more else "call", _any_call(request, "parameters")
        case "mistral":
            call, calls = "body", f"{_marker(model, '[TOOL_CALLS]')} call"
            body = _calls_schema(request, "arguments")
    lines = ["%llguidance {}", "start: answer | calls", f"answer: {_json_rule(schema)}"]
    return Grammar("grammar", "\n".join([*lines, f"calls: {calls}", f"call: {call}", f"body: {_json_rule(body)}", ""]))


def _marker(model: ServedModel, text: str) -> str:
    """Name a special token by its id: it has no bytes."""
    token_id = model.tokenizer.token_id(text)
    special = token_id is not None and token_id in model.tokenizer.token_bytes.special_ids
    return f"<[{token_id}]>" if special else json.dumps(text)


def _json_rule(schema: dict[str, Any]) -> str:
    return "%json " + json.dumps({**schema, "x-guidance": _SPACES})


def _calls_schema(request: ChatRequest, key: str) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": _any_call(request, key)}
    if request.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return schema


def _any_call(request: ChatRequest, key: str) -> dict[str, Any]:
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": tool.name}, key: tool.parameters},
            "required": ["name", key],
            "additionalProperties": False,
        }
        for tool in request.usable_tools
    ]
    return {"anyOf": calls}
