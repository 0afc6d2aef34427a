"""Tokenising plain text from a cache: most of a text's words were in another text before.

A byte-level BPE tokenizer cuts a text by a pattern first and merges within the pieces only, so that the ids of a text
are the ids of its pieces in a row. For ASCII the patterns of the common families can be written for Python's `re`. A
layout that is not known here, or that does not give the tokenizer's ids on the probes, has no such shortcut.
Source of the patterns: the `pre_tokenizer` of GPT-2's, SmolLM2's, Llama 3's and Qwen2's tokenizer.json.

Every one of the patterns ends a piece before a space that follows no whitespace, and looks no further back. So a text
is split there first, which is far quicker than matching, and most of the chunks are known as a whole:

    It's | late, | and  so      chunks: from a space to the next, and further where whitespace stands before that
    It 's | _late , | _and _ _so      words: what the pattern cuts a chunk into that is not known
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain, repeat
from typing import Any, Final

MAX_WORDS: Final = 100_000
"""And as many chunks. All are forgotten when there are more."""
MAX_KEPT_BYTES: Final = 24 << 20
"""Of the words, and of the chunks, with their ids."""
MAX_WORD_CHARS: Final = 48
"""Longer ones are no words, and are not kept."""
WINDOW_CHARS: Final = 8192
"""Of a long text, looked at together: about a millisecond when every word is new."""
_NUM_BYTES_OF_ENTRY: Final = 200
"""A string, a list and their place in a table; an id takes 40 more."""
_CUT: Final = re.compile(r"\S(?= )")
_NUM_PROBES: Final = 48

Encode = Callable[[list[str]], list[list[int]]]
"""Texts to ids by the tokenizer itself."""

_GPT2: Final = r"'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[0-9]+| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+"
# Digits are cut out first, and end what is before them as the text's end would.
_DIGITS_GPT2: Final = r"[0-9]|'s|'t|'re|'ve|'m|'ll|'d| ?[A-Za-z]+| ?[^\sA-Za-z0-9]+|\s+(?![^\s0-9])|\s+"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST: Final = r"| ?[^\sA-Za-z0-9]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3: Final = _CONTRACTIONS + r"|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]{1,3}" + _REST
_QWEN2: Final = _CONTRACTIONS + r"|[^\r\nA-Za-z0-9]?[A-Za-z]+|[0-9]" + _REST
_BY_SPLIT: Final = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _LLAMA3,
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+": _QWEN2,
}


class Kept(dict[str, list[int]]):
    """Ids by text, bounded by entries and by bytes."""

    __slots__ = ("num_bytes",)

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def keep(self, text: str, ids: list[int]) -> None:
        """Unless it is too long to be met again."""
        if len(text) > MAX_WORD_CHARS:
            return
        if len(self) >= MAX_WORDS or self.num_bytes >= MAX_KEPT_BYTES:
            self.clear()
            self.num_bytes = 0
        self[text] = ids
        self.num_bytes += _NUM_BYTES_OF_ENTRY + 40 * len(ids)


def windows(text: str, num_chars: int = WINDOW_CHARS) -> Iterator[str]:
    """A text in parts of about so many characters whose ids in a row are its own, by every pattern known here.

    A part ends before a space that follows no white space. So it is longer where there is no such space.
    """
    start = 0
    while len(text) - start > num_chars and (cut := _CUT.search(text, start + num_chars - 1)) is not None:
        yield text[start : cut.end()]
        start = cut.end()
    yield text[start:] if start else text


class Words:
    """Thread-safe: what two threads add at once is the same."""

    def __init__(self, pattern: str, encode: Encode) -> None:
        self._cut = re.compile(pattern, re.ASCII).findall
        self._encode = encode
        self._known = Kept()
        """The ids of words, and of chunks that are not in `_spaced`."""
        self._spaced = Kept()
        """Of chunks, by what follows their space. None ends in whitespace: no chunk would begin with the next space."""

    def ids(self, text: str) -> list[int]:
        """Of an ASCII text, at once: a long one comes in `windows`."""
        parts = text.split(" ")
        found: list[Sequence[int]] = list(map(self._spaced.get, parts, repeat(())))
        found[0] = ()  # no space stands before it
        fresh: dict[int, tuple[str, list[str]]] = {}
        end = 0
        for start, ids in enumerate(found):
            if ids or start < end:
                continue
            end = start + 1
            while end < len(parts) and _ends_in_whitespace(parts[end - 1]):
                found[end] = ()
                end += 1
            chunk = (" " if start else "") + " ".join(parts[start:end])
            found[start] = self._known.get(chunk, ())
            if not found[start]:
                fresh[start] = chunk, self._cut(chunk)
        if fresh:
            known = self._of_words(list(chain.from_iterable(words for _, words in fresh.values())))
            for start, (chunk, words) in fresh.items():
                found[start] = ids = list(chain.from_iterable(map(known.__getitem__, words)))
                if chunk == " " + parts[start] and not chunk[-1].isspace():
                    self._spaced.keep(parts[start], ids)
                else:
                    self._known.keep(chunk, ids)
        return list(chain.from_iterable(found))

    def _of_words(self, words: Sequence[str]) -> dict[str, list[int]]:
        known = {word: ids for word in words if (ids := self._known.get(word)) is not None}
        missing = [word for word in dict.fromkeys(words) if word not in known]
        if missing:
            for word, ids in zip(missing, self._encode(missing), strict=True):
                known[word] = ids
                self._known.keep(word, ids)
        return known


def _ends_in_whitespace(part: str) -> bool:
    """Or is empty: then the space before it is what the next one follows."""
    return not part or part[-1].isspace()


def words_of(layout: dict[str, Any], encode: Encode) -> Words | None:
    """The shortcut for a tokenizer.json, if it has one; `encode` knows no special tokens but the layout's own."""
    pattern = _pattern(layout)
    if pattern is None:
        return None
    words = Words(pattern, encode)
    probes = _probes()
    return words if [words.ids(probe) for probe in probes] == encode(probes) else None


def _pattern(layout: dict[str, Any]) -> str | None:
    model, normalizer = layout["model"], layout.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":  # which leaves ASCII alone
        return None
    if model.get("type") != "BPE" or model.get("dropout") or model.get("end_of_word_suffix"):
        return None
    if any(token["normalized"] for token in layout.get("added_tokens", ())):
        return None
    match _steps(layout.get("pre_tokenizer")):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}]:
            return _GPT2
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            return _DIGITS_GPT2
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return _BY_SPLIT.get(regex)
    return None


def _steps(pre_tokenizer: dict[str, Any] | None) -> list[dict[str, Any]]:
    if pre_tokenizer is None:
        return []
    steps: list[dict[str, Any]] = pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    return steps


def _probes() -> list[str]:
    """Texts of all that ASCII has, close together."""
    rng = random.Random(0)
    kinds = (
        "abc",
        "XYZ",
        "0123456789",
        "'sS'tTlLdD'",
        '.,;:!?-_/\\"()[]{}<>|@#$%&*+=~^`',
        " ",
        "  \t\n\r\v\f",
        "\0\x1b\x1f\x7f",
    )
    return ["".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 120))) for _ in range(_NUM_PROBES)]
