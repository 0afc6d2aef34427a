"""Write the grammar of calls in a family's own form, from the row that its reader has too.

Source of the dialect: https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from server.schema.grammar_schema import field_step
from server.text.formats.arguments import Tags, referred, types_of
from server.text.formats.base import GrammarTools
from server.text.formats.calls import Syntax

_TEXT_KEYWORDS: Final = ("pattern", "format", "minLength", "maxLength", "anyOf", "oneOf", "allOf", "$ref")
"""No rule holds a text between tags to these."""
_OPEN_SCHEMA: Final = ("anyOf", "oneOf", "allOf", "$ref", "additionalProperties", "patternProperties")


def call_rules(syntax: Syntax, tools: GrammarTools) -> list[str]:
    """Return rules; the first is named `calls`."""
    form, names = syntax.form, list(tools.parameters)
    if form.is_list:
        body = tools.json(list_schema(tools, form.arguments_key))
        return [f"calls: {_around(tools, form.call, 'body')}", f"body: {body}"]
    separator = tools.literal(form.separator)
    calls = f"call ({separator} call)*" if tools.parallel else "call"
    lines = [f"calls: {tools.literal(form.section[0])} {calls} {tools.literal(form.section[1])}"]
    if syntax.arguments == "object":
        body = tools.json(_any_call(tools, form.arguments_key))
        return [*lines, f"call: {_around(tools, form.call, 'body')}", f"body: {body}"]
    lines.append(f"call: {' | '.join(f'call_{number}' for number in range(len(names)))}")
    for number, name in enumerate(names):
        before, after, end = form.call
        arguments = f"arguments_{number}"
        lines.append(f"call_{number}: {_around(tools, (before + name + after, '', end), arguments)}")
        if syntax.tags is not None or syntax.arguments == "python":
            lines += _Arguments(syntax, tools, name, arguments).rules()
        else:
            lines.append(f"{arguments}: {tools.json(tools.ref(name))}")
    return lines


def text_rule(name: str, end: str, tools: GrammarTools) -> str:
    """Return the rule of any text up to a marker, and the marker. A grammar has no bytes for an added token."""
    literal = tools.literal(end.lstrip())  # the text may end with the line break that a reader drops
    if literal.startswith("<["):
        return f"{name}: /(?s:.*)/ {literal}"
    return f"{name}[suffix={json.dumps(end)}]: /(?s:.*)/"


class _Arguments:
    """The rules of one tool's arguments, which come in the order of the schema."""

    def __init__(self, syntax: Syntax, tools: GrammarTools, tool: str, rule: str) -> None:
        self._syntax = syntax
        self._tools = tools
        self._tool = tool
        self._rule = rule
        schema = tools.parameters[tool]
        properties = schema.get("properties")
        self._schema = schema
        self._properties: Mapping[str, Any] = properties if isinstance(properties, Mapping) else {}
        self._is_open = not self._properties and any(schema.get(key) for key in _OPEN_SCHEMA)
        required = schema.get("required")
        self._required = frozenset(map(str, required)) if isinstance(required, list) else frozenset()
        self._lines: list[str] = []

    def rules(self) -> list[str]:
        if self._syntax.tags is not None:
            return self._tag_rules(self._syntax.tags)
        names = [f"{self._rule}_{number}" for number in range(len(self._properties))]
        literal = self._tools.literal
        for name, key in zip(names, self._properties, strict=True):
            self._add(name, f"{literal(f'{key}=')} {self._value(name, key)}")
        return [f"{self._rule}: {self._chain(names, literal(', '))}", *self._lines]

    def _add(self, name: str, body: str) -> str:
        """Add a rule. Return its name."""
        self._lines.append(f"{name}: {body}")
        return name

    def _chain(self, names: Sequence[str], separator: str) -> str:
        """Return the body of arguments with a separator between them, some of which may be left out."""
        first, more = '""', '""'
        for name, key in reversed(list(zip(names, self._properties, strict=True))):
            others = self._add(f"{name}_more", more)
            with_it = f"{name} {others}"
            is_optional = key not in self._required
            first = f"{with_it} | {first}" if is_optional else with_it
            more = f"{separator} {with_it} | {others}" if is_optional else f"{separator} {with_it}"
        return f"({first})"

    def _value(self, name: str, key: str) -> str:
        is_python = self._syntax.tags is None
        if is_python and types_of(self._schema, key) == {"boolean"}:
            return '("True" | "False")'
        return self._add(f"{name}_value", self._tools.json(self._tools.ref(self._tool, "properties", key)))

    def _text(self, name: str, key: str, end: str) -> str:
        """Add the rule of a text that ends with a marker. Return its name."""
        own = self._properties.get(key)
        own = own if isinstance(own, Mapping) else {}
        target = referred(own, self._schema)
        values = {**target, **own} if isinstance(target, Mapping) else own
        options = values.get("enum", [values["const"]] if "const" in values else None)
        if isinstance(options, list) and options and all(isinstance(option, str) for option in options):
            return self._add(name, " | ".join(self._tools.literal(option + end) for option in options))
        steps = [("properties", key, keyword) for keyword in _TEXT_KEYWORDS if keyword in own]
        field = self._tools.fields[self._tool]
        self._tools.relaxed.extend(field + "".join(map(field_step, path)) for path in steps)
        self._lines.append(text_rule(name, end, self._tools))
        return name

    def _tag_rules(self, tags: Tags) -> list[str]:
        around = tags.line if tags.trims else ""
        between = tags.line + tags.value[0] if tags.value[0] else ""
        end, parts = around + tags.value[1], []
        for number, key in enumerate(self._properties):
            name = f"{self._rule}_{number}"
            before = self._tools.literal(tags.key[0] + key + tags.key[1] + between + around)
            if types_of(self._schema, key) == {"string"}:
                value = self._text(f"{name}_value", key, end)
            else:
                value = f"{self._value(name, key)} {self._tools.literal(end)}"
            self._add(name, f"{before} {value} {self._tools.literal(tags.line)}")
            parts.append(name + ("" if key in self._required else "?"))
        if self._is_open:
            name = f"{self._rule}_any"
            closing = self._tools.literal(tags.key[1] + between + around)
            line = f"{self._tools.literal(tags.key[0])} /[A-Za-z_][A-Za-z0-9_]*/ {closing} {name}_value"
            self._add(name, f"{line} {self._tools.literal(tags.line)}")
            self._lines.append(text_rule(f"{name}_value", end, self._tools))
            parts.append(f"{name}*")
        body = " ".join(parts) or '""'
        return [f"{self._rule}: {body}", *self._lines]


def list_schema(tools: GrammarTools, key: str) -> dict[str, Any]:
    """Return the schema of a list of call objects, each with its arguments under a key."""
    most = {} if tools.parallel else {"maxItems": 1}
    return {"type": "array", "minItems": 1, "items": _any_call(tools, key), **most}


def _any_call(tools: GrammarTools, key: str) -> dict[str, Any]:
    """Return the schema of a call object."""
    objects = [{"name": {"const": name}, key: tools.ref(name)} for name in tools.parameters]
    closed = {"type": "object", "required": ["name", key], "additionalProperties": False}
    return {"anyOf": [{**closed, "properties": properties} for properties in objects]}


def _around(tools: GrammarTools, texts: tuple[str, str, str], rule: str) -> str:
    return " ".join(filter(None, (tools.literal(texts[0] + texts[1]), rule, tools.literal(texts[2]))))
