"""Read reasoning, content and tool calls out of a model's text as it arrives. How the text is cut does not matter.

The parser is one generator, and each format is a part of it that reads like the format itself. A generator yields
whenever it needs more text. A call's arguments are passed on as they arrive (`call_syntax`).

How model families write calls:

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call> ...          Qwen, Hermes, SmolLM3
llama3   {"name": ..., "parameters": {...}}; ...  alone, or behind <|python_tag|>
mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]  or  [TOOL_CALLS]name[ARGS]{...} ...
"""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NamedTuple

from server.schema.tools import ToolKind, ToolName
from server.text.call_syntax import InputReader, JsonScanner, call_of, cut_name, is_json, match_head, unquoted
from server.text.detokenizer import ambiguous_len

THINK: Final = "<think>"
END_THINK: Final = "</think>"
MAX_NAME_CHARS: Final = 256
_ID_ALPHABET: Final = string.ascii_letters + string.digits
_ID_CHARS: Final = 9
"""Mistral's templates insist on nine letters or digits."""

_BARE_NAME: Final = re.compile(rf"([^{{]{{0,{MAX_NAME_CHARS}}})\{{")
ToolFormat = Literal["hermes", "llama3", "mistral"]
MARKERS: Final[dict[ToolFormat, tuple[str, ...]]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
}
"""Texts that the parser must see even where they are special tokens of the vocabulary."""
ReasoningStart = Literal["none", "maybe", "inside"]


def format_of(template: str) -> ToolFormat | None:
    """Return the format that a chat template mentions, if any."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("ipython" in template and "parameters" in template):
        return "llama3"
    return "hermes" if "<tool_call>" in template else None


DeltaKind = Literal["content", "reasoning", "call", "arguments", "input"]


class OutputDelta(NamedTuple):
    """More text of one kind. A call's text is its name, its arguments are JSON, a custom call's input is plain text."""

    kind: DeltaKind
    text: str


@dataclass(frozen=True, slots=True)
class OutputRules:
    """How to parse one request's text. With neither reasoning nor tools all of it is content."""

    reasoning: ReasoningStart = "none"
    """`maybe`: the text may begin with <think>. `inside`: the prompt ends with <think>."""
    tools: ToolFormat | Literal["list"] | None = None
    """`list`: a JSON list of calls, which a grammar enforces for tool_choice "required"."""
    forced: str | None = None
    """The one function that tool_choice names: the text is its arguments."""
    tool_names: frozenset[str] = frozenset()
    parallel: bool = True
    """False: keep only the first call."""
    client_names: Mapping[str, ToolName] = field(default_factory=dict)
    """The client's names of tools, by the model's. Calls of custom ones have an input."""
    is_raw_input: bool = False
    """The forced tool is a custom one, and the text is its input."""

    def client_name(self, name: str) -> ToolName:
        return self.client_names.get(name) or ToolName(name)

    @property
    def plain(self) -> bool:
        return self.reasoning == "none" and self.tools is None and self.forced is None

    @property
    def calls_alone(self) -> bool:
        """A grammar allows no content."""
        return self.forced is not None or self.tools == "list"

    def markers(self) -> tuple[str, ...]:
        """Return the special tokens that the detokenizer must show to this parser."""
        found: tuple[str, ...] = () if self.reasoning == "none" else (THINK, END_THINK)
        if self.tools is not None and self.tools != "list":
            found += MARKERS[self.tools]
        return found


Reading = Generator[None, None, None]
"""Reads on in the parser's text, and yields for more."""
Asking = Generator[None, None, bool]
"""Reads on, and answers a question."""


class OutputParser:
    """Parse one choice's text: reasoning first, then content and calls. White space around calls is not content."""

    def __init__(self, rules: OutputRules) -> None:
        self.answer_start = 0
        """Number of characters known to belong to reasoning."""
        self._rules = rules
        self._text = ""
        """Arrived, and not read yet."""
        self._ended = False
        self._num_chars = 0
        self._thinking = False
        self._space = ""
        """White space of the content, held until more content follows."""
        self._num_calls = 0
        self._input: InputReader | None = None
        """The reader of the last call's input, if this is a custom tool's."""
        self._deltas: list[OutputDelta] = []
        self._reading = self._answer()

    def feed(self, text: str, *, last: bool) -> list[OutputDelta]:
        """Return what more text gives. Neighbours differ in kind. No text may follow the last."""
        self._text += text
        self._ended = last
        self._num_chars += len(text)
        next(self._reading, None)
        if self._thinking:
            self.answer_start = self._num_chars
        deltas, self._deltas = self._deltas, []
        return deltas

    def _answer(self) -> Reading:
        """Read the whole text."""
        yield from self._reasoning()
        if self._rules.forced is not None:
            yield from self._forced(self._rules.forced)
        match self._rules.tools:
            case "hermes":
                yield from self._hermes()
            case "llama3":
                yield from self._llama3()
            case "mistral":
                yield from self._mistral()
            case "list":
                while (yield from self._skip()) == "[" and (yield from self._list()):
                    pass
        yield from self._rest(self._content)
        if not self._num_calls:
            self._emit("content", self._space)
        self._end_input()

    def _reasoning(self) -> Reading:
        start = self._rules.reasoning
        self._thinking = start == "inside" or (start == "maybe" and (yield from self._begins(THINK)))
        if self._thinking:
            yield from self._until(END_THINK, partial(self._emit, "reasoning"))
            self._thinking = False
            self.answer_start = self._num_chars - len(self._text)
            yield from self._skip()

    def _forced(self, name: str) -> Reading:
        while not (self._text or self._ended):
            yield
        self._emit("call", name)
        yield from self._rest(partial(self._emit, "arguments"))

    def _hermes(self) -> Reading:
        while (yield from self._until("<tool_call>", self._content)):
            if (yield from self._skip()) == "{":
                yield from self._call()
                closed = yield from self._begins("</tool_call>")
                if not closed and self._ended and "</tool_call>".startswith(self._text.lstrip()):
                    self._text = ""  # the text ends within the marker

    def _llama3(self) -> Reading:
        """Accept a call only as the whole answer and with a known tool's name: other JSON is content."""
        tag = "<|python_tag|>"
        while True:
            text = self._text.lstrip()
            head = match_head(text.removeprefix(tag))
            if (head == "partial" or tag.startswith(text)) and not self._ended:
                yield
            elif isinstance(head, tuple) and head[0] in self._rules.tool_names:
                self._text = text.removeprefix(tag).lstrip()
                yield from self._call()
                yield from self._skip("; \t\r\n")
            elif head == "partial" and cut_name(text) in self._rules.tool_names:
                whole = text.removeprefix(tag)
                name, arguments = call_of(whole) or (cut_name(text) or "", "")
                if name not in self._rules.tool_names or not (arguments or is_json(whole, cut=True)):
                    return
                self._emit("call", name)
                self._emit("arguments", arguments)
                self._text = ""
            else:
                return

    def _mistral(self) -> Reading:
        while (yield from self._until("[TOOL_CALLS]", self._content)):
            if (yield from self._skip()) == "[":
                if not (yield from self._list()):
                    return
                continue
            while (head := _BARE_NAME.match(self._text)) is None:
                if len(self._text) > MAX_NAME_CHARS:
                    return
                if self._ended:
                    name, _, rest = self._text.partition("[ARGS]")
                    if name and not rest.strip():
                        self._emit("call", name[: len(name) - ambiguous_len(name, ("[ARGS]",))].strip())
                        self._text = ""
                    return
                yield
            name, _, rest = head[1].partition("[ARGS]")
            if rest.strip():  # no arguments follow
                return
            self._text = self._text[len(head[1]) :]
            self._emit("call", name.strip())
            yield from self._value(partial(self._emit, "arguments"))

    def _list(self) -> Asking:
        """Read a list of calls, from its bracket on. Return whether it is closed."""
        self._text = self._text[1:]
        while (char := (yield from self._skip(", \t\r\n"))) == "{":
            yield from self._call()
        if char == "]":
            self._text = self._text[1:]
        return char == "]"

    def _call(self) -> Reading:
        """Read one call object, from its brace on. An object that is no call is content."""
        scanner, size = JsonScanner(), 0
        while True:
            size += scanner.feed(self._text[size:])
            head = match_head(self._text[:size])
            if head != "partial" or scanner.done or self._ended:
                break
            yield
        parts: list[str] = []
        if not isinstance(head, tuple):
            complete = yield from self._value(parts.append)
            text = "".join(parts)
            if (call := call_of(text)) is not None:
                self._emit("call", call[0])
                self._emit("arguments", call[1])
            elif complete or not is_json(text, cut=True):
                self._content(text)
            elif (name := self._cut_name(text)) is not None:
                self._emit("call", name)
            elif self._rules.tools != "list":
                self._content(text)
            return
        self._emit("call", head[0])
        self._text = self._text[head[1] :]
        if self._text[0] == '"':
            complete = yield from self._value(parts.append)
            self._emit("arguments", unquoted("".join(parts) + ("" if complete else '"')))
        else:
            yield from self._value(partial(self._emit, "arguments"))
        yield from self._tail()

    def _tail(self) -> Reading:
        """Drop the rest of a call object behind its arguments. What is no such rest is left, or content."""
        while not (tail := self._text.lstrip()) and not self._ended:
            yield
        if tail[:1] in ("}", ","):
            parts: list[str] = []
            complete = yield from self._value(parts.append, depth=1)
            if not is_json('{"": 0' + "".join(parts), cut=not complete):
                self._content("".join(parts))

    def _cut_name(self, text: str) -> str | None:
        """Return the name of a call that was cut before its arguments: of the tools the one that it can be alone."""
        name = cut_name(text)
        possible = [known for known in self._rules.tool_names if known.startswith(name or "")]
        return possible[0] if len(possible) == 1 else name

    def _value(self, emit: Callable[[str], None], depth: int = 0) -> Asking:
        """Pass on a JSON value as it arrives. Return whether it is complete."""
        scanner = JsonScanner(depth)
        while True:
            size = scanner.feed(self._text)
            emit(self._text[:size])
            self._text = self._text[size:]
            if scanner.done or self._ended:
                return scanner.done
            yield

    def _until(self, marker: str, emit: Callable[[str], None]) -> Asking:
        """Pass on the text before a marker, and drop the marker. Return False when the text ends without one."""
        while True:
            before, found, after = self._text.partition(marker)
            size = len(before) if found or self._ended else len(before) - ambiguous_len(before, (marker,))
            emit(before[:size])
            self._text = after if found else before[size:]
            if found or self._ended:
                return bool(found)
            yield

    def _begins(self, marker: str) -> Asking:
        """Drop a marker at the text's beginning, with white space before it. Return whether there was one."""
        while True:
            text = self._text.lstrip()
            if text.startswith(marker):
                self._text = text.removeprefix(marker)
                return True
            if self._ended or not marker.startswith(text):
                return False
            yield

    def _skip(self, chars: str | None = None) -> Generator[None, None, str]:
        """Drop white space, or these characters. Return the next one; "" when the text ends."""
        while True:
            self._text = self._text.lstrip(chars)
            if self._text or self._ended:
                return self._text[:1]
            yield

    def _rest(self, emit: Callable[[str], None]) -> Reading:
        while True:
            emit(self._text)
            self._text = ""
            if self._ended:
                return
            yield

    def _content(self, text: str) -> None:
        """Emit text, but where calls may follow hold its trailing white space."""
        text = self._space + text
        size = len(text) if self._rules.tools is None else len(text.rstrip())
        self._space = text[size:]
        self._emit("content", text[:size])

    def _emit(self, kind: DeltaKind, text: str) -> None:
        if kind == "call":
            self._end_input()
            self._num_calls += 1
            self._space = ""
            if self._rules.client_name(text).kind == "custom":
                self._input = InputReader(raw=self._rules.is_raw_input)
        elif kind == "arguments" and self._input is not None:
            kind, text = "input", self._input.feed(text)
        elif kind == "content" and text:
            self._end_input()
        dropped = kind in ("call", "arguments", "input") and self._num_calls > 1 and not self._rules.parallel
        if dropped or not (text or kind == "call"):
            return
        if self._deltas and kind == self._deltas[-1].kind != "call":
            text = self._deltas.pop().text + text
        self._deltas.append(OutputDelta(kind, text))

    def _end_input(self) -> None:
        reader, self._input = self._input, None
        if reader is not None:
            self._emit("input", reader.end())


def call_id() -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_CHARS))


_TEXT_KEYS: Final[dict[ToolKind, str]] = {"function": "arguments", "custom": "input"}


class ChoiceMessage:
    """Write one choice's text as OpenAI's message, as it arrives or whole."""

    def __init__(self, rules: OutputRules) -> None:
        self._parser = OutputParser(rules)
        self._rules = rules
        self._num_calls = 0

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def deltas(self, text: str, *, last: bool) -> list[dict[str, Any]]:
        """Return the `delta` objects of a stream for more text."""
        deltas: list[dict[str, Any]] = []
        for kind, part in self._parser.feed(text, last=last):
            match kind:
                case "content":
                    deltas.append({"content": part})
                case "reasoning":
                    deltas.append({"reasoning_content": part})
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
            reasoning += delta.get("reasoning_content", "")
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    del call["index"]
                    calls.append(call)
                else:
                    kind = calls[-1]["type"]
                    calls[-1][kind][_TEXT_KEYS[kind]] += call[kind][_TEXT_KEYS[kind]]
        shown = content or (None if calls or self._rules.calls_alone else "")
        message: dict[str, Any] = {"role": "assistant", "content": shown, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        if reasoning:
            message["reasoning_content"] = reasoning
        return message
