from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import pre_tokenizers

from server.text.tokenizer import INLINE_CHARS, SegmentCache, Tokenizer, TokenizerError
from worker.wire import TokenizerBundle

PARTS = st.lists(
    st.one_of(
        st.sampled_from(
            ["<|im_start|>", "<|im_end|>", "<|im_", "<think>", "</think>", "\n", " ", "user\n", "The capital"]
        ),
        st.text(max_size=12),
    ),
    max_size=12,
).map("".join)


@pytest.fixture(scope="module")
def executor() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1)


@pytest.fixture(scope="module")
def tokenizer(bundle: TokenizerBundle, executor: ThreadPoolExecutor) -> Tokenizer:
    return Tokenizer(bundle, executor)


@settings(max_examples=300, deadline=None)
@given(text=PARTS)
def test_segments_in_a_row_are_the_whole(tokenizer: Tokenizer, raw_tokenizer: RawTokenizer, text: str) -> None:
    assert tokenizer.caches_segments
    whole = raw_tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.encode_text(text) == whole
    assert tokenizer.encode_text(text) == whole, "from the cache"


def test_returned_ids_do_not_alias_the_cache(tokenizer: Tokenizer) -> None:
    first = tokenizer.encode_text("alias me")
    first.append(0)
    assert tokenizer.encode_text("alias me") == first[:-1]


async def test_long_text_in_a_thread_equals_inline(tokenizer: Tokenizer, raw_tokenizer: RawTokenizer) -> None:
    text = "The weather is fine. " * (INLINE_CHARS // 10)
    assert await tokenizer.encode(text) == raw_tokenizer.encode(text, add_special_tokens=False).ids


def test_bos_is_added_once(bundle: TokenizerBundle, executor: ThreadPoolExecutor) -> None:
    with_bos = Tokenizer(dataclasses.replace(bundle, add_bos=True), executor)
    assert with_bos.encode_text("hi", add_bos=True)[0] == 0
    assert with_bos.encode_text("<|endoftext|>hi", add_bos=True).count(0) == 1
    assert 0 not in with_bos.encode_text("hi")


def test_no_segments_where_the_first_one_is_special(bundle: TokenizerBundle, executor: ThreadPoolExecutor) -> None:
    raw = RawTokenizer.from_buffer(bundle.tokenizer_json)
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    changed = dataclasses.replace(bundle, tokenizer_json=raw.to_str().encode())
    assert not Tokenizer(changed, executor).caches_segments


def test_a_broken_bundle_is_refused_by_name(bundle: TokenizerBundle, executor: ThreadPoolExecutor) -> None:
    with pytest.raises(TokenizerError, match="tokenizer_json"):
        Tokenizer(dataclasses.replace(bundle, tokenizer_json=b"{}"), executor)


def test_segment_cache_is_bounded_and_drops_the_oldest() -> None:
    cache = SegmentCache(max_bytes=6000)
    for index in range(50):
        cache.put(str(index), [1] * 9)
    found = cache.get_many([str(index) for index in range(50)])
    assert [index for index, ids in enumerate(found) if ids] == list(range(40, 50))
    cache.put("huge", [1] * 45)
    cache.put("long" * 500, [1])
    assert cache.get_many(["huge", "long" * 500]) == [None, None]
