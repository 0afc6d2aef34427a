"""Chunk by chunk gives the tokenizer's own ids, for every layout that is known, or there is no cache."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from server.text.pretoken_cache import (
    _SPLIT_PATTERNS,
    MAX_CACHED_BYTES,
    MAX_CHUNK_CHARS,
    Encode,
    PretokenCache,
    pretoken_cache,
    windows,
)
from tests import smollm2

BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
LAYOUTS: dict[str, Any] = {
    "gpt2": BYTE_LEVEL,
    "smollm2": {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, BYTE_LEVEL]},
    **{
        name: {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False},
                {**BYTE_LEVEL, "use_regex": False},
            ],
        }
        for name, regex in zip(("llama3", "qwen2"), _SPLIT_PATTERNS, strict=True)
    },
}
ASCII = st.lists(
    st.one_of(
        st.text(st.characters(max_codepoint=127), max_size=20),
        st.sampled_from(
            ["It's", " 'LL", "don't", "1234567", " 12", "\n\n", "  \n ", "\t", "Hello", " world", "?!\r\n"]
        ),
    ),
    max_size=12,
).map("".join)


@cache
def smollm2_json() -> str:
    return smollm2.tokenizer().to_str()


def layout_of(name: str) -> dict[str, Any]:
    layout: dict[str, Any] = json.loads(smollm2_json())
    layout["pre_tokenizer"] = LAYOUTS[name]
    layout["added_tokens"] = []
    return layout


def encoder(layout: dict[str, Any]) -> Encode:
    tokenizer = Tokenizer.from_str(json.dumps(layout))
    return lambda texts: [item.ids for item in tokenizer.encode_batch_fast(texts, add_special_tokens=False)]


@pytest.fixture(scope="module", params=LAYOUTS)
def cached(request: pytest.FixtureRequest) -> tuple[PretokenCache, Encode]:
    layout = layout_of(request.param)
    encode = encoder(layout)
    found = pretoken_cache(layout, encode)
    assert found is not None
    return found, encode


@settings(max_examples=150, deadline=None)
@given(text=ASCII)
def test_ids_of_chunks_in_a_row_are_those_of_the_whole(cached: tuple[PretokenCache, Encode], text: str) -> None:
    cache, encode = cached
    [whole] = encode([text])
    assert cache.ids(text) == whole
    assert cache.ids(text) == whole, "from the cache too"


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"pre_tokenizer": {**BYTE_LEVEL, "add_prefix_space": True}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"added_tokens": [{"id": 0, "content": "the", "normalized": True}]},
    ],
)
def test_an_unknown_layout_has_no_cache(change: dict[str, Any]) -> None:
    layout = layout_of("gpt2")
    assert pretoken_cache(layout | change, encoder(layout)) is None


def lengths(texts: list[str]) -> list[list[int]]:
    """An encoder that gives each text its length as the one id."""
    return [[len(text)] for text in texts]


def test_a_tokenizer_whose_tokens_cross_spaces_has_no_cache() -> None:
    assert pretoken_cache(layout_of("gpt2"), lengths) is None, "the probes show it"


def test_a_full_cache_starts_over_and_long_chunks_are_not_kept() -> None:
    cache = PretokenCache(lengths)
    assert cache.ids("a" * (MAX_CHUNK_CHARS + 1) + " " + "b" * (MAX_CHUNK_CHARS + 1)) == [MAX_CHUNK_CHARS + 1, 50]
    assert len(cache._ids) == 0
    cache.num_bytes = MAX_CACHED_BYTES
    assert cache.ids("one more") == [3, 5]
    assert (len(cache._ids), cache.num_bytes) == (2, 480)


def cut(text: str, num_chars: int) -> list[str]:
    return [text[start:end] for start, end in windows(text, 0, len(text), num_chars) if start < end]


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.one_of(ASCII, st.text(max_size=6), st.sampled_from([" ", "   ", "é e\u0301 ", "\u00a0 x", "\x1c y"])),
        max_size=12,
    ).map("".join)
)
def test_ids_of_windows_in_a_row_are_those_of_the_whole(cached: tuple[PretokenCache, Encode], text: str) -> None:
    _, encode = cached
    parts = cut(text, 3)
    assert "".join(parts) == text
    assert [id_ for ids in encode(parts) for id_ in ids] == encode([text])[0]


def test_windows_are_as_long_as_asked_for_where_there_are_spaces() -> None:
    assert max(map(len, cut("word " * 10_000, 100))) <= 104
    assert len(cut(" " * 1000, 100)) == 1, "nothing can be cut"


def test_the_bytes_of_chunks_are_bounded() -> None:
    cache = PretokenCache(lambda texts: [[1] * 100_000 for _ in texts])
    for number in range(60):
        cache.ids(chr(97 + number % 26) * (number // 26 + 1))
    assert cache.num_bytes <= MAX_CACHED_BYTES + 5 * 100_000 * 40
    assert len(cache._ids) < 16


def test_a_word_that_comes_again_counts_once() -> None:
    cache = PretokenCache(lambda texts: [[1] for _ in texts])
    cache.ids("a" + " zq" * 2000)
    assert cache.num_bytes == sum(200 + 40 * len(ids) for ids in cache._ids.values())
