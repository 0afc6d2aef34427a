"""Bound a text's token count from below by its length, to refuse what cannot fit without tokenising it.

    bytes of the text <= shrink of the normalizer x bytes of the longest token x tokens

This holds only where some token stands for every character. A component that drops characters, or gives any number of
them one token, has no bound: an unknown token for a whole word (WordPiece) or a run of characters (`fuse_unk`), a
`Removed` split, a charsmap. White space, and bytes that a byte-level vocabulary lacks (SmolLM2's has no 0x04), are not
counted where they may be dropped.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from server.text.detokenizer import BYTE_ALPHABET

_SHRINK: Final = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Lowercase": 3, "Prepend": 1}
"""Bytes before over bytes after, at most: four bytes become one (U+1D400 to A)."""
_WHOLE: Final = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts"})
"""Pre-tokenizers that drop nothing."""
_DROP_SPACE: Final = frozenset({"Whitespace", "WhitespaceSplit", "BertPreTokenizer"})
_WINDOW_CHARS: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class LengthBound:
    """The bound of one tokenizer."""

    token_bytes: int
    """Most bytes of a text that one token can stand for."""
    counts_space: bool
    """White space takes tokens too."""
    lost: bytes = b""
    """Bytes that the vocabulary lacks: the tokenizer drops them."""

    def least_tokens(self, text: str) -> int:
        """Return a number of tokens that the text has at least."""
        return -(-self._num_bytes(text) // self.token_bytes)

    def _num_bytes(self, text: str) -> int:
        if self.counts_space and not self.lost:
            return num_bytes(text)
        total = 0
        for start in range(0, len(text), _WINDOW_CHARS):
            part = text[start : start + _WINDOW_CHARS]
            part = part if self.counts_space else "".join(part.split())
            total += len(part.encode("utf-8", "replace").translate(None, self.lost))
        return total


def num_bytes(text: str) -> int:
    """Count a text's bytes in UTF-8, without a copy of a long text."""
    if text.isascii():
        return len(text)
    starts = range(0, len(text), _WINDOW_CHARS)
    return sum(len(text[start : start + _WINDOW_CHARS].encode("utf-8", "replace")) for start in starts)


def length_bound(layout: Mapping[str, Any]) -> LengthBound | None:
    """Return the bound for a tokenizer.json; None where no bound is sound."""
    shrink, counts_space = 1, True
    for step in _flat(layout.get("normalizer"), "normalizers"):
        factor = _shrink(step)
        if factor is None:
            return None
        shrink *= factor
        counts_space &= step.get("type") != "Strip"
    byte_level = False
    for step in _flat(layout.get("pre_tokenizer"), "pretokenizers"):
        kind = step.get("type")
        byte_level |= kind == "ByteLevel"
        if kind in _DROP_SPACE:
            counts_space = False
        elif kind not in _WHOLE and not (kind in ("Split", "Punctuation") and step.get("behavior") != "Removed"):
            return None
    longest = _longest_token(layout["model"], byte_level=byte_level)
    if longest is None:
        return None
    added = list(layout.get("added_tokens", ()))
    counts_space &= not any(token["lstrip"] or token["rstrip"] for token in added)
    contents = [unicodedata.normalize(form, token["content"]) for token in added for form in ("NFC", "NFKD")]
    longest = max([longest, 4, *map(num_bytes, contents), *(num_bytes(token["content"]) for token in added)])
    lost = bytes(byte for char, byte in BYTE_ALPHABET.items() if char not in layout["model"]["vocab"])
    return LengthBound(longest * shrink, counts_space, lost if byte_level else b"")


def _flat(step: Mapping[str, Any] | None, members: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [flat for member in step[members] for flat in _flat(member, members)]


def _shrink(step: Mapping[str, Any]) -> int | None:
    kind = step.get("type")
    if kind == "Strip":
        return 1  # strips white space, which is then not counted
    if kind != "Replace":
        return _SHRINK.get(str(kind))
    pattern, content = step["pattern"].get("String"), step["content"]
    return -(-len(pattern.encode()) // len(content.encode())) if pattern and content else None


def _longest_token(model: Mapping[str, Any], *, byte_level: bool) -> int | None:
    """Return its bytes; None where characters may get lost, or share one token without a limit."""
    kind, vocab = model.get("type"), model.get("vocab")
    if kind not in ("BPE", "Unigram") or not vocab:
        return None
    tokens = vocab if kind == "BPE" else {token for token, _ in vocab}
    if byte_level:
        return max(map(len, tokens)) if kind == "BPE" else None
    if not (model.get("byte_fallback") and all(f"<0x{byte:02X}>" in tokens for byte in range(256))):
        alone = kind == "BPE" and model.get("unk_token") in tokens and not model.get("fuse_unk")
        if not alone:
            return None
    return max(len(token.encode()) for token in tokens)
