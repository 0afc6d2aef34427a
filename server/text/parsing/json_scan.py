"""Where a JSON value ends in a text that is still arriving. It judges structure only, not grammar."""

from __future__ import annotations

import re
from typing import Final

_STRUCTURE: Final = re.compile(r'["{}\[\]]')
_STRING_STOP: Final = re.compile(r'["\\]')
_SCALAR_STOP: Final = re.compile(r"[,\]}\s]")


class JsonScanner:
    """Fed with text from the first character of a value on; says how much of it belongs to the value."""

    __slots__ = ("_depth", "_escaped", "_in_string", "_scalar", "done")

    def __init__(self) -> None:
        self._depth = 0
        self._in_string = False
        self._escaped = False
        self._scalar = False
        self.done = False

    def feed(self, text: str) -> int:
        """The number of characters that belong to the value; `done` once it is complete."""
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
