"""Read one tool call as a model writes it: {"name": "f", "arguments": {...}}, passing its arguments on as they arrive.

head: up to the arguments' value -> arguments: the value -> tail: up to the object's own brace
any other order of keys: wait for the whole object
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, Protocol

_HEAD_KEYS: Final = ('"name"', '"type"', '"id"')
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_STRING: Final = r'"(?:[^"\\]|\\.)*"'
_FIELDS: Final = re.compile(rf'"(name|type|id)"\s*:\s*({_STRING})\s*,')
_HEAD: Final = re.compile(rf'\s*\{{((?:\s*"(?:name|type|id)"\s*:\s*{_STRING}\s*,)*)\s*({_STRING})\s*:\s*(?=\S)')
"""The fields before the arguments, and the key whose value begins where it ends."""
_HEAD_START: Final = re.compile(r'\s*(?:\{\s*(?:"|\Z)|\Z)')
_STRUCTURE: Final = re.compile(r'["{}\[\]]')
_STRING_STOP: Final = re.compile(r'["\\]')
_SCALAR_STOP: Final = re.compile(r"[,\]}\s]")


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More JSON text for the arguments of the last started call."""

    text: str


OutputDelta = Content | Reasoning | CallStart | CallArguments
"""One part of an answer."""


class TextParser(Protocol):
    def feed(self, text: str) -> list[OutputDelta]: ...

    def finish(self) -> list[OutputDelta]:
        """Return what was held back. No `feed` may follow."""


def ambiguous_len(text: str, markers: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins, but does not complete, a marker."""
    longest = 0
    for marker in markers:
        for length in range(min(len(text), len(marker) - 1), longest, -1):
            if marker.startswith(text[-length:]):
                longest = length
                break
    return longest


class JsonScanner:
    """Find where a JSON value ends in arriving text. Checks structure only, not grammar."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False
        self.done = False

    def feed(self, text: str) -> int:
        """Return how many characters belong to the value; set `done` once it is complete.

        The first call starts at the value's first character.
        """
        position = 0
        while position < len(text) and not self.done:
            if self._escaped:
                self._escaped = False
                position += 1
            elif self._in_string:
                position = self._string(text, position)
            elif self._scalar:
                stop = _SCALAR_STOP.search(text, position)
                self.done = stop is not None
                position = stop.start() if stop else len(text)
            elif self._depth == 0 and text[position] not in '"{[':
                self._scalar = True
            else:
                position = self._structure(text, position)
        return position

    def _string(self, text: str, position: int) -> int:
        stop = _STRING_STOP.search(text, position)
        if stop is None:
            return len(text)
        if stop[0] == "\\":
            self._escaped = True
        else:
            self._in_string = False
            self.done = self._depth == 0
        return stop.end()

    def _structure(self, text: str, position: int) -> int:
        stop = _STRUCTURE.search(text, position)
        if stop is None:
            return len(text)
        if stop[0] == '"':
            self._in_string = True
        elif stop[0] in "{[":
            self._depth += 1
        else:
            self._depth -= 1
            self.done = self._depth <= 0
        return stop.end()


HeadMatch = Literal["no", "partial"] | tuple[str, int]


def match_head(text: str) -> HeadMatch:
    """Return the call's name and where its arguments begin; "partial" while more text may still make it a call."""
    head = _HEAD.match(text)
    if head is None:
        return "partial" if _HEAD_START.match(text) else "no"
    name: str | None = None
    for key, value in _FIELDS.findall(head[1]):
        if key == "name":
            try:
                name = json.loads(value)
            except ValueError:
                return "no"
    if head[2].strip('"') in _ARGUMENT_KEYS and name is not None:
        return name, head.end()
    is_unfinished_string = head[2] in _HEAD_KEYS and text[head.end()] == '"'
    return "partial" if is_unfinished_string else "no"


class CallReader:
    """Read one call object. `feed` returns the text after it once `done`."""

    def __init__(self) -> None:
        self.done = False
        self._state: Literal["head", "arguments", "tail", "whole"] = "head"
        self._object = JsonScanner()
        self._value = JsonScanner()
        self._buffer = ""
        self._quoted = False

    def feed(self, text: str, deltas: list[OutputDelta]) -> str:
        size = self._object.feed(text)
        self.done = self._object.done
        part, rest = text[:size], text[size:]
        if self._state == "head":
            part = self._head(part, deltas)
        elif self._state == "whole":
            self._buffer += part
        if self._state == "arguments":
            self._arguments(part, deltas)
        if self.done and self._state in ("head", "whole"):
            deltas.extend(call_of(self._buffer) or [Content(self._buffer)])
        return rest

    def finish(self, deltas: list[OutputDelta]) -> None:
        """Release what is held of a call that the text's end cut off."""
        if self._state in ("head", "whole"):
            deltas.append(Content(self._buffer))
        elif self._quoted and self._state == "arguments":
            deltas.append(CallArguments(_unquoted(self._buffer + '"')))

    def _head(self, part: str, deltas: list[OutputDelta]) -> str:
        self._buffer += part
        match match_head(self._buffer):
            case "no":
                self._state = "whole"
            case (str(name), int(position)):
                deltas.append(CallStart(name))
                part, self._buffer = self._buffer[position:], ""
                self._quoted = part.startswith('"')
                self._state = "arguments"
                return part
        return ""

    def _arguments(self, part: str, deltas: list[OutputDelta]) -> None:
        size = self._value.feed(part)
        if self._quoted:
            self._buffer += part[:size]
        elif size:
            deltas.append(CallArguments(part[:size]))
        if self._value.done:
            if self._quoted:
                deltas.append(CallArguments(_unquoted(self._buffer)))
            self._state = "tail"


def call_of(text: str) -> list[OutputDelta]:
    """Parse a whole call object with its keys in any order; return nothing when it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return []
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return []
    arguments: object = next((value[key] for key in _ARGUMENT_KEYS if key in value), {})
    written = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return [CallStart(value["name"]), CallArguments(written)]


def _unquoted(text: str) -> str:
    """Unwrap arguments that a model wrote as a JSON string holding JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text
