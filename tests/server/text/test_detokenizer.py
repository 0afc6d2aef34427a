from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer

from server.text.detokenizer import Detokenizer, TextRules, TokenBytes

TEXT = st.one_of(
    st.text(max_size=40), st.lists(st.sampled_from(["ab", "a", "b", "STOP", "ST", "🎉", "é"])).map("".join)
)
STOPS = st.lists(st.one_of(st.text(min_size=1, max_size=4), st.sampled_from(["ab", "aab", "STOP", "🎉a"])), max_size=4)


@pytest.fixture(scope="module")
def token_bytes(raw_tokenizer: RawTokenizer) -> TokenBytes:
    return TokenBytes(raw_tokenizer, json.loads(raw_tokenizer.to_str()))


def run(detokenizer: Detokenizer, ids: list[int], cuts: list[int]) -> list[str]:
    edges = [0, *sorted(cut % (len(ids) + 1) for cut in cuts), len(ids)]
    return [*(detokenizer.feed(ids[start:end]) for start, end in pairwise(edges)), detokenizer.finish()]


@settings(max_examples=300, deadline=None)
@given(
    ids=st.lists(st.integers(0, 601), max_size=40), cuts=st.lists(st.integers(0, 100), max_size=6), skip=st.booleans()
)
def test_any_cut_of_any_tokens_is_the_decoded_whole(
    token_bytes: TokenBytes, raw_tokenizer: RawTokenizer, ids: list[int], cuts: list[int], skip: bool
) -> None:
    texts = run(Detokenizer(token_bytes, TextRules(skip_special=skip)), ids, cuts)
    assert "".join(texts) == raw_tokenizer.decode(ids, skip_special_tokens=skip)


def reference(text: str, stops: list[str], include: bool) -> str:
    """Character by character: the first moment at which the text ends with a stop string, the longest of them."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            return text[: end if include else end - max(map(len, met))]
    return text


@settings(max_examples=500, deadline=None)
@given(text=TEXT, stops=STOPS, cuts=st.lists(st.integers(0, 100), max_size=8), include=st.booleans())
def test_stop_strings_match_wherever_the_tokens_are_cut(
    token_bytes: TokenBytes, raw_tokenizer: RawTokenizer, text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    text = text.encode("utf-8", "replace").decode()
    ids = raw_tokenizer.encode(text, add_special_tokens=False).ids
    detokenizer = Detokenizer(token_bytes, TextRules(stops=tuple(stops), include_stop=include, skip_special=False))
    expected = reference(text, stops, include)
    released = ""
    for part in run(detokenizer, ids, cuts):
        released += part
        assert expected.startswith(released), "a part of a stop string leaked"
    assert released == expected
    assert detokenizer.stopped == (expected != text or any(text.endswith(stop) for stop in stops))
    assert detokenizer.text_len == len(released)


def test_an_incomplete_character_is_held(token_bytes: TokenBytes) -> None:
    first, *rest = _byte_ids(token_bytes, "🎉".encode())
    detokenizer = Detokenizer(token_bytes, TextRules())
    assert detokenizer.feed([first]) == ""
    assert detokenizer.feed(rest) == "🎉"


def test_terminal_tokens_never_show(token_bytes: TokenBytes, raw_tokenizer: RawTokenizer) -> None:
    ids = raw_tokenizer.encode("Paris", add_special_tokens=False).ids
    end = raw_tokenizer.encode("1", add_special_tokens=False).ids
    assert Detokenizer(token_bytes, TextRules(terminal_ids=frozenset(end))).feed(ids + end) == "Paris"


def _byte_ids(token_bytes: TokenBytes, data: bytes) -> list[int]:
    by_byte = {token_bytes[id_]: id_ for id_ in range(600) if len(token_bytes[id_]) == 1}
    return [by_byte[bytes([byte])] for byte in data]


def test_a_sentencepiece_vocabulary_is_decoded() -> None:
    """Gemma has rows of spaces as added tokens."""
    layout = {
        "version": "1.0",
        "added_tokens": [
            {"id": 5, "content": "▁▁", "special": False, "normalized": False}
            | dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
            ],
        },
        "model": {
            "type": "BPE",
            "byte_fallback": True,
            "vocab": {"▁Hello": 0, "▁": 1, "<0xC3>": 2, "<0xA9>": 3, "x": 4, "▁▁": 5},
            "merges": [],
        },
    }
    raw = RawTokenizer.from_str(json.dumps(layout))
    table = TokenBytes(raw, layout)
    ids = [0, 1, 2, 3, 4, 5, 4]
    assert "".join(run(Detokenizer(table, TextRules()), ids, [1, 2, 3])) == raw.decode(ids) == " Hello éx  x"
