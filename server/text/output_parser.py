"""Read reasoning, content and tool calls out of a model's text as it arrives. How the text is cut does not matter.

The parser is one generator; `server.text.formats` has the part of each tool-call format. A generator yields whenever
it needs more text. A call's arguments are passed on as they arrive (`call_syntax`).
"""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from server.schema.tools import ToolKind, ToolName
from server.text.call_syntax import InputReader, is_json
from server.text.detokenizer import ambiguous_len
from server.text.formats import CALL_LIST
from server.text.formats.base import DeltaKind, Reading, TextReader, ToolFormat
from server.text.formats.reasoning import THINK, ThoughtFormat
from server.text.surrogates import WholeEscapes, joined_pairs

_ID_ALPHABET: Final = string.ascii_letters + string.digits
_ID_CHARS: Final = 9
"""Mistral's templates insist on nine letters or digits."""
THOUGHT_FIELDS: Final = ("reasoning", "reasoning_content")
"""The names that servers give to the thoughts of a chat's message."""
ReasoningStart = Literal["none", "maybe", "inside"]


class OutputDelta(NamedTuple):
    """More text of one kind. A call's text is its name, its arguments are JSON, a custom call's input is plain text."""

    kind: DeltaKind
    text: str


@dataclass(frozen=True, slots=True)
class OutputRules:
    """How to parse one request's text. With neither reasoning nor tools all of it is content."""

    reasoning: ReasoningStart = "none"
    """`maybe`: the text may begin with reasoning. `inside`: the prompt has begun it."""
    thoughts: ThoughtFormat = THINK
    tools: ToolFormat | None = None
    forced: str | None = None
    """The one function that tool_choice names: the text is its arguments."""
    tool_names: frozenset[str] = frozenset()
    schemas: Mapping[str, Any] = field(default_factory=dict)
    """The JSON schemas of the tools' arguments, by the model's names."""
    parallel: bool = True
    """False: keep only the first call."""
    client_names: Mapping[str, ToolName] = field(default_factory=dict)
    """The client's names of tools, by the model's. Calls of custom ones have an input."""
    is_raw_input: bool = False
    """The forced tool is a custom one, and the text is its input."""
    is_required: bool = False
    """A grammar allows only calls in the family's own form."""
    is_named: bool = False
    """`tool_choice` names the function."""
    thought_fields: tuple[str, ...] = THOUGHT_FIELDS
    """The fields of a chat's message that have its thoughts."""
    shows_special: bool = False
    """Special tokens are content: the model's format is unknown, and they may be its calls."""

    def client_name(self, name: str) -> ToolName:
        return self.client_names.get(name) or ToolName(name)

    @property
    def plain(self) -> bool:
        return self.reasoning == "none" and self.tools is None and self.forced is None

    @property
    def only_calls(self) -> bool:
        """A grammar allows no content."""
        return self.forced is not None or self.is_required or self.tools is CALL_LIST

    def markers(self) -> tuple[str, ...]:
        """Return the special tokens that the detokenizer must show to this parser."""
        found: tuple[str, ...] = () if self.reasoning == "none" else self.thoughts.markers
        return found if self.tools is None else found + self.tools.markers


class OutputParser(TextReader):
    """Parse one choice's text: reasoning first, then content and calls. White space around calls is not content."""

    def __init__(self, rules: OutputRules) -> None:
        super().__init__(rules.tool_names, rules.schemas)
        self._rules = rules
        self._space = ""
        """White space of the content, or the beginning of its closing text, held until more content follows."""
        self._closing = ""
        """The text that closes the content, until it has come. It is dropped."""
        self._is_closed_by_text = False
        self._num_calls = 0
        self._input: InputReader | None = None
        """The reader of the last call's input, if this is in the arguments of a custom tool."""
        self._escapes = WholeEscapes()
        self._arguments = list[str]()  # the last call's, as the model has written them
        self._deltas: list[OutputDelta] = []
        self._reading = self._answer()

    def feed(self, text: str, *, last: bool, parts: Iterable[OutputDelta] = ()) -> list[OutputDelta]:
        """Return the deltas of more text. Neighbours differ in kind. No text may follow the last.

        `parts`: what an engine has read of its model's text, instead of the text.
        """
        for part in parts:
            self.emit(*part)
        if text or last:
            self.text += text
            self.ended = last
            self.num_chars += len(text)
            next(self._reading, None)
            if self.thinking:
                self.answer_start = self.num_chars
        deltas, self._deltas = self._deltas, []
        return deltas

    def is_cut_at(self, stop_reason: str | int | None) -> bool:
        """Return whether a stop string has ended the text within the last call, which must not run."""
        return self._num_calls > 0 and isinstance(stop_reason, str) and not is_json("".join(self._arguments), cut=False)

    def _answer(self) -> Reading:
        """Read the whole text."""
        if self._rules.reasoning != "none":
            yield from self._reasoning(self._rules.thoughts)
        if self._rules.forced is not None:
            yield from self._forced(self._rules.forced)
        if self._rules.tools is not None:
            yield from self._rules.tools.read(self)
        yield from self.before((), self.emit_content)
        drops_space = self._num_calls or self._is_closed_by_text
        self.emit("content", self._space.rstrip() if drops_space else self._space)
        self._end_input()

    def _reasoning(self, thoughts: ThoughtFormat) -> Reading:
        begun = yield from self.begins(thoughts.starts)
        self.thinking = bool(begun) or self._rules.reasoning == "inside"
        if self.thinking:
            yield from self._thoughts(thoughts)
            yield from self.skip()
        if thoughts.answer and (yield from self.begins(thoughts.answer[:1])):
            self._closing, self._is_closed_by_text = thoughts.answer[1], True
            yield from self.skip()

    def _thoughts(self, thoughts: ThoughtFormat) -> Reading:
        """Read reasoning to its end, or to a call: models forget the end before one."""
        tools, think = self._rules.tools, partial(self.emit, "reasoning")
        read_calls = None if tools is None else tools.read_calls
        opens = () if tools is None or read_calls is None else tools.opens
        while found := (yield from self.before((*thoughts.ends, *opens), think)):
            if found in thoughts.ends:
                self.text = self.text[len(found) :]
                break
            assert read_calls is not None
            start, self.thinking = self.num_chars - len(self.text), False
            if (yield from read_calls(self, think)):
                self.answer_start, self._closing = start, thoughts.ends[0]
                return
            self.thinking = True
        self.thinking, self.answer_start = False, self.num_chars - len(self.text)

    def _forced(self, name: str) -> Reading:
        while not (self.text or self.ended):
            yield
        self.emit("call", name)
        yield from self.until((), partial(self.emit, "arguments"))

    def emit_content(self, text: str) -> None:
        text = self._space + text
        if self._closing and self._closing in text:
            text, self._closing = text.replace(self._closing, "", 1), ""
        size = len(text) - (ambiguous_len(text, (self._closing,)) if self._closing else 0)
        if self._rules.tools is not None or self._is_closed_by_text:
            size = len(text[:size].rstrip())
        self._space = text[size:]
        self.emit("content", text[:size])

    def emit(self, kind: DeltaKind, text: str) -> None:
        if kind == "arguments":
            self._arguments.append(text)
        if kind == "call":
            held, self._space = self._space.rstrip(), ""
            self.emit("content", held)
            self._end_input()
            text = joined_pairs(text)
            self._num_calls += 1
            self._arguments.clear()
            if self._rules.client_name(text).kind == "custom" and not self._rules.is_raw_input:
                self._input = InputReader()
        elif kind == "arguments" and self._rules.is_raw_input:
            kind, text = "input", joined_pairs(text)
        elif kind == "arguments":
            text = self._escapes.feed(text)
            if self._input is not None:
                kind, text = "input", self._input.feed(text)
        elif kind in ("content", "reasoning") and text:
            self._end_input()
        self._append(kind, text)

    def _append(self, kind: DeltaKind, text: str) -> None:
        dropped = kind in ("call", "arguments", "input") and self._num_calls > 1 and not self._rules.parallel
        if dropped or not (text or kind == "call"):
            return
        if self._deltas and kind == self._deltas[-1].kind != "call":
            text = self._deltas.pop().text + text
        self._deltas.append(OutputDelta(kind, text))

    def _end_input(self) -> None:
        reader, self._input = self._input, None
        escapes, self._escapes = self._escapes, WholeEscapes()
        rest = escapes.feed("", last=True)
        if reader is None:
            self._append("arguments", rest)
        else:
            self._append("input", reader.feed(rest) + reader.end())


def call_id(given: list[str] | None = None) -> str:
    """Return the id of a call, the next one of those given if there are any."""
    if given:
        return given.pop(0)
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARS))


_TEXT_KEYS: Final[dict[ToolKind, str]] = {"function": "arguments", "custom": "input"}


class ChoiceMessage:
    """Write one choice's text as OpenAI's message, as it arrives or whole."""

    def __init__(self, rules: OutputRules) -> None:
        self._parser = OutputParser(rules)
        self._rules = rules
        self._num_calls = 0

    def has_calls(self, stop_reason: str | int | None) -> bool:
        """Return whether the client has calls to run. `stop_reason`: a string if that string ended the text."""
        return self._num_calls > 0 and not self._parser.is_cut_at(stop_reason)

    def deltas(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """Return the `delta` objects of a stream for more text."""
        deltas: list[dict[str, Any]] = []
        for kind, part in self._parser.feed(text, last=last):
            match kind:
                case "content":
                    deltas.append({"content": part})
                case "reasoning":
                    deltas.append(dict.fromkeys(self._rules.thought_fields, part))
                case "call":
                    name = self._rules.client_name(part)
                    called = {"name": name.name, _TEXT_KEYS[name.kind]: ""}
                    if name.namespace is not None:
                        called["namespace"] = name.namespace
                    call = {"index": self._num_calls, "id": call_id(), "type": name.kind, name.kind: called}
                    deltas.append({"tool_calls": [call]})
                    self._num_calls += 1
                case "arguments" | "input":
                    key = "function" if kind == "arguments" else "custom"
                    deltas.append({"tool_calls": [{"index": self._num_calls - 1, key: {kind: part}}]})
        return deltas

    def whole(self, text: str) -> dict[str, Any]:
        """Return the message of a complete text, with its content, reasoning and calls."""
        content = reasoning = ""
        calls: list[dict[str, Any]] = []
        for delta in self.deltas(text, last=True):
            content += delta.get("content", "")
            reasoning += delta.get(self._rules.thought_fields[0], "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    del call["index"]
                    calls.append(call)
                else:
                    kind = calls[-1]["type"]
                    calls[-1][kind][_TEXT_KEYS[kind]] += call[kind][_TEXT_KEYS[kind]]
        shown = content or (None if calls or self._rules.only_calls else "")
        message: dict[str, Any] = {"role": "assistant", "content": shown, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        if reasoning:
            message |= dict.fromkeys(self._rules.thought_fields, reasoning)
        return message
