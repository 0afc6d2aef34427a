"""The bytes that each token stands for, so that text can be built token by token without decoding all of it again.

Byte-level vocabularies (GPT-2, Llama 3, Qwen, SmolLM2, Mistral's tekken) write every byte as one printable character;
SentencePiece ones (Llama 2, Mistral 7B) write U+2581 for a space and `<0xNN>` for a single byte.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final, Literal

import tokenizers

PieceKind = Literal["byte_level", "sentencepiece", "other"]

_BYTE_TOKEN: Final = re.compile(r"^<0x([0-9A-Fa-f]{2})>$")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's map from printable characters to bytes. Source: Radford et al. 2019, encoder.py, bytes_to_unicode."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    others = (byte for byte in range(256) if byte not in printable)
    return alphabet | {chr(256 + index): byte for index, byte in enumerate(others)}


BYTE_ALPHABET: Final = _byte_alphabet()


class PieceTable:
    """Token id to bytes, filled as tokens are met. `special_ids` are those that never show in an answer's text."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, layout: dict[str, Any]) -> None:
        self._tokenizer = tokenizer
        self.kind: PieceKind = _kind(layout.get("decoder"))
        self.special_ids = frozenset(t["id"] for t in layout.get("added_tokens", ()) if t["special"])
        self._added_ids = frozenset(t["id"] for t in layout.get("added_tokens", ()))
        self._pieces: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        piece = self._pieces.get(token_id)
        if piece is None:
            piece = self._pieces[token_id] = self._build(token_id)
        return piece

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
            if token_id in self._added_ids:
                return token.encode("utf-8", "replace")
            if match := _BYTE_TOKEN.match(token):
                return bytes([int(match[1], 16)])
            return token.replace("\u2581", " ").encode("utf-8", "replace")
        return self._tokenizer.decode([token_id], skip_special_tokens=False).encode("utf-8", "replace")


def _kind(decoder: dict[str, Any] | None) -> PieceKind:
    described = json.dumps(decoder)
    if '"ByteLevel"' in described:
        return "byte_level"
    if '"ByteFallback"' in described or '"Metaspace"' in described or "\\u2581" in described:
        return "sentencepiece"
    return "other"
