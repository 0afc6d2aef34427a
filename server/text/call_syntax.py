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
_FIELDS: Final = re.compile(rf"({'|'.join(_HEAD_KEYS)})\s*:\s*({_STRING})\s*,")
_HEAD: Final = re.compile(rf"\s*\{{((?:\s*(?:{'|'.join(_HEAD_KEYS)})\s*:\s*{_STRING}\s*,)*)\s*({_STRING})\s*:\s*(?=\S)")
"""The fields before the arguments, and the key whose value begins where it ends."""
_CUT_NAME: Final = re.compile(r'"name"\s*:\s*("(?:[^"\\]|\\.)*(")?)\\?')
_INPUT_HEAD: Final = re.compile(r'\s*\{\s*"input"\s*:\s*"')
_STRING_PART: Final = re.compile(r'(?:[^"\\]|\\.)*', re.DOTALL)
_ESCAPE: Final = re.compile(r"(?:\\u[0-9a-fA-F]{4})+|\\[^u]")
_HEAD_START: Final = re.compile(r'\s*(?:\{\s*(?:"|\Z)|\Z)')
JSON_STOP: Final = re.compile(r'\\.?|["{}\[\]]', re.DOTALL)
_SCALAR_STOP: Final = re.compile(r"[,\]}\s]")
_CUT_TOKEN: Final = re.compile(r"\s*(?:t|tr|tru|f|fa|fal|fals|n|nu|nul|-|\.|[eE][+-]?|u[0-9a-fA-F]{0,3})?\s*")
"""The beginning of a token at which JSON may be cut."""


class JsonScanner:
    """Find where a value of JSON, or of Python, ends in arriving text. Checks structure only, not grammar."""

    def __init__(self, depth: int = 0, stops: re.Pattern[str] = JSON_STOP) -> None:
        """`depth`: the number of brackets that are open already. `stops`: the escapes, quotes and brackets."""
        self._depth = depth
        self._stops = stops
        self._quote = ""
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
        for stop in self._stops.finditer(text, start):
            if stop[0][0] == "\\":
                self._escaped = len(stop[0]) == 1
                continue
            if stop[0] in "\"'":
                self._quote = "" if stop[0] == self._quote else self._quote or stop[0]
            elif not self._quote:
                self._depth += 1 if stop[0] in "{[(" else -1
            if self._depth <= 0 and not self._quote:
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
        if key == '"name"':
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
    if not isinstance(value, dict):
        return None
    name = value.get("name")
    if not isinstance(name, str):
        return None
    arguments: object = next((value[key] for key in _ARGUMENT_KEYS if value.get(key) is not None), {})
    return name, arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


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
    """Return whether a text is JSON; with `cut`, whether more text could make it JSON."""
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        if not cut or error.msg == "Extra data":
            return False
        return error.msg.startswith("Unterminated") or _CUT_TOKEN.fullmatch(text, error.pos) is not None
    except RecursionError:
        return False
    return not cut


class InputReader:
    """Read a custom tool's text out of its call's arguments, `{"input": "..."}`, as they arrive in whole escapes.

    Arguments of another form are held to their end. The text is then the only string of an object, or all of it.
    """

    def __init__(self) -> None:
        self._text = ""
        self._inside = False
        self._ended = False

    def feed(self, text: str) -> str:
        """Return what more arguments give."""
        if self._ended:
            return ""
        self._text += text
        if not self._inside:
            head = _INPUT_HEAD.match(self._text)
            if head is None:
                return ""
            self._inside = True
            self._text = self._text[head.end() :]
        whole = _STRING_PART.match(self._text)
        assert whole is not None, "it matches the empty text"
        self._ended = self._text[whole.end() : whole.end() + 1] == '"'
        self._text = self._text[whole.end() :]
        return _string(whole[0])

    def end(self) -> str:
        """Return the text that is held, at the end of the arguments."""
        if self._ended:
            return ""
        if self._inside:
            return _string(self._text.partition('"')[0])
        try:
            value = json.loads(self._text)
        except (ValueError, RecursionError):
            return self._text
        texts = list(value.values()) if isinstance(value, dict) else [value]
        return texts[0] if len(texts) == 1 and isinstance(texts[0], str) else self._text


def _string(part: str) -> str:
    """Return the text of a part of a JSON string. Invalid escapes stay unchanged."""
    return _ESCAPE.sub(_characters, part)


def _characters(escape: re.Match[str]) -> str:
    try:
        return str(json.loads(f'"{escape[0]}"'))
    except ValueError:
        return escape[0]


def unquoted(text: str) -> str:
    """Unwrap arguments that a model wrote as a JSON string holding JSON."""
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, str) else text
