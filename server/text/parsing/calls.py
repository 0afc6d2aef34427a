"""One tool call as models write it: {"name": "f", "arguments": {...}}, its arguments passed on as they arrive.

head: up to the arguments' value -> arguments: the value -> tail: up to the object's own brace
any other order of keys: the whole object first
"""

from __future__ import annotations

import json
import re
from typing import Final, Literal

from server.text.parsing.json_scan import JsonScanner
from server.text.parsing.pieces import CallArguments, CallStart, Content, Piece

_WORD: Final = re.compile(r'"(?:[^"\\]|\\.)*"')
_SPACE: Final = re.compile(r"\s*")
_ARGUMENT_KEYS: Final = ("arguments", "parameters")

Match = Literal["no", "partial"] | tuple[str, int]


def match_head(text: str) -> Match:
    """(name, where the arguments' value begins), or whether more text may still make it so."""
    position = _SPACE.match(text, 0).end()  # type: ignore[union-attr]
    if position == len(text):
        return "partial"
    if text[position] != "{":
        return "no"
    name: str | None = None
    position += 1
    while True:
        key = _string(text, position)
        if not isinstance(key, tuple):
            return key
        word, position = key
        position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
        if position == len(text):
            return "partial"
        if text[position] != ":":
            return "no"
        position = _SPACE.match(text, position + 1).end()  # type: ignore[union-attr]
        if word in _ARGUMENT_KEYS:
            if name is None:
                return "no"
            return "partial" if position == len(text) else (name, position)
        if word not in ("name", "type", "id"):
            return "no"
        value = _string(text, position)
        if not isinstance(value, tuple):
            return value
        if word == "name":
            name = value[0]
        position = _SPACE.match(text, value[1]).end()  # type: ignore[union-attr]
        if position == len(text):
            return "partial"
        if text[position] != ",":
            return "no"
        position += 1


def _string(text: str, position: int) -> Match:
    """The JSON string that begins behind white space, and where it ends."""
    position = _SPACE.match(text, position).end()  # type: ignore[union-attr]
    if position == len(text):
        return "partial"
    if text[position] != '"':
        return "no"
    match = _WORD.match(text, position)
    if match is None:
        return "partial"
    try:
        value = json.loads(match[0])
    except ValueError:
        return "no"
    return value, match.end()


class CallReader:
    """Reads one call object. `feed` returns what is left of the text once `done`."""

    def __init__(self) -> None:
        self.done = False
        self._state: Literal["head", "arguments", "tail", "whole"] = "head"
        self._object = JsonScanner()
        self._value = JsonScanner()
        self._buffer = ""
        self._quoted = False

    def feed(self, text: str, pieces: list[Piece]) -> str:
        size = self._object.feed(text)
        self.done = self._object.done
        part, rest = text[:size], text[size:]
        if self._state == "head":
            part = self._head(part, pieces)
        elif self._state == "whole":
            self._buffer += part
        if self._state == "arguments":
            self._arguments(part, pieces)
        if self.done:
            self._complete(pieces)
        return rest

    def finish(self, pieces: list[Piece]) -> None:
        """The text ended within the call."""
        if self._state in ("head", "whole"):
            pieces.append(Content(self._buffer))
        elif self._quoted and self._state == "arguments":
            pieces.append(CallArguments(_unquoted(self._buffer + '"')))

    def _head(self, part: str, pieces: list[Piece]) -> str:
        self._buffer += part
        match match_head(self._buffer):
            case "no":
                self._state = "whole"
            case (str(name), int(position)):
                pieces.append(CallStart(name))
                part, self._buffer = self._buffer[position:], ""
                self._quoted = part.startswith('"')
                self._state = "arguments"
                return part
        return ""

    def _arguments(self, part: str, pieces: list[Piece]) -> None:
        size = self._value.feed(part)
        if self._quoted:
            self._buffer += part[:size]
        elif size:
            pieces.append(CallArguments(part[:size]))
        if self._value.done:
            if self._quoted:
                pieces.append(CallArguments(_unquoted(self._buffer)))
            self._state = "tail"

    def _complete(self, pieces: list[Piece]) -> None:
        if self._state not in ("head", "whole"):
            return
        call = call_of(self._buffer)
        pieces.extend(call if call else [Content(self._buffer)])


def call_of(text: str) -> list[Piece]:
    """A whole call object, its keys in any order; empty when it is none."""
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
    """Some models write the arguments as a JSON string that holds JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text
