"""Token ids to text as they arrive: never half a character, never the beginning of a stop string.

    token ids -> bytes -> characters -> | released | held: may begin a stop string | incomplete UTF-8 |

However the ids are cut into calls, the released texts in a row are the same. A stop string matches where it is first
complete; of several that end at one character the longest wins.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from server.text.pieces import PieceTable

_Utf8: Final = codecs.getincrementaldecoder("utf-8")


@dataclass(frozen=True, slots=True)
class TextRules:
    """How one request turns tokens into text. `terminal_ids` end a choice and never show."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    terminal_ids: frozenset[int] = frozenset()
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that show nevertheless: a parser reads them."""


class Detokenizer:
    """One choice's text. `feed` and `finish` return what may be released; after `stopped` they return nothing."""

    __slots__ = ("_held", "_hidden", "_pieces", "_rules", "_utf8", "matched", "num_chars", "stopped", "text_len")

    def __init__(self, pieces: PieceTable, rules: TextRules) -> None:
        self._pieces = pieces
        self._rules = rules
        hidden = pieces.special_ids - rules.shown_ids if rules.skip_special else frozenset()
        self._hidden = hidden if rules.include_stop else hidden | rules.terminal_ids
        self._utf8 = _Utf8("replace")
        self._held = ""
        self.num_chars = 0
        """Characters decoded so far, the held ones included."""
        self.text_len = 0
        """Characters released so far."""
        self.stopped = False
        """A stop string was met; the text ends before it, or after it with `include_stop`."""
        self.matched: str | None = None
        """That stop string."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens release. With stop strings, feed one token at a time to know which one stopped."""
        if self.stopped:
            return ""
        pieces = self._pieces
        hidden = self._hidden
        return self._release(self._utf8.decode(b"".join([pieces[id_] for id_ in token_ids if id_ not in hidden])))

    def finish(self) -> str:
        """The rest: an incomplete character becomes U+FFFD, as in decoding the whole."""
        if self.stopped:
            return ""
        text = self._release(self._utf8.decode(b"", final=True))
        if not self.stopped:
            text += self._held
            self.text_len += len(self._held)
            self._held = ""
        return text

    def _release(self, fresh: str) -> str:
        if not fresh:
            return ""
        self.num_chars += len(fresh)
        if not self._rules.stops:
            self.text_len += len(fresh)
            return fresh
        text = self._held + fresh
        match = _first_stop(text, self._rules.stops)
        if match is not None:
            start, end = match
            self.stopped = True
            self.matched = text[start:end]
            self._held = ""
            released = text[: end if self._rules.include_stop else start]
        else:
            keep = _ambiguous_len(text, self._rules.stops)
            released = text[: len(text) - keep]
            self._held = text[len(text) - keep :]
        self.text_len += len(released)
        return released


def _first_stop(text: str, stops: Sequence[str]) -> tuple[int, int] | None:
    """(start, end) of the match that is complete first; at one end the longest."""
    best: tuple[int, int] | None = None
    for stop in stops:
        start = text.find(stop)
        if start >= 0:
            end = start + len(stop)
            if best is None or (end, start) < (best[1], best[0]):
                best = (start, end)
    return best


def _ambiguous_len(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0:
            if stop.startswith(text[start:]):
                longest = max(longest, len(text) - start)
                break
            start = text.find(stop[0], start + 1)
    return longest
