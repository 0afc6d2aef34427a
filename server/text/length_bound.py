"""Bound a text's token count from below by its length, to refuse what cannot fit without tokenising it.

    bytes of the text <= shrink of the normalizer x bytes of the longest token x tokens

This holds only where some token stands for every character: in byte-level BPE, and where each byte has a token. Any
component that is not known to keep all characters means no bound. White space next to a token that strips it, and bytes
that a byte-level vocabulary lacks (SmolLM2's has no 0x04), are not counted.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from server.event_loop import Steps, run_now
from server.text.detokenizer import BYTE_ALPHABET

NFC_SHRINK: Final = 4
"""Bytes before over bytes after, at most; 3 in the Unicode of today (U+212A becomes K)."""
_KEEPS_TEXT: Final = frozenset({"ByteLevel", "Digits", "Metaspace"})
"""Pre-tokenizers that drop nothing."""
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
        return run_now(self.counting(text))

    def counting(self, text: str) -> Steps[int]:
        """Return `least_tokens` in steps."""
        total = 0
        for start in range(0, len(text), _WINDOW_CHARS):
            part = text[start : start + _WINDOW_CHARS]
            part = part if self.counts_space else "".join(part.split())
            total += len(part.encode("utf-8", "replace").translate(None, self.lost))
            yield
        return -(-total // self.token_bytes)


def length_bound(layout: Mapping[str, Any]) -> LengthBound | None:
    """Return the bound for a tokenizer.json; None where no bound is sound."""
    shrink = 1
    for step in _flat(layout.get("normalizer"), "normalizers"):
        factor = _shrink(step)
        if factor is None:
            return None
        shrink *= factor
    byte_level = False
    for step in _flat(layout.get("pre_tokenizer"), "pretokenizers"):
        kind = step.get("type")
        if kind not in _KEEPS_TEXT and (kind not in ("Split", "Punctuation") or step.get("behavior") == "Removed"):
            return None
        byte_level |= kind == "ByteLevel"
    longest = _longest_token(layout["model"], byte_level=byte_level)
    if longest is None:
        return None
    added = list(layout.get("added_tokens", ()))
    counts_space = not any(token["lstrip"] or token["rstrip"] for token in added)
    written = [token["content"] for token in added]
    contents = written + [unicodedata.normalize("NFC", content) for content in written]
    longest = max([longest, 4, *map(_num_bytes, contents)])
    lost = bytes(byte for char, byte in BYTE_ALPHABET.items() if char not in layout["model"]["vocab"])
    return LengthBound(longest * shrink, counts_space, lost if byte_level else b"")


def _flat(step: Mapping[str, Any] | None, members: str) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step.get("type") != "Sequence":
        return [step]
    return [flat for member in step[members] for flat in _flat(member, members)]


def _shrink(step: Mapping[str, Any]) -> int | None:
    match step:
        case {"type": "NFC"}:
            return NFC_SHRINK
        case {"type": "Prepend"}:
            return 1
        case {"type": "Replace", "pattern": {"String": str(before)}, "content": str(after)} if before and after:
            return -(-_num_bytes(before) // _num_bytes(after))
    return None


def _longest_token(model: Mapping[str, Any], *, byte_level: bool) -> int | None:
    """Return its bytes; None where characters may get lost, or share one token without a limit."""
    kind, vocab = model.get("type"), model.get("vocab")
    if kind not in ("BPE", "Unigram") or not vocab:
        return None
    tokens = vocab if kind == "BPE" else {token for token, _ in vocab}
    if byte_level:
        return max(map(len, tokens)) if kind == "BPE" else None
    if not (model.get("byte_fallback") and all(f"<0x{byte:02X}>" in tokens for byte in range(256))):
        return None
    return max(map(_num_bytes, tokens))


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))
