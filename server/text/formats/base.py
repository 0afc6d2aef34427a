"""The parts that every tool-call format is made of: read on in arriving text, and pass on what was read.

A format is a generator that reads like the format itself. It yields whenever it needs more text.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple, Protocol

from server.text.call_syntax import JsonScanner, call_of, cut_name, is_json, match_head, unquoted
from server.text.detokenizer import ambiguous_len

DeltaKind = Literal["content", "reasoning", "call", "arguments", "input"]
Reading = Generator[None, None, None]
"""Reads on in the text, and yields for more."""
Asking = Generator[None, None, bool]
"""Reads on, and answers a question."""


class TextReader(ABC):
    """The text of one choice, as far as it has arrived and is not read yet."""

    def __init__(self, tool_names: frozenset[str]) -> None:
        self.tool_names = tool_names
        self.text = ""
        self.ended = False
        """No more text follows."""

    @abstractmethod
    def emit(self, kind: DeltaKind, text: str) -> None:
        """Pass on text of one kind. Each call begins with its name."""

    @abstractmethod
    def emit_content(self, text: str) -> None:
        """Pass on content. White space at its end is held until more content follows."""

    def call_list(self, *, is_held: bool = False) -> Asking:
        """Read a list of calls, which begins with its bracket. Return whether it is closed."""
        self.text = self.text[1:]
        while (char := (yield from self.skip(", \t\r\n"))) == "{":
            yield from self.call(is_held=is_held)
        if char == "]":
            self.text = self.text[1:]
        return char == "]"

    def call(self, *, is_held: bool = False) -> Reading:
        """Read one call object, which begins with its brace. Another object is content.

        `is_held`: a grammar holds the text, so that a cut object is never content.
        """
        scanner, size = JsonScanner(), 0
        while True:
            size += scanner.feed(self.text[size:])
            head = match_head(self.text[:size])
            if head != "partial" or scanner.done or self.ended:
                break
            yield
        parts: list[str] = []
        if not isinstance(head, tuple):
            complete = yield from self.value(parts.append)
            self._emit_object("".join(parts), complete=complete, is_held=is_held)
            return
        self.emit("call", head[0])
        self.text = self.text[head[1] :]
        if self.text[0] == '"':
            complete = yield from self.value(parts.append)
            self.emit("arguments", unquoted("".join(parts) + ("" if complete else '"')))
        else:
            yield from self.value(partial(self.emit, "arguments"))
        yield from self._tail()

    def _emit_object(self, text: str, *, complete: bool, is_held: bool) -> None:
        """Pass on an object whose head is not that of a call."""
        if (call := call_of(text)) is not None:
            self.emit("call", call[0])
            self.emit("arguments", call[1])
        elif complete or not is_json(text, cut=True):
            self.emit_content(text)
        elif (name := self._cut_name(text)) is not None:
            self.emit("call", name)
        elif not is_held:
            self.emit_content(text)

    def _tail(self) -> Reading:
        """Drop the rest of a call object after its arguments. Other text is left, or content."""
        while not (tail := self.text.lstrip()) and not self.ended:
            yield
        if tail[:1] in ("}", ","):
            parts: list[str] = []
            complete = yield from self.value(parts.append, depth=1)
            if not is_json('{"": 0' + "".join(parts), cut=not complete):
                self.emit_content("".join(parts))

    def _cut_name(self, text: str) -> str | None:
        """Return the name of a call that was cut before its arguments: the only tool that it can name, if one can."""
        name = cut_name(text)
        possible = [known for known in self.tool_names if known.startswith(name or "")]
        return possible[0] if len(possible) == 1 else name

    def value(self, emit: Callable[[str], None], depth: int = 0) -> Asking:
        """Pass on a JSON value as it arrives. Return whether it is complete."""
        scanner = JsonScanner(depth)
        while True:
            size = scanner.feed(self.text)
            emit(self.text[:size])
            self.text = self.text[size:]
            if scanner.done or self.ended:
                return scanner.done
            yield

    def until(self, marker: str, emit: Callable[[str], None]) -> Asking:
        """Pass on the text before a marker, and drop the marker. Return False when the text ends without one."""
        while True:
            before, found, after = self.text.partition(marker)
            size = len(before) if found or self.ended else len(before) - ambiguous_len(before, (marker,))
            emit(before[:size])
            self.text = after if found else before[size:]
            if found or self.ended:
                return bool(found)
            yield

    def begins(self, marker: str) -> Asking:
        """Drop a marker at the text's beginning, with white space before it. Return whether there was one."""
        while True:
            text = self.text.lstrip()
            if text.startswith(marker):
                self.text = text.removeprefix(marker)
                return True
            if self.ended or not marker.startswith(text):
                return False
            yield

    def skip(self, chars: str | None = None) -> Generator[None, None, str]:
        """Drop white space, or these characters. Return the next one; "" when the text ends."""
        while True:
            self.text = self.text.lstrip(chars)
            if self.text or self.ended:
                return self.text[:1]
            yield

    def rest(self, emit: Callable[[str], None]) -> Reading:
        """Pass on all text to the end."""
        while True:
            emit(self.text)
            self.text = ""
            if self.ended:
                return
            yield


class CallSchemas(Protocol):
    """What a grammar of calls is made of."""

    @property
    def parallel(self) -> bool:
        """Several calls are allowed."""

    def marker(self, text: str) -> str:
        """Return a marker in Lark."""

    def one(self, arguments_key: str) -> dict[str, Any]:
        """Return the JSON schema of a call."""

    def many(self, arguments_key: str) -> dict[str, Any]:
        """Return the JSON schema of a list of calls."""


class CallRules(NamedTuple):
    """Rules of a Lark grammar: `calls` uses `call`, and this uses `body`."""

    calls: str
    call: str
    body: dict[str, Any]
    """A JSON schema."""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models writes tool calls."""

    name: str
    markers: tuple[str, ...]
    """Texts that the parser must see even where they are special tokens of the vocabulary."""
    is_used_by: Callable[[str], bool] = field(repr=False)
    """Returns whether a chat template mentions the format."""
    read: Callable[[TextReader], Reading] = field(repr=False)
    """Reads content and calls; text that is left is content."""
    call_rules: Callable[[CallSchemas], CallRules] = field(repr=False)
    """Returns the grammar of calls, for an answer that a grammar holds."""
