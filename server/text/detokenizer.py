"""Turn token ids into text as they arrive: never half a character, never the beginning of a stop string.

    token ids -> bytes -> characters -> | released | held: may begin a stop string | incomplete UTF-8 |

The released text does not depend on how the ids are cut into calls. A stop string matches where it is first
complete; of several that end at one character the longest wins.

Byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM2, Mistral's tekken) write every byte as one printable character;
SentencePiece ones (Llama 2, Mistral 7B) write U+2581 for a space and `<0xNN>` for a single byte.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import tokenizers

_Utf8: Final = codecs.getincrementaldecoder("utf-8")
VocabKind = Literal["byte_level", "sentencepiece", "other"]

_BYTE_TOKEN: Final = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_alphabet() -> dict[str, int]:
    """Return GPT-2's map from characters to bytes. Source: Radford et al. 2019, encoder.py, bytes_to_unicode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_ALPHABET: Final = _byte_alphabet()


class TokenBytes(dict[int, bytes]):
    """Bytes by token id, filled lazily. Tokens in `special_ids` do not show in an answer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, layout: dict[str, Any]) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self.kind: VocabKind = _kind(layout.get("decoder"))
        self.special_ids = frozenset(t["id"] for t in layout.get("added_tokens", ()) if t["special"])

    def __missing__(self, token_id: int) -> bytes:
        token_bytes = self[token_id] = self._build(token_id)
        return token_bytes

    def _build(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:  # a row of the embedding that no token uses
            return b""
        if self.kind == "byte_level":
            try:
                return bytes([BYTE_ALPHABET[char] for char in token])
            except KeyError:
                return token.encode("utf-8", "replace")
        if self.kind == "sentencepiece":
            if match := _BYTE_TOKEN.match(token):
                return bytes([int(match[1], 16)])
            return token.replace("\u2581", " ").encode("utf-8", "replace")
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")


def _kind(decoder: dict[str, Any] | None) -> VocabKind:
    described = json.dumps(decoder)
    if '"ByteLevel"' in described:
        return "byte_level"
    if '"ByteFallback"' in described or '"Metaspace"' in described or "\\u2581" in described:
        return "sentencepiece"
    return "other"


@dataclass(frozen=True, slots=True)
class TextRules:
    """Rules of one request for turning tokens into text. `terminal_ids` end a choice and never show."""

    stops: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    terminal_ids: frozenset[int] = frozenset()
    shown_ids: frozenset[int] = frozenset()
    """Special tokens that are shown to a parser."""


class Detokenizer:
    """Decodes one choice. `feed` and `finish` return the text to release; after `stopped` they return ""."""

    __slots__ = ("_held", "_hidden", "_rules", "_token_bytes", "_utf8", "matched", "num_chars", "stopped", "text_len")

    def __init__(self, token_bytes: TokenBytes, rules: TextRules) -> None:
        self._token_bytes = token_bytes
        self._rules = rules
        self._hidden = token_bytes.special_ids if rules.skip_special else frozenset()  # shared if it can be
        if not rules.shown_ids.isdisjoint(self._hidden):
            self._hidden -= rules.shown_ids
        if not (rules.include_stop or rules.terminal_ids <= self._hidden):
            self._hidden |= rules.terminal_ids
        self._utf8 = _Utf8("replace")
        self._held = ""
        self.num_chars = 0
        """Characters decoded so far, the held ones included."""
        self.text_len = 0
        """Characters released so far."""
        self.stopped = False
        """Set at a stop string; the text ends before it, or after it with `include_stop`."""
        self.matched: str | None = None
        """The stop string that matched."""

    def feed(self, token_ids: Sequence[int], *, may_stop: bool = True) -> str:
        """Return the text that these tokens release. Feed one at a time to learn which stopped, if any `may_stop`."""
        if self.stopped:
            return ""
        token_bytes, hidden = self._token_bytes, self._hidden
        data = b"".join([token_bytes[id_] for id_ in token_ids if id_ not in hidden])
        return self._release(self._utf8.decode(data), may_stop=may_stop)

    def finish(self) -> str:
        """Return the rest. An incomplete character becomes U+FFFD, as in decoding the whole."""
        if self.stopped:
            return ""
        text = self._release(self._utf8.decode(b"", final=True)) + self._held
        self.text_len += len(self._held)
        self._held = ""
        return text

    def _release(self, fresh: str, *, may_stop: bool = True) -> str:
        self.num_chars += len(fresh)
        if not self._rules.stops:
            self.text_len += len(fresh)
            return fresh
        text, num_held = self._held + fresh, len(self._held)
        begins = ((stop, text.find(stop, max(0, num_held + 1 - len(stop)))) for stop in self._rules.stops if may_stop)
        found = [(start + len(stop), start) for stop, start in begins if start >= 0]
        if found:
            end, start = min(found)  # the first that is complete; the longest of those with one end
            self.stopped, self.matched, self._held = True, text[start:end], ""
            released = text[: end if self._rules.include_stop else start]
        else:
            keep = ambiguous_len(text, self._rules.stops)
            released = text[: len(text) - keep]
            self._held = text[len(text) - keep :]
        self.text_len += len(released)
        return released


def ambiguous_len(text: str, stops: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that begins one of `stops` without completing it."""
    longest = 0
    for stop in stops:
        start = text.find(stop[0], max(0, len(text) - len(stop) + 1))
        while start >= 0:
            if stop.startswith(text[start:]):
                longest = max(longest, len(text) - start)
                break
            start = text.find(stop[0], start + 1)
    return longest
