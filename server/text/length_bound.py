"""Bound a text's token count from below by its length, to refuse what cannot fit without tokenising it.

    bytes of the text <= shrink of the normalizer x bytes of the longest token x tokens

The bound is sound if every character becomes tokens: `_keeps_text` lists the steps that drop nothing, and the
vocabulary has to cover every byte. Bytes that it lacks, and white space that a token strips, are not counted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final
from unicodedata import normalize

from server.event_loop import Steps
from server.text.detokenizer import BYTE_ALPHABET

NFC_SHRINK: Final = 4
"""More than NFC divides a text's bytes by: Unicode 15 has a case of 3 (U+212A becomes K)."""
_BYTE_TOKENS: Final = frozenset(f"<0x{byte:02X}>" for byte in range(256))
_WINDOW_CHARS: Final = 1 << 16  # counted between two rests of the loop


@dataclass(frozen=True, slots=True)
class LengthBound:
    """The bound of one tokenizer."""

    token_bytes: int
    """The most bytes of text that one token can stand for."""
    counts_space: bool
    """White space takes tokens too."""
    lost: bytes = b""
    """Bytes that the vocabulary lacks: the tokenizer drops them."""

    def least_tokens(self, text: str) -> Steps[int]:
        """Return the fewest tokens that the text can have."""
        total = 0
        for start in range(0, len(text), _WINDOW_CHARS):
            part = text[start : start + _WINDOW_CHARS]
            part = part if self.counts_space else "".join(part.split())
            total += len(part.encode("utf-8", "replace").translate(None, self.lost))
            yield
        return -(-total // self.token_bytes)


def length_bound(layout: Mapping[str, Any]) -> LengthBound | None:
    """Return the bound for a tokenizer.json; None where no bound is sound."""
    model, added = layout["model"], layout.get("added_tokens", ())
    steps = [*_steps(layout.get("normalizer")), *_steps(layout.get("pre_tokenizer"))]
    vocab = model.get("vocab")
    if not vocab or model.get("type") not in ("BPE", "Unigram") or not all(map(_keeps_text, steps)):
        return None
    types = [step["type"] for step in steps]
    tokens = vocab if model["type"] == "BPE" else {token for token, _ in vocab}
    lost = b""
    if "ByteLevel" in types and model["type"] == "BPE":
        longest = max(map(len, tokens))
        lost = bytes(byte for char, byte in BYTE_ALPHABET.items() if char not in vocab)
    elif "ByteLevel" not in types and model.get("byte_fallback") and set(tokens) >= _BYTE_TOKENS:
        longest = max(map(_num_bytes, tokens))
    else:
        return None
    written = [content for token in added for content in (token["content"], normalize("NFC", token["content"]))]
    longest = max([longest, 4, *map(_num_bytes, written)])
    strips = any(token["lstrip"] or token["rstrip"] for token in added)
    return LengthBound(longest * NFC_SHRINK ** types.count("NFC"), not strips, lost)


def _steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if step is None or step["type"] != "Sequence":
        return [] if step is None else [step]
    return [inner for member in step.get("normalizers", step.get("pretokenizers")) for inner in _steps(member)]


def _keeps_text(step: Mapping[str, Any]) -> bool:
    """Return whether the step leaves a text's bytes, or more; NFC leaves a known part of them."""
    match step:
        case {"type": "NFC" | "Prepend" | "ByteLevel" | "Digits" | "Metaspace"}:
            return True
        case {"type": "Split" | "Punctuation", "behavior": str(behavior)}:
            return behavior != "Removed"
        case {"type": "Replace", "pattern": {"String": str(before)}, "content": str(after)}:
            return 0 < _num_bytes(before) <= _num_bytes(after)
    return False


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "replace"))
