"""Read the JSON of one call, however much of it has arrived.

{"name": "f", "arguments":     {"city": ...     }}
head, held until complete      arguments        tail
"""

from __future__ import annotations

import json
import re
from typing import Final, Literal

_HEAD_KEYS: Final = ('"name"', '"type"', '"id"')
_ARGUMENT_KEYS: Final = ("arguments", "parameters")
_STRING: Final = r'"(?:[^"\\]|\\.)*"'
_FIELDS: Final = re.compile(rf'"(name|type|id)"\s*:\s*({_STRING})\s*,')
_HEAD: Final = re.compile(rf'\s*\{{((?:\s*"(?:name|type|id)"\s*:\s*{_STRING}\s*,)*)\s*({_STRING})\s*:\s*(?=\S)')
"""The fields before the arguments, and the key whose value begins where it ends."""
_CUT_NAME: Final = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*(")?)\\?')
_HEAD_START: Final = re.compile(r'\s*(?:\{\s*(?:"|\Z)|\Z)')
_JSON_STOP: Final = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_SCALAR_STOP: Final = re.compile(r"[,\]}\s]")
_CUT_TOKEN: Final = re.compile(r"\s*(?:t|tr|tru|f|fa|fal|fals|n|nu|nul|-|\.|[eE][+-]?|u[0-9a-fA-F]{0,3})?\s*")
"""The part of a token at which JSON may be cut."""


class JsonScanner:
    """Find where a JSON value ends in arriving text. Checks structure only, not grammar."""

    def __init__(self, depth: int = 0) -> None:
        """`depth`: the number of brackets that are open already."""
        self._depth = depth
        self._in_string = False
        self._escaped = False
        self._scalar: bool | None = None if depth == 0 else False
        self.done = False

    def feed(self, text: str) -> int:
        """Return how many characters belong to the value; set `done` once it is complete.

        The first call starts at the value's first character.
        """
        if self._scalar is None and text:
            self._scalar = text[0] not in '"{['
        if self._scalar:
            end = _SCALAR_STOP.search(text)
            self.done = end is not None
            return end.start() if end else len(text)
        start = int(self._escaped and bool(text))
        self._escaped = self._escaped and not text
        for stop in _JSON_STOP.finditer(text, start):
            if stop[0][0] == "\\":
                self._escaped = len(stop[0]) == 1
                continue
            if stop[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string:
                self._depth += 1 if stop[0] in "{[" else -1
            if self._depth <= 0 and not self._in_string:
                self.done = True
                return stop.end()
        return len(text)


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


def call_of(text: str) -> tuple[str, str] | None:
    """Return the name and arguments of a whole call object with its keys in any order; None when it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return None
    arguments: object = next((value[key] for key in _ARGUMENT_KEYS if key in value), {})
    return value["name"], arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def cut_name(text: str) -> str | None:
    """Return the name, or its part, of a call object that ends before its arguments; None before its name."""
    name = _CUT_NAME.search(text)
    if name is None:
        return None
    try:
        return str(json.loads(name[1] + ("" if name[2] else '"')))
    except ValueError:  # within an escape
        return name[1].partition("\\")[0][1:]


def is_json(text: str, *, cut: bool) -> bool:
    """Return whether a text is JSON; with `cut`, whether it is the beginning of JSON that more text would complete."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if not cut or error.msg == "Extra data":
            return False
        return error.msg.startswith("Unterminated") or _CUT_TOKEN.fullmatch(text, error.pos) is not None
    except RecursionError:
        return False
    return not cut


def unquoted(text: str) -> str:
    """Unwrap arguments that a model wrote as a JSON string holding JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text
