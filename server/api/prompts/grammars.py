"""The grammars of answers: a format, a list of calls, or either of both.

A tool's schema becomes a definition of a larger schema, and its references point into it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from server.models.served_model import ServedModel
from server.schema.decoding import decode_object, invalid
from server.schema.fields import FunctionDefinition, ResponseFormat, StructuredOutputs
from server.schema.grammar_schema import grammar_schema
from server.schema.intent import ChatIntent
from server.text.formats.base import GrammarTools, ToolFormat, json_rule
from server.text.formats.grammar import list_schema, text_rule
from server.text.output_parser import OutputRules
from worker.wire import Grammar

MAX_SCHEMA_BYTES: Final = 1 << 20
"""The limit for a schema, or for all tools: templates and grammars write them in one go."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """The constraint on an output."""

    grammar: Grammar | None
    param: str = ""
    """The field to name when no worker can compile the grammar."""
    relaxed: tuple[str, ...] = ()
    """The fields of schemas that no grammar enforces: the model may ignore them."""


def has_format(formatted: ResponseFormat | None, structured: StructuredOutputs | None) -> bool:
    """Return whether a format constrains the answer."""
    return structured is not None or (formatted is not None and formatted.type != "text")


async def answer_grammar(
    formatted: ResponseFormat | None, structured: StructuredOutputs | None, format_param: str = "response_format"
) -> Constraint:
    """Return the grammar of a format; at most one of both is given. `format_param` names the format's field.

    Raises InvalidRequestError.
    """
    kind: Any = "json_schema"
    schema: dict[str, Any] | None = None
    param, text, strict, compact = format_param, "", False, False
    if structured is not None:
        param, [name], compact = "structured_outputs", structured.given(), bool(structured.disable_any_whitespace)
        kind, schema_param, value = kind if name == "json" else name, f"{param}.json", getattr(structured, name)
        if kind != "json_object":
            text = value if isinstance(value, str) else msgspec.json.encode(value).decode()
            _check_size(text, param)
        schema = decode_object(text, schema_param) if name == "json" else None  # the compiler reports what is none
    elif formatted is not None and (given := formatted.given_schema) is not None:
        field, schema = given
        schema_param = f"{param}.{field}" if param == "response_format" else f"{param}.schema"
        _check_size(msgspec.json.encode(schema).decode(), schema_param)
        strict = formatted.json_schema is not None and formatted.json_schema.strict is True
    elif formatted is not None and formatted.type == "json_object":
        kind = "json_object"
    else:
        return Constraint(None, param)
    if schema is None:
        return Constraint(Grammar(kind, text, compact), param)
    checked = await grammar_schema(schema, schema_param, strict=strict)
    written = json.dumps(checked.schema, ensure_ascii=False, separators=(",", ":"))
    return Constraint(Grammar(kind, written, compact), param, checked.relaxed)


async def chat_grammar(intent: ChatIntent, model: ServedModel, rules: OutputRules) -> Constraint:
    """Return the constraint on the whole output of a chat. `rules` read it. Raises InvalidRequestError.

    With tools in `auto` and a format, the answer is in the format or consists of the family's calls.
    With tools in `auto` and no format there is no grammar: schemas are not compiled, and strict ones are checked.
    """
    named, asked = intent.named_tool, intent.conversation.tools
    if named is not None and (own := intent.tool_set.grammars.get(named.name)) is not None:
        return Constraint(own, "tools")
    answer = Constraint(None, "tools")
    if is_free := intent.tool_mode in ("none", "auto"):
        structured, param = intent.fields.structured_outputs, intent.names.response_format
        answer = await answer_grammar(intent.response_format, structured, param)
        if intent.tool_mode == "none":
            return answer
        if answer.grammar is None:
            asked = [tool for tool in asked if tool.strict]
    forms = await _forms((named,) if named is not None else asked, intent, model)
    if is_free:
        grammar = None if answer.grammar is None else _answer_or_calls(answer.grammar, forms, model)
    elif model.forced_format is not None:
        grammar = _forced_calls(model.forced_format, forms, rules)
    elif named is not None:
        grammar = Grammar("json_schema", json.dumps(forms.definitions[named.name]))
    else:
        schema = list_schema(forms, "parameters") | {"$defs": forms.definitions, "x-guidance": {"lenient": True}}
        grammar = Grammar("json_schema", json.dumps(schema))
    relaxed = dict.fromkeys(forms.relaxed if grammar is not None else ())  # rules name some that the check has named
    return Constraint(grammar, answer.param, (*answer.relaxed, *relaxed))


async def _forms(tools: Sequence[FunctionDefinition], intent: ChatIntent, model: ServedModel) -> GrammarTools:
    """Check the tools' schemas. Each becomes a definition under its tool's name. Raises InvalidRequestError."""
    definitions, relaxed = dict[str, Any](), list[str]()
    fields = {tool.name: f"tools[{tool.name}].{intent.names.tool_schema}" for tool in tools}
    for tool in tools:
        checked = await grammar_schema(
            tool.arguments_schema, fields[tool.name], strict=bool(tool.strict), name=tool.name
        )
        definitions[tool.name] = checked.schema
        relaxed += checked.relaxed
    parameters = {tool.name: tool.arguments_schema for tool in tools}
    parallel = intent.parallel_tool_calls and intent.named_tool is None
    return GrammarTools(parameters, definitions, fields, relaxed, parallel, model.tokenizer)


def _answer_or_calls(answer: Grammar, forms: GrammarTools, model: ServedModel) -> Grammar:
    """Allow the format or calls. If the form of calls is unknown, allow only the format."""
    schema = json.loads(answer.text) if answer.text else {"type": "object"}
    if model.tool_format is None:
        return answer
    lines = ["start: answer | calls", f"answer: {json_rule(schema)}", *model.tool_format.rules(forms)]
    return _lark(lines)


def _forced_calls(tools: ToolFormat, forms: GrammarTools, rules: OutputRules) -> Grammar:
    """Take calls in the family's own form, after its reasoning."""
    lines = tools.rules(forms)
    if rules.reasoning == "none":
        return _lark(["start: calls", *lines])
    thoughts = rules.thoughts
    thought = r"thought /\s*/"
    if rules.reasoning == "maybe":
        thought = f"(({' | '.join(map(forms.literal, thoughts.starts))}) {thought})?"
    first = f"start: {thought} calls"
    return _lark([first, text_rule("thought", thoughts.ends[0], forms), *lines])


def _lark(lines: Sequence[str]) -> Grammar:
    """Source of the dialect: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md"""
    return Grammar("grammar", "\n".join(["%llguidance {}", *lines, ""]))


def _check_size(written: str, param: str) -> None:
    """Raises InvalidRequestError."""
    if len(written) > MAX_SCHEMA_BYTES:
        raise invalid(param, f"takes at most {MAX_SCHEMA_BYTES} characters of JSON")
