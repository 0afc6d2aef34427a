"""Tokenise a text of any length window by window, where `pretoken_cache` finds no space to cut at.

A split pattern of the families known here reads no text before a word, and little after it. So the words of a window
are those of the whole text, except for the last. The next window begins there:

    aaa=bbb=ccc=dd|d...      aaa =bbb =ccc | =dd        the next begins at =dd

A window that one word fills is made larger, up to `MAX_WORD_CHARS`. A longer word, such as a run of that many letters
or spaces, is encoded in parts of this length: the text is the same, and the tokens at a cut may be others.

Why no thread encodes the whole word: it takes up to 270 bytes a character, and cannot stop at the limit of the
context: 15 MB took 12 s and 2.6 GB (benchmarks/RESULTS.md, limits).
"""

from __future__ import annotations

import random
import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any, Final

import tokenizers

from server.text.detokenizer import BYTE_ALPHABET

WINDOW_CHARS: Final = 8192  # encoded in one call, which holds the event loop
MAX_WORD_CHARS: Final = 1 << 15  # a call takes 10 to 25 ms
_BACK_CHARS: Final = 256
"""A cut may be up to this much earlier, to avoid a combining character after it."""
_SPACE_CHARS: Final = "".join(
    map(chr, (*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000))
)
"""The white space of a split pattern. Python's methods also count 0x1c to 0x1f, which patterns do not."""


class Windows:
    """The windows of one tokenizer. `long_words` makes them for a layout that allows it."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        composes: bool = False,
        num_chars: int = WINDOW_CHARS,
        max_word_chars: int = MAX_WORD_CHARS,
    ) -> None:
        """`composes`: the normalizer composes characters."""
        self._tokenizer = tokenizer
        self._composes = composes
        self._num_chars = num_chars
        self._max_word_chars = max_word_chars

    def ids(self, text: str, start: int, end: int) -> Iterator[list[int]]:
        """Yield the ids of a part of a text in pieces, each of about a window."""
        size = self._num_chars
        while start < end:
            part = text[start : min(end, start + size)]
            encoding = self._tokenizer.encode(part, add_special_tokens=False)
            if start + size >= end:
                yield encoding.ids
                return
            if known := self._known_end(part, encoding):
                yield encoding.ids[: bisect_left([begin for begin, _ in encoding.offsets], known)]
                start, size = start + known, self._num_chars
            elif size < self._max_word_chars:
                yield []
                size = min(2 * size, self._max_word_chars)
            else:
                cut = self._cut(text, start + size) - start
                yield self._tokenizer.encode(part[:cut], add_special_tokens=False).ids
                start, size = start + cut, self._num_chars

    def _known_end(self, part: str, encoding: tokenizers.Encoding) -> int:
        """Return the end of the words that the window shares with the whole text; 0 for none."""
        starts = self._word_starts(part, encoding)
        spaces = len(part.rstrip(_SPACE_CHARS))
        for at in range(len(starts) - 1, 0, -1):
            # How white space at the end of a window is split depends on what follows.
            is_known = starts[at] <= spaces or not _is_space(part[starts[at - 1] : starts[at]])
            if is_known and self._may_begin(part, starts[at]):
                return starts[at]
        return 0

    def _word_starts(self, part: str, encoding: tokenizers.Encoding) -> list[int]:
        if not self._composes:  # a word of bytes that the vocabulary lacks has no token
            return [begin for _, (begin, _) in self._tokenizer.pre_tokenizer.pre_tokenize_str(part)]
        words = encoding.word_ids
        offsets = encoding.offsets
        return [offsets[at][0] for at, word in enumerate(words) if not at or word != words[at - 1]]

    def _may_begin(self, text: str, at: int) -> bool:
        """Return whether no normalizer joins the character with those before it."""
        char = text[at]
        return not self._composes or (unicodedata.category(char)[0] != "M" and not "\u1160" <= char <= "\u11ff")

    def _cut(self, text: str, at: int) -> int:
        """Return the last offset up to `at` where a window may begin; `at` if there is none near it."""
        near = range(at, at - min(_BACK_CHARS, self._num_chars // 2), -1)
        return next((offset for offset in near if self._may_begin(text, offset)), at)


def _is_space(text: str) -> bool:
    return not text.strip(_SPACE_CHARS)


def long_words(
    tokenizer: tokenizers.Tokenizer, layout: Mapping[str, Any], num_chars: int = WINDOW_CHARS
) -> Windows | None:
    """Return the windows of a tokenizer that `pretoken_cache` supports; None if they are not exact on probes."""
    composes = layout.get("normalizer") is not None
    if composes and not layout["model"]["vocab"].keys() >= BYTE_ALPHABET.keys():
        return None
    for size in (48, 160):
        windows = Windows(tokenizer, composes=composes, num_chars=size)
        for probe in _probes():
            whole = tokenizer.encode(probe, add_special_tokens=False).ids
            if list(chain.from_iterable(windows.ids(probe, 0, len(probe)))) != whole:
                return None
    return Windows(tokenizer, composes=composes, num_chars=num_chars)


def _probes() -> list[str]:
    """Return texts of long words of every kind."""
    rng = random.Random(0)
    ascii_kinds = ("abc", "THE", "the quick ", "=", "-=#", " ", " \n", "\n", "\t ", "0", "9a", "'s")
    kinds = (*ascii_kinds, "é", "中文字", "e\u0301", "🎉")
    probes = []
    for _ in range(48):
        pieces = ["".join(rng.choices(rng.choice(kinds), k=rng.choice((1, 3, 90, 600)))) for _ in range(3)]
        probes.append("".join(pieces))
    return probes
