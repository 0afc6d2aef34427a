"""Surrogates in the calls that a model writes: pairs are joined, and any half becomes U+FFFD."""

from __future__ import annotations

import re
from typing import Final

_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_HALF: Final = re.compile(r"\\u[dD][89a-fA-F]")
_ESCAPE: Final = re.compile(r"(\\u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w)|(\\u[dD][89a-fA-F][\da-fA-F]{2})|\\.", re.DOTALL)
"""A pair, a half, or another escape of JSON."""
_TAIL: Final = re.compile(r"(?<!\\)(?:\\\\)*((?:\\u[dD][89abAB][\da-fA-F]{2})?(?:\\(?:u[\da-fA-F]{0,3})?)?)\Z")
"""The end of a text that may be half of a pair, or the beginning of an escape."""


def joined_pairs(text: str) -> str:
    """Join the pairs of a text."""
    if text.isascii() or _SURROGATE.search(text) is None:
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


class WholeEscapes:
    """Replaces the escapes of halves in a call's JSON, as it arrives."""

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str, *, last: bool = False) -> str:
        """Return what more text gives. An end that may be half of a pair is held until the last."""
        text, self._held = self._held + joined_pairs(text), ""
        if "\\" not in text:
            return text
        if not last and (tail := _TAIL.search(text)) is not None and tail[1]:
            text, self._held = text[: tail.start(1)], tail[1]
        return _ESCAPE.sub(_whole, text) if _HALF.search(text) else text


def _whole(escape: re.Match[str]) -> str:
    return r"\ufffd" if escape[2] else escape[0]
