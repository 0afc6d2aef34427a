"""Tokenise a text of any length window by window, where `pretoken_cache` finds no space to cut at.

A split pattern of the families known here reads no text before a word, and little after it. So the words of a window
are those of the whole text, except for the last. The next window begins there:

    aaa=bbb=ccc=dd|d...      aaa =bbb =ccc | =dd        the next begins at =dd

A word longer than a window is merged in overlapping windows. Tokens are the encoding of their text if each two
neighbours are the encoding of their own text. So two encodings may be joined after a token that both have there:

    encoding of one window     | ab | ab | a
    of the next                     | ab | aab | ...      joined:  | ab | ab | aab | ...

A thread that encodes the whole word would be less code. It takes up to 270 bytes a character, and cannot stop at the
limit of the context: 15 MB took 12 s and 2.6 GB (benchmarks/RESULTS.md, limits).

Source: https://github.com/github/rust-gems/tree/main/crates/bpe, which proves it for byte pair encoding.
"""

from __future__ import annotations

import json
import random
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Generator, Iterator, Mapping
from functools import partial
from itertools import chain
from typing import Any, Final

import tokenizers

from server.text.detokenizer import BYTE_ALPHABET

WINDOW_CHARS: Final = 8192  # encoded in one call, which holds the event loop
_SEARCH_CHARS: Final = 1 << 17  # searched between two rests of the loop
_BACK_CHARS: Final = 256
"""A window may begin up to this much earlier, to avoid a combining character at its beginning."""
_MAX_RUN_CHARS: Final = 1 << 16  # see `_apart`
_SPACE_CHARS: Final = "".join(
    map(chr, (*range(9, 14), 0x20, 0x85, 0xA0, 0x1680, *range(0x2000, 0x200B), 0x2028, 0x2029, 0x202F, 0x205F, 0x3000))
)
"""The white space of a split pattern. Python's methods also count 0x1c to 0x1f, which patterns do not."""
_SPACES: Final = re.compile(f"[{_SPACE_CHARS}]+")
_TO_ALPHABET: Final = {byte: ord(char) for char, byte in BYTE_ALPHABET.items()}


class Windows:
    """The windows of one tokenizer. `long_words` makes them for a layout that allows it."""

    def __init__(
        self,
        tokenizer: tokenizers.Tokenizer,
        *,
        lost: str = "",
        by_lines: bool = False,
        composes: bool = False,
        num_chars: int = WINDOW_CHARS,
        min_bytes: int = 0,
    ) -> None:
        """`lost`: bytes that the vocabulary lacks, as characters. `composes`: the normalizer composes characters.

        `by_lines`: white space is split at its last line end. `min_bytes`: the least part of a word that is merged at
        once: the end of a window may change tokens up to a few times the longest token before it.
        """
        self._tokenizer = tokenizer
        self._table = _TO_ALPHABET | dict.fromkeys(map(ord, lost))
        self._loses = bool(lost)
        self._by_lines = by_lines
        self._composes = composes
        self._num_chars = num_chars
        self._num_merged_bytes = max(2 * num_chars, min_bytes)

    def ids(self, text: str, start: int, end: int) -> Iterator[list[int]]:
        """Yield the ids of a part of a text in pieces, each of about a window."""
        size = self._num_chars
        while start < end:
            part = text[start : min(end, start + size)]
            encoding = self._tokenizer.encode(part, add_special_tokens=False)
            if start + size >= end:
                yield encoding.ids
                return
            starts = self._word_starts(part, encoding)
            if (known := self._known_end(part, starts)) > 0:
                num_tokens = bisect_left([begin for begin, _ in encoding.offsets], known)
                yield encoding.ids[:num_tokens]
                start += known
                continue
            stop = None
            if _is_space(part) or len(starts) == 1:
                stop = yield from self._word_end(text, start, end)
            if stop is None:  # no window may begin between its words
                yield self._tokenizer.encode(text[start:end], add_special_tokens=False).ids
                return
            yield from self._merged(text, start, stop)
            start = stop

    def _word_starts(self, part: str, encoding: tokenizers.Encoding) -> list[int]:
        if self._loses:  # a word of lost bytes has no token
            return [begin for _, (begin, _) in self._tokenizer.pre_tokenizer.pre_tokenize_str(part)]
        words = encoding.word_ids
        offsets = encoding.offsets
        return [offsets[at][0] for at, word in enumerate(words) if not at or word != words[at - 1]]

    def _known_end(self, part: str, starts: list[int]) -> int:
        """Return the end of the words that the window shares with the whole text; 0 for none."""
        spaces = len(part.rstrip(_SPACE_CHARS))
        for at in range(len(starts) - 1, 0, -1):
            # How white space at the end of a window is split depends on what follows.
            is_known = starts[at] <= spaces or not _is_space(part[starts[at - 1] : starts[at]])
            if is_known and self._may_begin(part, starts[at]):
                return starts[at]
        return 0

    def _may_begin(self, text: str, at: int) -> bool:
        """Return whether no normalizer joins the character with those before it."""
        char = text[at]
        return not self._composes or (unicodedata.category(char)[0] != "M" and not "\u1160" <= char <= "\u11ff")

    def _before(self, text: str, at: int) -> int:
        """Return the last offset up to `at` where a window may begin; `at` if there is none in half a window."""
        for offset in range(at, at - min(_BACK_CHARS, self._num_chars // 2), -1):
            if self._may_begin(text, offset):
                return offset
        return at

    def _apart(self, text: str, at: int, end: int) -> int:
        """Return an offset near `at`, or the first after it, where a normalizer composes nothing across.

        A run of more than `_MAX_RUN_CHARS` combining characters is cut: composing all of it would block the event loop.
        """
        offset = self._before(text, at)
        end = min(end, offset + _MAX_RUN_CHARS)
        while offset < end and not self._may_begin(text, offset):
            offset += 1
        return offset

    def _word_end(self, text: str, start: int, end: int) -> Generator[list[int], None, int | None]:
        """Return where the word ends that fills a window at `start`; None if no window may begin there.

        Yields no ids while it looks.
        """
        size = self._num_chars
        at = stop = start
        while spaces := _SPACES.match(text, stop, min(end, stop + _SEARCH_CHARS)):
            stop = spaces.end()
            yield []
        if stop >= start + size - 1:
            if self._by_lines and (line := max(text.rfind("\n", start, stop), text.rfind("\r", start, stop))) >= start:
                return line + 1
            at = stop - size  # where it is split depends only on its end
        while True:
            at = self._before(text, at + size - size // 8)
            encoding = self._tokenizer.encode(text[at : min(end, at + size)], add_special_tokens=False)
            starts = self._word_starts(text[at : min(end, at + size)], encoding)
            if len(starts) > 1:
                stop = at + starts[1]
                return stop if self._may_begin(text, stop) else None
            if at + size >= end:
                return end
            yield []

    def _merged(self, text: str, start: int, end: int) -> Iterator[list[int]]:
        """Yield the ids of one word."""
        size = self._num_chars
        normalizer = self._tokenizer.normalizer
        written = []
        at = start
        while at < end:
            stop = end if end - at <= size else self._apart(text, at + size, end)
            part = text[at:stop]
            yield []
            if normalizer is not None and not part.isascii():
                part = normalizer.normalize_str(part)
            written.append(part.encode("utf-8", "replace").decode("latin-1").translate(self._table).encode())
            at = stop
        word = b"".join(written)
        written.clear()
        yield from merged(self._tokenizer.model, word, self._num_merged_bytes)


def _is_space(text: str) -> bool:
    return not text.strip(_SPACE_CHARS)


_Token = tuple[int, int]
"""Its end in the word, and its id."""


def merged(model: Any, word: bytes, size: int) -> Iterator[list[int]]:
    """Yield the ids of one word from windows of about `size` bytes of its UTF-8."""
    begin = done = 0
    window = _tokens(model, word, begin, size)
    while begin + size < len(word):
        known = set(window)
        for share in (8, 2, 1):
            joints = [end for end, _ in window if end > max(done, begin + size - size // share) and _splits(word, end)]
            if not joints:
                continue
            following = _tokens(model, word, joints[0], size)
            joint = next((end for end, id_ in following if (end, id_) in known), None)
            if joint is not None:
                yield [id_ for end, id_ in window if done < end <= joint]
                begin, done, window = joints[0], joint, following
                break
        else:
            size *= 2
            window = _tokens(model, word, begin, size)
            assert not done or any(end == done for end, _ in window), "more text has changed the tokens far before it"
    yield [id_ for end, id_ in window if end > done]


def _splits(word: bytes, at: int) -> bool:
    """Return whether a character begins here."""
    return at < len(word) and word[at] & 0xC0 != 0x80


def _tokens(model: Any, word: bytes, begin: int, size: int) -> list[_Token]:
    stop = begin + size
    while stop < len(word) and not _splits(word, stop):
        stop -= 1
    return [(begin + token.offsets[1], token.id) for token in model.tokenize(word[begin:stop].decode())]


def long_words(
    tokenizer: tokenizers.Tokenizer, layout: Mapping[str, Any], num_chars: int = WINDOW_CHARS
) -> Windows | None:
    """Return the windows of a tokenizer that `pretoken_cache` supports; None if they are not exact on probes."""
    vocab = layout["model"]["vocab"]
    lost = "".join(chr(byte) for char, byte in BYTE_ALPHABET.items() if char not in vocab)
    composes = layout.get("normalizer") is not None
    longest = max(8, *map(len, vocab))  # a window overlaps the one before by an eighth
    if longest > WINDOW_CHARS // 16 or (lost and (composes or layout["model"].get("unk_token") is not None)):
        return None
    by_lines = '"Split"' in json.dumps(layout.get("pre_tokenizer"))
    make = partial(Windows, tokenizer, lost=lost, by_lines=by_lines, composes=composes, min_bytes=8 * longest)
    for windows in (make(num_chars=longest), make(num_chars=3 * longest)):
        for probe in _probes():
            whole = tokenizer.encode(probe, add_special_tokens=False).ids
            if list(chain.from_iterable(windows.ids(probe, 0, len(probe)))) != whole:
                return None
    return make(num_chars=num_chars)


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
