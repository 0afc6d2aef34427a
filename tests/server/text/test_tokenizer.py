from __future__ import annotations

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RawTokenizer
from tokenizers import pre_tokenizers

from server.text.tokenizer import SegmentCache, Tokenizer, TokenizerError
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
async def test_ids_of_segments_in_a_row_are_those_of_the_whole(
    tokenizer: Tokenizer, raw_tokenizer: RawTokenizer, text: str
) -> None:
    assert tokenizer._cut is not None
    whole = raw_tokenizer.encode(text, add_special_tokens=False).ids
    assert await tokenizer.encode(text) == whole
    assert await tokenizer.encode(text) == whole, "from the cache"


async def test_returned_ids_do_not_alias_the_cache(tokenizer: Tokenizer) -> None:
    first = await tokenizer.encode("alias me")
    first.append(0)
    assert await tokenizer.encode("alias me") == first[:-1]


async def test_bos_is_added_once(bundle: TokenizerBundle, executor: ThreadPoolExecutor) -> None:
    with_bos = Tokenizer(dataclasses.replace(bundle, add_bos=True), executor)
    assert (await with_bos.encode("hi", add_bos=True))[0] == 0
    assert (await with_bos.encode("<|endoftext|>hi", add_bos=True)).count(0) == 1
    assert 0 not in await with_bos.encode("hi")


def test_a_tokenizer_with_a_special_first_segment_is_not_cut(
    bundle: TokenizerBundle, executor: ThreadPoolExecutor
) -> None:
    raw = RawTokenizer.from_buffer(bundle.tokenizer_json)
    raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    changed = dataclasses.replace(bundle, tokenizer_json=raw.to_str().encode())
    assert Tokenizer(changed, executor)._cut is None


def test_a_broken_bundle_is_refused_by_name(bundle: TokenizerBundle, executor: ThreadPoolExecutor) -> None:
    with pytest.raises(TokenizerError, match="tokenizer_json"):
        Tokenizer(dataclasses.replace(bundle, tokenizer_json=b"{}"), executor)


def test_segment_cache_is_bounded_and_drops_the_oldest() -> None:
    cache = SegmentCache(max_bytes=6000)
    for index in range(50):
        cache.put(str(index), [1] * 9)
    assert [index for index in range(50) if cache.get(str(index))] == list(range(40, 50))
    cache.put("huge", [1] * 45)
    cache.put("long" * 500, [1])
    assert cache.get("huge") is cache.get("long" * 500) is None
