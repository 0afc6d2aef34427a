"""The tools of a request: as the client offers them and as the model sees them, with the client's names.

function    a function, under its own name
custom      a function with one text argument, `input`
namespace   its tools, as functions named NAMESPACE__NAME
any other   a tool that only its vendor's server, or a model trained on it, can use: left out and named
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final, Literal, TypeVar

import msgspec
from msgspec import Struct

from server.errors import InvalidRequestError
from server.schema.decoding import invalid, located, unsupported
from server.schema.fields import MAX_TOOLS, FunctionCall, FunctionDefinition
from worker.wire import Grammar

ToolMode = Literal["none", "auto", "required", "named"]
ToolKind = Literal["function", "custom"]
INPUT: Final = "input"
"""The one argument of a custom tool."""
_PAYLOAD: Final = "The freeform text payload for this tool."  # as vLLM describes it
_MAX_MODEL_NAME: Final = 64  # OpenAI's limit for a function's name
_NAME: Final = re.compile(r"[A-Za-z0-9_-]{1,128}")
_NAME_WITHIN: Final = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
"""The pattern of a namespace and of its tools: the model sees another name anyway."""
_CANNOT_RUN: Final = "a tool that this server cannot run: give it as a function with a schema"
_KINDS: Final[dict[str, ToolKind]] = {"function": "function", "custom": "custom"}
_MODES: Final[dict[str, ToolMode]] = {"none": "none", "auto": "auto", "required": "required"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ToolName:
    """The client's name of a tool."""

    name: str
    kind: ToolKind = "function"
    namespace: str | None = None


@dataclass(frozen=True, slots=True)
class Ignored:
    """A part of a request that only another server or model could use. It is left out of the prompt."""

    type: str
    field: str
    name: str | None = None
    is_block: bool = False
    """A part that a model of text cannot read. A line of text replaces it."""


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The use that the model has to make of the tools."""

    mode: ToolMode = "none"
    names: Collection[ToolName] | None = None
    """The tools that it may call; None: all. With the mode `named` the one that it has to call."""


class GrammarDefinition(Struct, kw_only=True):
    syntax: Literal["lark", "regex"]
    definition: str


class CustomFormat(Struct, kw_only=True):
    """A format. Its grammar is a field of its own (chat) or next to its type (responses)."""

    type: Literal["text", "grammar"]
    grammar: GrammarDefinition | None = None
    syntax: Literal["lark", "regex"] | None = None
    definition: str | None = None

    def given(self, path: str) -> Grammar | None:
        """Raises InvalidRequestError; `path` is the format's."""
        if self.type == "text":
            return None
        given = self.grammar or self
        if given.syntax is None or given.definition is None:
            raise invalid(path, "of type grammar needs syntax (lark or regex) and definition")
        return Grammar("grammar" if given.syntax == "lark" else "regex", given.definition)


class ToolDefinition(FunctionDefinition, kw_only=True):
    """The fields of a function or a custom tool that are read."""

    format: CustomFormat | None = None
    allowed_callers: list[str] | None = None


class ToolNamespace(Struct, kw_only=True):
    name: str
    description: str | None = None
    tools: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class ToolSpec:
    """A tool that the model can call."""

    field: str
    name: ToolName
    definition: ToolDefinition
    grammar: Grammar | None = None
    preface: str = ""
    """The description of its namespace, if this is the first tool in it."""

    def function(self, model_name: str) -> FunctionDefinition:
        """Return the tool as the model sees it."""
        given = self.definition
        parts, parameters = [self.preface, given.description or ""], given.parameters
        if self.name.kind == "custom":
            text: dict[str, Any] = {"type": "string", "description": _PAYLOAD}
            if self.grammar is not None:
                syntax = "regex" if self.grammar.kind == "regex" else "lark"
                parts.append(f"`{INPUT}` is text of this {syntax} grammar:\n{self.grammar.text}")
                if syntax == "regex":
                    text["pattern"] = f"^(?:{self.grammar.text})$"
            parameters = {
                "type": "object",
                "properties": {INPUT: text},
                "required": [INPUT],
                "additionalProperties": False,
            }
        description = "\n\n".join(filter(None, parts)) or given.description
        return FunctionDefinition(name=model_name, description=description, parameters=parameters, strict=given.strict)


@dataclass(frozen=True, slots=True)
class ToolSet:
    """The tools of one request."""

    tools: tuple[FunctionDefinition, ...] = ()
    """As the model sees them."""
    names: Mapping[str, ToolName] = field(default_factory=dict)
    """The client's names, by the model's."""
    grammars: Mapping[str, Grammar] = field(default_factory=dict)
    """The grammars of custom tools, by the model's names."""
    ignored: tuple[Ignored, ...] = ()
    model_names: Mapping[ToolName, str] = field(default_factory=dict)

    def model_name(self, name: ToolName) -> str:
        """Return the model's name of a client's tool, even of one that is no longer offered."""
        other: ToolKind = "custom" if name.kind == "function" else "function"
        for known in (name, ToolName(name.name, other, name.namespace)):
            if known in self.model_names:
                return self.model_names[known]
        return joined_name(name)

    def call(self, name: ToolName, text: str | None) -> FunctionCall:
        """Return a call as the model has written it. `text`: its arguments, or the input of a custom tool."""
        arguments = json.dumps({INPUT: text}, ensure_ascii=False) if name.kind == "custom" else text
        return FunctionCall(name=self.model_name(name), arguments=arguments)

    def chosen(self, use: ToolUse) -> tuple[ToolMode, tuple[FunctionDefinition, ...], FunctionDefinition | None]:
        """Return the mode that is possible, the tools that the model sees, and the one that it has to call.

        Raises InvalidRequestError for a use that needs a missing tool.
        """
        for name in use.names or ():
            self._check_present(name)
        nothing_usable = not self.tools or (use.names is not None and not use.names)
        if use.mode == "none":  # shown all the same: the prompt keeps the prefix of the turns before
            return "none", self.tools, None
        if use.mode == "auto" and nothing_usable:
            return "none", (), None
        if nothing_usable:
            if self.ignored:
                types = ", ".join(dict.fromkeys(each.type for each in self.ignored))
                raise unsupported("tool_choice", f"asks for a call, and this server cannot run {types}")
            raise invalid("tool_choice", "needs tools")
        if use.names is None:
            return use.mode, self.tools, None
        shown = {self.model_names[name] for name in use.names}
        chosen = tuple(tool for tool in self.tools if tool.name in shown)
        return (use.mode, self.tools, chosen[0]) if use.mode == "named" else (use.mode, chosen, None)

    def _check_present(self, name: ToolName) -> None:
        """Raises InvalidRequestError unless the model can call the tool."""
        if name in self.model_names:
            return
        for each in self.ignored:
            if each.name == name.name:
                raise unsupported("tool_choice", f"names {each.type}, {_CANNOT_RUN}")
        raise invalid("tool_choice", "names a function that is not among the tools")


def read_tools(given: Sequence[dict[str, Any]], *, nested: bool, path: str = "tools") -> list[ToolSpec | Ignored]:
    """Read OpenAI's tools. `nested`: a definition is under the tool's type, as in chats. Raises InvalidRequestError."""
    read: list[ToolSpec | Ignored] = []
    for index, tool in enumerate(given):
        param = f"{path}[{index}]"
        if tool.get("type") != "namespace":
            read.append(read_tool(tool, param, nested=nested))
            continue
        space = converted(tool, ToolNamespace, param)
        _check_name(space.name, f"{param}.name", _NAME_WITHIN)
        preface = f"{space.name}: {space.description}" if space.description else ""
        for number, inner in enumerate(space.tools):
            spec = read_tool(inner, f"{param}.tools[{number}]", nested=nested, namespace=space.name, preface=preface)
            preface = preface if isinstance(spec, Ignored) else ""
            read.append(spec)
    return read


def read_tool(
    tool: dict[str, Any], param: str, *, nested: bool, namespace: str | None = None, preface: str = ""
) -> ToolSpec | Ignored:
    """Read one tool. Raises InvalidRequestError."""
    written = tool.get("type")
    if not isinstance(written, str) or not written:
        raise invalid(f"{param}.type", "is required, and is a string")
    kind = _KINDS.get(written)
    if kind is None:
        name = tool.get("name")
        return Ignored(written, f"{param}.type", name if isinstance(name, str) else None)
    tool, param = _inner(tool, kind, param, nested=nested)
    if not tool:
        raise invalid(param, "is required")
    definition = converted(tool, ToolDefinition, param)
    _check_name(definition.name, f"{param}.name", _NAME if namespace is None else _NAME_WITHIN)
    callers = definition.allowed_callers
    if callers and "direct" not in callers:
        return Ignored(callers[0], f"{param}.allowed_callers", definition.name)
    form = definition.format if kind == "custom" else None
    grammar = None if form is None else form.given(f"{param}.format")
    if (definition.parameters or {}).get("type", "object") != "object":
        raise invalid(f"{param}.parameters", "must be a JSON schema with type: object")
    return ToolSpec(param, ToolName(definition.name, kind, namespace), definition, grammar, preface)


def make_tool_set(read: Sequence[ToolSpec | Ignored]) -> ToolSet:
    """Give each tool a name of its own for the model. Raises InvalidRequestError."""
    if len(read) > MAX_TOOLS:
        raise invalid("tools", f"take at most {MAX_TOOLS} tools")
    specs: dict[ToolName, ToolSpec] = {}
    for spec in read:
        if isinstance(spec, Ignored):
            continue
        first = specs.setdefault(spec.name, spec)
        if first.definition != spec.definition:
            why = f"is the name of {first.field} too, which differs: give each tool a name of its own"
            raise invalid(f"{spec.field}.name", why)
    names = {name.name: name for name in specs if name.namespace is None and name.kind == "function"}
    for name in specs:
        if names.get(name.name) != name:
            names[_free_name(joined_name(name), names)] = name
    model_names = {name: model_name for model_name, name in names.items()}
    return ToolSet(
        tools=tuple(spec.function(model_names[name]) for name, spec in specs.items()),
        names=names,
        grammars={model_names[name]: spec.grammar for name, spec in specs.items() if spec.grammar is not None},
        ignored=tuple(each for each in read if isinstance(each, Ignored)),
        model_names=model_names,
    )


def joined_name(name: ToolName) -> str:
    """Return the model's name of a tool if it is unique: NAMESPACE__NAME, in at most 64 characters."""
    if name.namespace is None:
        return name.name
    text = re.sub(r"[^A-Za-z0-9_-]", "_", f"{name.namespace.rstrip('_')}__{name.name}")
    if len(text) <= _MAX_MODEL_NAME:
        return text
    digest = blake2b(f"{name.namespace}\0{name.name}".encode(), digest_size=4).hexdigest()
    return f"{text[: _MAX_MODEL_NAME - len(digest) - 1]}_{digest}"


def _free_name(text: str, taken: Collection[str]) -> str:
    number, free = 1, text
    while free in taken:
        number += 1
        free = f"{text[: _MAX_MODEL_NAME - 5]}_{number}"
    return free


class AllowedTools(Struct, kw_only=True):
    mode: Literal["auto", "required"] | None = None
    tools: list[dict[str, Any]]


def read_choice(choice: str | dict[str, Any] | None, tool_set: ToolSet, *, nested: bool) -> ToolUse:
    """Read OpenAI's `tool_choice`. Raises InvalidRequestError."""
    match choice:
        case None:
            return ToolUse("auto" if tool_set.tools else "none")
        case str(mode) | {"type": str(mode)} if mode in _MODES:
            return ToolUse(_MODES[mode])
        case str():
            pass
        case {"type": "allowed_tools"}:
            param = "tool_choice.allowed_tools" if nested else "tool_choice"
            allowed = converted(choice.get("allowed_tools") or {} if nested else choice, AllowedTools, param)
            if not 1 <= len(allowed.tools) <= MAX_TOOLS:
                raise invalid(f"{param}.tools", f"holds 1 to {MAX_TOOLS} tools")
            return ToolUse(allowed.mode or "auto", list(_allowed(allowed, tool_set, param, nested=nested)))
        case {"type": "function" | "custom"}:
            return ToolUse("named", [_named(choice, "tool_choice", nested=nested)])
        case {"type": str(kind)} if kind not in ("any", "tool"):  # which Anthropic writes as objects
            raise unsupported("tool_choice.type", f"is {kind[:64]!r}, {_CANNOT_RUN}")
    raise invalid("tool_choice", "is none, auto, required, one function or custom tool, or allowed_tools")


def _allowed(allowed: AllowedTools, tool_set: ToolSet, param: str, *, nested: bool) -> Iterator[ToolName]:
    types = {each.type for each in tool_set.ignored}
    for index, tool in enumerate(allowed.tools):
        kind, path = tool.get("type"), f"{param}.tools[{index}]"
        if kind == "namespace":
            inner = [name for name in tool_set.model_names if name.namespace == tool.get("name")]
            if not inner:
                raise invalid(f"{path}.name", "names a namespace that is not among the tools")
            yield from inner
        elif kind in ("function", "custom"):
            yield _named(tool, path, nested=nested)
        elif kind not in types:
            raise invalid(f"{path}.type", "is not among the types of the tools")


def _named(choice: dict[str, Any], param: str, *, nested: bool) -> ToolName:
    kind: ToolKind = choice["type"]
    inner, param = _inner(choice, kind, param, nested=nested)
    return converted({**inner, "kind": kind} if isinstance(inner, dict) else {}, ToolName, param)


def _inner(given: dict[str, Any], kind: str, param: str, *, nested: bool) -> tuple[Any, str]:
    """Return what describes a tool, and its path: the value under its type, or all of the flat form.

    Some agents send the form of chats to responses, or that of responses to chats.
    """
    if given.get(kind) is None and (not nested or "name" in given):
        return given, param
    return given.get(kind) or {}, f"{param}.{kind}"


def converted(value: object, kind: type[T], param: str) -> T:
    """Read a part of a body. Raises InvalidRequestError, which names the field under `param`."""
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        raise located(str(error), param, kind) from None


def _check_name(name: str, param: str, pattern: re.Pattern[str]) -> None:
    if pattern.fullmatch(name) is None:
        raise InvalidRequestError(f"{param}: must match {pattern.pattern!r}.", param=param)
