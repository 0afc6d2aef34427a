"""Tools of a request: how the model is told of them, what it is held to, and how its text is read.

tool_choice   the model is          its text is read as
none          told of no tool       content
auto          free                  its family's format
required      held to a list        list
one function  held to its schema    that function's arguments
"""

from __future__ import annotations

import json
from typing import Any, Final

from server.models import ServedModel
from server.openai_types import ChatRequest, NamedTool, Tool
from server.parsing.output import THINK, OutputRules, ReasoningStart
from worker.wire import Grammar


def output_rules(request: ChatRequest, model: ServedModel, prompt: str) -> OutputRules:
    """`prompt` is the rendered text: it may have opened the model's thoughts already."""
    reasoning = _reasoning(model, prompt)
    choice = request.tool_choice
    if not request.tools or choice == "none":
        return OutputRules(reasoning=reasoning)
    parallel = request.parallel_tool_calls is not False
    if isinstance(choice, NamedTool):
        assert choice.function is not None, "checked with the request"
        return OutputRules(forced=choice.function.name)
    if choice == "required":
        return OutputRules(tools="list", parallel=parallel)
    names = frozenset(tool.function.name for tool in request.tools if tool.function is not None)
    return OutputRules(reasoning=reasoning, tools=model.tool_format, tool_names=names, parallel=parallel)


def tool_grammar(request: ChatRequest) -> Grammar | None:
    """What a forced call has to look like."""
    choice = request.tool_choice
    if not request.tools or choice is None or choice in ("none", "auto"):
        return None
    if isinstance(choice, NamedTool):
        named = next(tool for tool in request.tools if _name(tool) == (choice.function and choice.function.name))
        return Grammar("json_schema", json.dumps(_parameters(named)))
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": [_call(t) for t in request.tools]}}
    if request.parallel_tool_calls is False:
        schema["maxItems"] = 1
    return Grammar("json_schema", json.dumps(schema))


def _reasoning(model: ServedModel, prompt: str) -> ReasoningStart:
    if not model.thinks:
        return "none"
    return "inside" if prompt.rstrip().endswith(THINK) else "maybe"


def _name(tool: Tool) -> str:
    assert tool.function is not None, "checked with the request"
    return tool.function.name


_ANY_OBJECT: Final[dict[str, Any]] = {"type": "object"}


def _parameters(tool: Tool) -> dict[str, Any]:
    assert tool.function is not None, "checked with the request"
    return tool.function.parameters or _ANY_OBJECT


def _call(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": _name(tool)}, "parameters": _parameters(tool)},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }
