"""How model families write tool calls.

hermes   <tool_call>{"name": ..., "arguments": {...}}</tool_call> ...          Qwen, Hermes, SmolLM3
llama3   {"name": ..., "parameters": {...}}; ...  alone, or behind <|python_tag|>
mistral  [TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]  or  [TOOL_CALLS]name[ARGS]{...} ...
list     [{"name": ..., "parameters": {...}}, ...]             what a grammar enforces for tool_choice "required"
forced   the arguments alone                                   the same for one named function
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, Literal

from server.text.parsing.calls import CallReader, match_head
from server.text.parsing.json_scan import JsonScanner
from server.text.parsing.pieces import CallArguments, CallStart, Content, Piece, ambiguous_len

ToolFormat = Literal["hermes", "llama3", "mistral"]
MARKERS: Final[dict[ToolFormat, tuple[str, ...]]] = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
}
"""Texts that have to be seen even where the vocabulary has them as special tokens."""
MAX_NAME_CHARS: Final = 256

_Step = Callable[[list[Piece]], bool]


def format_of(template: str) -> ToolFormat | None:
    """The format that a chat template speaks of, if any."""
    if "[TOOL_CALLS]" in template:
        return "mistral"
    if "<|python_tag|>" in template or ("ipython" in template and "parameters" in template):
        return "llama3"
    return "hermes" if "<tool_call>" in template else None


class CallParser(ABC):
    """Steps over what has arrived: a step consumes from `_buffer` or moves on; False waits for more text.

    White space beside a call is not content.
    """

    def __init__(self) -> None:
        self._buffer = ""
        self._step: _Step = self._begin
        self._space = ""
        self._any_call = False
        self._reader = CallReader()
        self._after_call: _Step = self._begin

    @abstractmethod
    def _begin(self, pieces: list[Piece]) -> bool: ...

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer and self._step(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        pieces: list[Piece] = []
        if self._step == self._call:
            self._reader.finish(pieces)
        elif self._buffer.strip():
            self._content(self._buffer, pieces)
        elif not self._any_call:
            self._space += self._buffer
        if self._space and not self._any_call:
            pieces.append(Content(self._space))
        return pieces

    def _content(self, text: str, pieces: list[Piece]) -> None:
        """White space at the end waits: it counts when more content follows."""
        text = self._space + text
        kept = text.rstrip()
        self._space = text[len(kept) :]
        if kept:
            pieces.append(Content(kept))

    def _until_marker(self, marker: str, pieces: list[Piece]) -> bool:
        """Content up to the marker; True when the marker was met and consumed."""
        before, found, after = self._buffer.partition(marker)
        if found:
            self._content(before, pieces)
            self._space = ""
            self._any_call = True
            self._buffer = after
            return True
        keep = ambiguous_len(before, (marker,))
        self._content(before[: len(before) - keep], pieces)
        self._buffer = before[len(before) - keep :]
        return False

    def _skip_space(self) -> bool:
        """True when something else is there."""
        self._buffer = self._buffer.lstrip()
        return bool(self._buffer)

    def _read_call(self, after: _Step) -> bool:
        self._reader = CallReader()
        self._after_call = after
        self._step = self._call
        return True

    def _call(self, pieces: list[Piece]) -> bool:
        self._buffer = self._reader.feed(self._buffer, pieces)
        if self._reader.done:
            self._step = self._after_call
        return True

    def _plain(self, pieces: list[Piece]) -> bool:
        self._content(self._buffer, pieces)
        self._buffer = ""
        return False

    def _list(self, pieces: list[Piece]) -> bool:
        """Between the calls of a list."""
        self._buffer = self._buffer.lstrip(", \t\r\n")
        if not self._buffer:
            return False
        if self._buffer[0] == "]":
            self._buffer = self._buffer[1:]
            self._step = self._begin
            return True
        if self._buffer[0] != "{":
            self._step = self._plain
            return True
        return self._read_call(self._list)


class HermesParser(CallParser):
    def _begin(self, pieces: list[Piece]) -> bool:
        if not self._until_marker("<tool_call>", pieces):
            return False
        self._step = self._inside
        return True

    def _inside(self, pieces: list[Piece]) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] == "{":
            return self._read_call(self._behind)
        self._step = self._begin
        return True

    def _behind(self, pieces: list[Piece]) -> bool:
        end = "</tool_call>"
        if not self._skip_space() or (len(self._buffer) < len(end) and end.startswith(self._buffer)):
            return False
        self._buffer = self._buffer.removeprefix(end)
        self._step = self._begin
        return True


class Llama3Parser(CallParser):
    """A call is the whole answer, and its name that of a tool: other JSON is content."""

    def __init__(self, names: frozenset[str]) -> None:
        super().__init__()
        self._names = names

    def _begin(self, pieces: list[Piece]) -> bool:
        tag = "<|python_tag|>"
        text = self._buffer.lstrip()
        if not text or (len(text) < len(tag) and tag.startswith(text)):
            return False
        text = text.removeprefix(tag)
        match match_head(text):
            case "partial":
                return False
            case (name, _) if name in self._names:
                self._buffer = text.lstrip()
                self._any_call = True
                return self._read_call(self._behind)
        self._step = self._plain
        return True

    def _behind(self, pieces: list[Piece]) -> bool:
        self._buffer = self._buffer.lstrip("; \t\r\n")
        if self._buffer:
            self._step = self._begin
        return bool(self._buffer)

    def finish(self) -> list[Piece]:
        if not self._buffer.strip():
            return []
        return super().finish()


class MistralParser(CallParser):
    def __init__(self) -> None:
        super().__init__()
        self._value = JsonScanner()

    def _begin(self, pieces: list[Piece]) -> bool:
        if not self._until_marker("[TOOL_CALLS]", pieces):
            return False
        self._step = self._behind_marker
        return True

    def _behind_marker(self, pieces: list[Piece]) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] == "[":
            self._buffer = self._buffer[1:]
            self._step = self._list
        else:
            self._step = self._name
        return True

    def _name(self, pieces: list[Piece]) -> bool:
        name, brace, arguments = self._buffer.partition("{")
        if not brace:
            if len(name) > MAX_NAME_CHARS:
                self._step = self._plain
                return True
            return False
        pieces.append(CallStart(name.replace("[ARGS]", "").strip()))
        self._buffer = brace + arguments
        self._value = JsonScanner()
        self._step = self._arguments
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        size = self._value.feed(self._buffer)
        pieces.append(CallArguments(self._buffer[:size]))
        self._buffer = self._buffer[size:]
        if self._value.done:
            self._step = self._begin
        return True


class ListParser(CallParser):
    def _begin(self, pieces: list[Piece]) -> bool:
        if not self._skip_space():
            return False
        if self._buffer[0] != "[":
            self._step = self._plain
            return True
        self._buffer = self._buffer[1:]
        self._any_call = True
        self._step = self._list
        return True


class ForcedParser:
    """Everything is the arguments of the one function that the request names."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._started = False

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        pieces: list[Piece] = [] if self._started else [CallStart(self._name)]
        self._started = True
        return [*pieces, CallArguments(text)]

    def finish(self) -> list[Piece]:
        return [] if self._started else [CallStart(self._name)]
