"""Word by word gives the tokenizer's own ids, for every layout that is known, or there is no shortcut."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from server.text.words import _BY_SPLIT, MAX_KEPT_BYTES, MAX_WORD_CHARS, MAX_WORDS, Encode, Words, windows, words_of
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
        for name, regex in zip(("llama3", "qwen2"), _BY_SPLIT, strict=True)
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
def words(request: pytest.FixtureRequest) -> tuple[Words, Encode]:
    layout = layout_of(request.param)
    encode = encoder(layout)
    found = words_of(layout, encode)
    assert found is not None
    return found, encode


@settings(max_examples=150, deadline=None)
@given(text=ASCII)
def test_words_in_a_row_are_the_whole(words: tuple[Words, Encode], text: str) -> None:
    shortcut, encode = words
    [whole] = encode([text])
    assert shortcut.ids(text) == whole
    assert shortcut.ids(text) == whole, "from the cache too"


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
def test_an_unknown_layout_has_no_shortcut(change: dict[str, Any]) -> None:
    layout = layout_of("gpt2")
    assert words_of(layout | change, encoder(layout)) is None


def test_a_tokenizer_that_says_otherwise_has_no_shortcut() -> None:
    layout = layout_of("gpt2")
    encode = encoder(layout_of("smollm2"))
    assert words_of(layout, encode) is None, "the probes tell"


def test_what_is_kept_is_bounded() -> None:
    words = Words(r" ?[a-z]+| +", lambda texts: [[len(text)] for text in texts])
    assert words.ids("a" * (MAX_WORD_CHARS + 1) + " " + "b" * (MAX_WORD_CHARS + 1)) == [MAX_WORD_CHARS + 1, 50]
    assert not words._known
    assert not words._spaced
    for kept in (words._known, words._spaced):
        kept |= {str(number): [number] for number in range(MAX_WORDS)}
    assert words.ids("one more") == [3, 5]
    assert set(words._known) == {"one", " more"}
    assert set(words._spaced) == {"more"}


def test_no_chunk_begins_after_whitespace() -> None:
    """The pattern may give the last of several spaces to any side."""
    words = Words(r" ?[a-z]+| +", lambda texts: [[len(text)] for text in texts])
    assert words.ids("a b c") == [1, 2, 2]
    assert words.ids("a  b c") == [1, 2, 1, 2]
    assert words.ids("a b  ") == [1, 2, 2]
    assert set(words._spaced) == {"b", "c"}


@settings(max_examples=150, deadline=None)
@given(
    text=st.lists(
        st.one_of(ASCII, st.text(max_size=6), st.sampled_from([" ", "   ", "é e\u0301 ", "\u00a0 x", "\x1c y"])),
        max_size=12,
    ).map("".join)
)
def test_windows_in_a_row_are_the_whole(words: tuple[Words, Encode], text: str) -> None:
    _, encode = words
    parts = list(windows(text, 3))
    assert "".join(parts) == text
    assert [id_ for ids in encode(parts) for id_ in ids] == encode([text])[0]


def test_windows_are_as_long_as_asked_for_where_there_are_spaces() -> None:
    assert max(map(len, windows("word " * 10_000, 100))) <= 104
    assert len(list(windows(" " * 1000, 100))) == 1, "nothing can be cut"


def test_what_is_kept_is_bounded_by_bytes_too() -> None:
    words = Words(r" ?[a-z]+| +", lambda texts: [[1] * 100_000 for _ in texts])
    for number in range(60):
        words.ids(chr(97 + number % 26) * (number // 26 + 1))
    assert words._known.num_bytes <= MAX_KEPT_BYTES + 5 * 100_000 * 40
    assert len(words._known) < 12
