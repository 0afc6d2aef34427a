"""A text that fits is never refused: no tokenizer gives fewer tokens than its bound."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from server.event_loop import run_now
from server.text.length_bound import NFC_SHRINK, LengthBound, length_bound
from tests import smollm2

WORDS = ["hello", "world", "he", "llo", "  ", " the", "ab", "K"]
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
EXPENSIVE = [
    "\u212a",
    "\U0001d400",
    "e\u0301",
    "\u1100\u1161\u11a8",
    "\u0130",
    "\ufb03",
    "\U0001f600",
    "\u3000",
    "\u0390",
]
TEXTS = st.lists(
    st.one_of(
        st.text(max_size=8),
        st.builds(lambda unit, times: unit * times, st.sampled_from(EXPENSIVE + WORDS), st.integers(1, 40)),
        st.builds(lambda times: " " * times, st.integers(1, 60)),
        st.sampled_from(["<x>", "hello" * 20, "\n\t", "z" * 200, "\x04" * 99, "\U000e0041" * 40]),
    ),
    max_size=8,
).map("".join)


def vocab(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(dict.fromkeys(tokens))}


def bpe(tokens: list[str], **options: Any) -> Tokenizer:
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo"), ("K", "K")]
    made = [*tokens, "h", "e", "l", "o", "K", "he", "ll", "llo", "hello", "KK"]
    return Tokenizer(models.BPE(vocab=vocab(made), merges=merges, **options))


def byte_level(normalizer: normalizers.Normalizer | None = None) -> Tokenizer:
    tokenizer = bpe(ALPHABET)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    return tokenizer


def swallowing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<x>", normalized=False, lstrip=True, rstrip=True)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    tokenizer = bpe([*BYTES, "<unk>", "\u2581"], byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    return tokenizer


def unigram(tokens: list[str], *, byte_fallback: bool) -> Tokenizer:
    scored = [("<unk>", 0.0), *((token, -float(number)) for number, token in enumerate(tokens))]
    return Tokenizer(models.Unigram(scored, unk_id=0, byte_fallback=byte_fallback))


def metaspace() -> Tokenizer:
    tokenizer = unigram([*BYTES, *WORDS, "\u2581"], byte_fallback=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    return tokenizer


def words_alone() -> Tokenizer:
    tokenizer = bpe(["<unk>"], unk_token="<unk>")
    tokenizer.normalizer = normalizers.Sequence([normalizers.Strip(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def wordpiece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece(vocab(["[UNK]", "he", "##llo"]), unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def removing() -> Tokenizer:
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex("z+"), "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    return tokenizer


BOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "smollm2": smollm2.tokenizer,
    "byte level": byte_level,
    "NFC": lambda: byte_level(normalizers.NFC()),
    "some of the alphabet": lambda: _with(bpe(ALPHABET[:60]), pre_tokenizers.ByteLevel(add_prefix_space=False)),
    "swallowing added token": swallowing,
    "byte fallback, fused unknown": sentencepiece,
    "unigram with bytes": metaspace,
}
UNBOUNDED: dict[str, Callable[[], Tokenizer]] = {
    "unknown words": wordpiece,
    "unknown one by one": lambda: bpe(["<unk>"], unk_token="<unk>"),
    "white space dropped": words_alone,
    "stripped": lambda: byte_level(normalizers.Strip()),
    "NFKC": lambda: byte_level(normalizers.NFKC()),
    "lower case": lambda: byte_level(normalizers.Lowercase()),
    "unknown fused": lambda: bpe(["<unk>"], unk_token="<unk>", fuse_unk=True),
    "unknown dropped": lambda: bpe([]),
    "unigram fuses": lambda: unigram(WORDS, byte_fallback=False),
    "some bytes": lambda: bpe([*BYTES[:255], "<unk>"], byte_fallback=True, unk_token="<unk>", fuse_unk=True),
    "removed by a split": removing,
    "accents stripped": lambda: byte_level(normalizers.StripAccents()),
    "removed by a pattern": lambda: byte_level(normalizers.Replace(Regex("z+"), "")),
}


def _with(tokenizer: Tokenizer, pre_tokenizer: Any) -> Tokenizer:
    tokenizer.pre_tokenizer = pre_tokenizer
    return tokenizer


@cache
def made(name: str) -> tuple[Tokenizer, LengthBound | None]:
    tokenizer = (BOUNDED | UNBOUNDED)[name]()
    return tokenizer, length_bound(json.loads(tokenizer.to_str()))


@pytest.mark.parametrize("name", BOUNDED)
@settings(max_examples=40, deadline=None)
@given(text=TEXTS)
def test_no_text_has_fewer_tokens_than_its_bound(name: str, text: str) -> None:
    tokenizer, bound = made(name)
    assert bound is not None
    assert run_now(bound.least_tokens(text)) <= len(tokenizer.encode(text, add_special_tokens=False).ids)


@pytest.mark.parametrize("name", BOUNDED)
def test_long_texts_have_a_large_bound(name: str) -> None:
    _, bound = made(name)
    assert bound is not None
    assert run_now(bound.least_tokens("hello and low " * 100_000)) > 2_000


@pytest.mark.parametrize("name", UNBOUNDED)
def test_steps_that_may_lose_or_fuse_characters_have_no_bound(name: str) -> None:
    tokenizer, bound = made(name)
    assert bound is None, len(tokenizer.encode("\U0001f600z" * 500).ids)


def test_nfc_shrinks_no_more_than_is_known() -> None:
    """By single characters, and by the longest spelling of every composed one."""
    every = (chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000)
    chars = [char for char in every if unicodedata.normalize("NFD", char) != char]
    longest: dict[str, int] = {}
    for char in chars:
        if len(part := unicodedata.normalize("NFD", char)) == 1:
            longest[part] = max(longest.get(part, 0), len(char.encode()))
    for char in chars:
        num_bytes = len(char.encode())
        assert num_bytes <= NFC_SHRINK * len(unicodedata.normalize("NFC", char).encode())
        if len(parts := unicodedata.normalize("NFD", char)) > 1:
            spelled = sum(longest.get(part, len(part.encode())) for part in parts)
            assert spelled <= NFC_SHRINK * num_bytes
