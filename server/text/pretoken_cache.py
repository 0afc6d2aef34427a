"""Tokenise plain text from a cache of pre-tokens: most words of a text were in an earlier one.

A byte-level BPE tokenizer splits a text by a pattern first and merges only within the parts. So the ids of a text are
those of its parts in a row. Every pattern of the supported families ends a part before a space that does not follow
white space. No pattern looks further back. The text is split there, and unknown chunks go to the tokenizer itself:

    It's | late, | and  so      a chunk begins at a space, and reaches further while it ends in white space

Only ASCII text takes this way. A layout that is unknown, or that fails the probes, has no such cache.
Source of the patterns: the `pre_tokenizer` of GPT-2's, SmolLM2's, Llama 3's and Qwen2's tokenizer.json.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, Final, cast

MAX_CACHED_BYTES: Final = 48 << 20
"""Bound on chunks with their ids. Past it the cache is emptied."""
MAX_CHUNK_CHARS: Final = 48
"""Longer chunks are unlikely to come again, and are not kept."""
WINDOW_CHARS: Final = 8192
"""Length of one window of a long text: about a millisecond when every chunk is new."""
_SEARCH_CHARS: Final = 1 << 16  # searched between two rests of the loop
_ENTRY_BYTES: Final = 200
"""A string, a list and their place in the table; an id takes 40 more."""
_BOUNDARY: Final = re.compile(r"\S(?= )")
_SPLIT_PATTERNS: Final = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Llama 3's and Qwen2's."""

Encode = Callable[[list[str]], list[list[int]]]
"""Encode texts by the tokenizer itself."""


def windows(text: str, start: int, end: int, num_chars: int = WINDOW_CHARS) -> Iterator[tuple[int, int]]:
    """Cut a part of a text into windows of about `num_chars` whose ids in a row are the part's.

    A window ends before a space that follows no white space, and is longer without such a space. Yields the bounds
    of windows; empty ones while it looks for a space.
    """
    while end - start > num_chars:
        at, cut = start + num_chars - 1, None
        while cut is None and at < end:
            cut = _BOUNDARY.search(text, at, min(end, at + _SEARCH_CHARS + 1))
            at += _SEARCH_CHARS
            if cut is None:
                yield start, start
        if cut is None:
            break
        yield start, cut.end()
        start = cut.end()
    yield start, end


class PretokenCache:
    """Ids by chunk."""

    def __init__(self, encode: Encode) -> None:
        self._encode = encode
        self._ids: dict[str, Sequence[int]] = {}
        """The key of a space and a word is the word. That of any other chunk is the chunk with a space at its end."""
        self.num_bytes = 0

    def ids(self, text: str) -> list[int]:
        """Encode an ASCII text; cut a long one into `windows` first."""
        parts = text.split(" ")
        found = list(map(self._ids.get, parts))
        found[0] = None  # no space stands before it
        found.append(None)  # ends the search
        unknown: list[tuple[int, str, str]] = []
        end = 0
        while (start := found.index(None, end)) < len(parts):
            end = start + 1
            while end < len(parts) and not _is_word(parts[end - 1]):
                found[end] = ()
                end += 1
            chunk = (" " if start else "") + " ".join(parts[start:end])
            is_one_word = start > 0 and end == start + 1 and _is_word(parts[start])
            key = parts[start] if is_one_word else f"{chunk} "
            found[start] = self._ids.get(key)
            if found[start] is None:
                unknown.append((start, key, chunk))
        found.pop()
        if unknown:
            fresh = self._encode([chunk for _, _, chunk in unknown])
            for (at, key, _), ids in zip(unknown, fresh, strict=True):
                found[at] = ids
                self._keep(key, ids)
        return list(chain.from_iterable(cast(list[Sequence[int]], found)))

    def _keep(self, key: str, ids: Sequence[int]) -> None:
        if len(key) > MAX_CHUNK_CHARS or key in self._ids:
            return
        if self.num_bytes >= MAX_CACHED_BYTES:
            self._ids = {}
            self.num_bytes = 0
        self._ids[key] = ids
        self.num_bytes += _ENTRY_BYTES + 40 * len(ids)


def _is_word(part: str) -> bool:
    """Return whether the space after `part` begins a chunk."""
    return bool(part) and not part[-1].isspace()


def pretoken_cache(layout: dict[str, Any], encode: Encode) -> PretokenCache | None:
    """Return the cache for a tokenizer.json that allows one; `encode` reads only the layout's special tokens."""
    if not _splits_before_spaces(layout):
        return None
    cache = PretokenCache(encode)
    probes = _probes()
    return cache if [cache.ids(probe) for probe in probes] == encode(probes) else None


def _splits_before_spaces(layout: dict[str, Any]) -> bool:
    model, normalizer = layout["model"], layout.get("normalizer")
    if normalizer is not None and normalizer.get("type") != "NFC":  # NFC does not change ASCII
        return False
    if model.get("type") != "BPE" or model.get("dropout") or model.get("end_of_word_suffix"):
        return False
    if any(token["normalized"] for token in layout.get("added_tokens", ())):
        return False
    pre_tokenizer = layout.get("pre_tokenizer") or {}
    match pre_tokenizer.get("pretokenizers", [pre_tokenizer]):
        case [{"type": "ByteLevel", "add_prefix_space": False, "use_regex": True}] | [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            return True
        case [
            {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ]:
            return regex in _SPLIT_PATTERNS
    return False


def _probes() -> list[str]:
    """Return texts that put all kinds of ASCII close together."""
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
    return ["".join(rng.choice(rng.choice(kinds)) for _ in range(rng.randint(1, 120))) for _ in range(48)]
