"""Window by window gives the ids of the whole, for words of any length and kind."""

from __future__ import annotations

import json
from functools import cache
from itertools import chain
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, normalizers
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from server.text.detokenizer import BYTE_ALPHABET
from server.text.long_words import long_words, merged
from tests.server.text.test_pretoken_cache import LAYOUTS, layout_of

UNITS = [
    "a",
    "the",
    "THE quick ",
    "=",
    "-=#",
    "<|im_end|>",
    " ",
    "  \n",
    "\n",
    "\t ",
    "\r\n",
    "0",
    "9a",
    "it's",
    "'",
    "é",
]
UNITS += [
    "中文",
    "e\u0301",
    "q\u0323\u0307",
    "\u0301",
    "\u1100\u1161",
    "가",
    "🎉",
    "ß",
    "\u00a0",
    "\u3000",
    "\x04",
    "\x1d",
    "\x85",
    "_a",
    ".",
]
PIECES = st.tuples(st.one_of(st.sampled_from(UNITS), st.text(max_size=4)), st.sampled_from([1, 1, 2, 7, 60, 300]))
TEXTS = st.lists(PIECES, min_size=1, max_size=5).map(lambda pieces: "".join(unit * times for unit, times in pieces))


@cache
def tokenizer_of(name: str, *, composes: bool) -> tuple[Tokenizer, dict[str, Any]]:
    layout = layout_of(name)
    if composes:  # as the families that do: with a token for each byte
        for char in BYTE_ALPHABET:
            layout["model"]["vocab"].setdefault(char, len(layout["model"]["vocab"]))
    tokenizer = Tokenizer.from_str(json.dumps(layout))
    if composes:
        tokenizer.normalizer = normalizers.NFC()
    return tokenizer, json.loads(tokenizer.to_str())


@pytest.mark.parametrize("composes", [False, pytest.param(True, marks=pytest.mark.e2e)])
@pytest.mark.parametrize("name", LAYOUTS)
@settings(max_examples=150, deadline=None)
@given(text=TEXTS, num_chars=st.sampled_from([81, 100, 300]), begin=st.integers(0, 3))
def test_windows_give_the_ids_of_the_whole(name: str, composes: bool, text: str, num_chars: int, begin: int) -> None:
    tokenizer, layout = tokenizer_of(name, composes=composes)
    windows = _windows(name, composes, num_chars)
    assert windows is not None, f"{layout['pre_tokenizer']} is exact"
    around = "x" * begin + text + "y" * begin
    ids = list(chain.from_iterable(windows.ids(around, begin, begin + len(text))))
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


def check_whole(name: str, composes: bool, num_chars: int, text: str) -> None:
    tokenizer, _ = tokenizer_of(name, composes=composes)
    ids = list(chain.from_iterable(_windows(name, composes, num_chars).ids(text, 0, len(text))))
    assert ids == tokenizer.encode(text, add_special_tokens=False).ids


def test_a_vocabulary_of_bytes_alone() -> None:
    vocab = {char: number for number, char in enumerate(sorted(BYTE_ALPHABET))}
    tokenizer = Tokenizer(BPE(vocab, []))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    text = "中文 " * 900
    found = long_words(tokenizer, json.loads(tokenizer.to_str()), 81)
    assert found is not None
    assert list(chain.from_iterable(found.ids(text, 0, len(text)))) == tokenizer.encode(text).ids


def test_a_word_that_a_combining_mark_ends_is_encoded_whole() -> None:
    check_whole("smollm2", True, 81, "a" * 300 + "q\u0323\u0307  \na")


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("text", ["THE quick \x1d" + " " * 300, "\r\n" + " " * 300, "a\x1c" + " " * 300 + "b"])
def test_long_runs_of_spaces_behind_what_only_python_calls_space(name: str, text: str) -> None:
    for composes in (False, True):
        check_whole(name, composes, 81, text)


@pytest.mark.parametrize("num_chars", [81, 100, 300])
@pytest.mark.parametrize("marks", ["\u0301", "\u0323\u0307", "\u0307\u0323\u0315", "\u1161"])
def test_runs_of_combining_characters_longer_than_a_window(marks: str, num_chars: int) -> None:
    check_whole("smollm2", True, num_chars, "\u1f97&q" + marks * 700 + "&e" + marks * 90 + " end")


@cache
def _windows(name: str, composes: bool, num_chars: int) -> Any:
    return long_words(*tokenizer_of(name, composes=composes), num_chars)


@settings(max_examples=150, deadline=None)
@given(word=st.text("abcdehinorst=-", min_size=1, max_size=600), size=st.integers(100, 300))
def test_a_word_is_merged_as_the_library_merges_it(word: str, size: int) -> None:
    tokenizer, _ = tokenizer_of("gpt2", composes=False)
    expected = [token.id for token in tokenizer.model.tokenize(word)]
    assert list(chain.from_iterable(merged(tokenizer.model, word.encode(), size))) == expected
