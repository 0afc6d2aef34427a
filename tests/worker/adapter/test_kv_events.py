"""Batches as real engines sent them, in every layout, and bytes that are none."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fake_engine import radix
from worker.adapter.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EventBatch, EventError, decode_batch

SALT = "00112233445566778899aabbccddeeff"
HASHES = [15212648955765375879, 1, 2, 3, 4, 5]
CAPTURED = {
    "type": "BlockStored",
    "block_hashes": HASHES,
    "parent_block_hash": None,
    "token_ids": list(range(192)),
    "block_size": 32,
    "lora_id": None,
    "medium": "GPU",
    "lora_name": None,
    "extra_keys": [[SALT], None, None, None, None, None],
    "group_idx": 0,
    "kv_cache_spec_kind": "full_attention",
}
"""As vLLM 0.32.0 sent it."""


def batch(*events: Any, rank: tuple[Any, ...] = (0,)) -> EventBatch:
    return decode_batch(msgpack.packb([1795317799.93, list(events), *rank]))


def test_vllm_sends_maps() -> None:
    decoded = batch(CAPTURED)
    assert decoded.ts == 1795317799.93
    (stored,) = decoded.events
    assert stored == BlockStored(
        block_hashes=tuple(HASHES),
        token_ids=tuple(range(192)),
        block_size=32,
        medium="GPU",
        extra_keys=((SALT,), None, None, None, None, None),
        group_idx=0,
        kv_cache_spec_kind="full_attention",
    )


def test_blocks_of_other_tiers_may_have_no_size() -> None:
    """vLLM sends so what it offloads, in a batch with blocks of the GPU (`_placeholder_stored` of its connector)."""
    offloaded = {"type": "BlockStored", "block_hashes": [1], "token_ids": [], "block_size": 0, "medium": "CPU"}
    stored, other = batch(CAPTURED, offloaded).events
    assert (stored, other) == (batch(CAPTURED).events[0], BlockStored((1,), block_size=0, medium="CPU"))


def sglang_batch(*events: radix.CacheEvent) -> EventBatch:
    return decode_batch(radix.pack(1.5, events, 3))


@pytest.mark.parametrize("session", [None, "s1"])
def test_sglang_sends_maps_with_the_salt(session: str | None) -> None:
    cache = radix.RadixCache(2)
    cache.insert((5, 6, 7, 8, 9), radix.Space(SALT, "pirate", "1" * 32), session)
    cache.evict(cache.leaves()[0])
    cache.reset()
    decoded = sglang_batch(*cache.take_events())
    stored, removed, cleared = decoded.events
    assert decoded.ts == 1.5
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.block_size, stored.lora_name) == ((5, 6, 7, 8), 2, "pirate")
    assert (stored.cache_salt, stored.is_bigram, stored.extra_keys) == (SALT, False, None)
    assert removed == BlockRemoved(stored.block_hashes[-1:], "GPU")
    assert cleared == AllBlocksCleared()


def test_sglang_with_eagle_sends_pairs() -> None:
    cache = radix.RadixCache(2, has_pairs=True)
    cache.insert((5, 6, 7, 8, 9), radix.Space(SALT))
    cache.evict(cache.leaves()[0])
    stored, removed = sglang_batch(*cache.take_events()).events
    assert isinstance(stored, BlockStored)
    assert (stored.token_ids, stored.block_size, stored.cache_salt, stored.is_bigram) == ((5, 6, 7, 8), 2, SALT, True)
    assert removed == BlockRemoved(stored.block_hashes[-1:], "GPU")
    for wrong in ([(5, 6), 7], [(5, 6, 7)], [(5, -1)], [("a", "b")]):
        with pytest.raises(EventError):
            sglang_batch(radix.BlockStored([1], None, wrong, len(wrong), None))


def test_a_batch_may_be_a_map() -> None:
    packed = msgpack.packb({"ts": 1.0, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 3})
    assert decode_batch(packed) == EventBatch(1.0, (AllBlocksCleared(),))


@pytest.mark.parametrize("key", [7, 2**64 - 1, -(2**63), b"\x01" * 32])
def test_hashes_are_numbers_or_bytes(key: int | bytes) -> None:
    removed = batch({"type": "BlockRemoved", "block_hashes": [key], "medium": "GPU", "group_idx": 0})
    assert removed.events == (BlockRemoved((key,), "GPU", 0),)
    stored = batch({"type": "BlockStored", "block_hashes": [key], "parent_block_hash": key, "token_ids": [5]})
    assert stored.events == (BlockStored((key,), key, (5,)),)


def test_fields_may_be_missing_or_unknown() -> None:
    decoded = batch(
        {"type": "BlockRemoved", "block_hashes": [1]},
        {"type": "BlockStored", "block_hashes": [2], "token_ids": [3], "block_size": 1, "session_id": "s", "x": [{}]},
        {"type": "AllBlocksCleared", "why": None},
        rank=(1, "later", {}),
    )
    assert decoded.events == (BlockRemoved((1,)), BlockStored((2,), None, (3,), 1), AllBlocksCleared())
    assert batch(rank=()).events == ()


@pytest.mark.parametrize(
    "event",
    [
        {"type": "BlockMoved", "block_hashes": [1]},
        {"type": "BlockStored"},
        {"type": "BlockStored", "block_hashes": ["text"]},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [-1], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [2**32], "block_size": 1},
        {"type": "BlockStored", "block_hashes": [1], "token_ids": [], "block_size": 0},
        {"type": "BlockStored", "block_hashes": [1], "extra_keys": "salt"},
        ["BlockStored", [1], None, [5], 1],
        [],
        None,
        7,
    ],
)
def test_what_is_no_event_is_refused(event: Any) -> None:
    with pytest.raises(EventError):
        batch(event)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x91" * 100_000,
        b"\xdd\xff\xff\xff\xff",
        b"\x93\xcb\x7f\xf8",
        msgpack.packb("text"),
        msgpack.packb([]),
        msgpack.packb({}),
        msgpack.packb([1.0, [{"type": "\ud800"}]], unicode_errors="surrogatepass"),
    ],
)
def test_what_is_no_batch_is_refused(payload: bytes) -> None:
    with pytest.raises(EventError):
        decode_batch(payload)


@given(st.binary(max_size=60), st.integers(0, 400), st.integers(0, 60))
def test_any_bytes_give_a_batch_or_an_error(noise: bytes, at: int, num_cut: int) -> None:
    packed = msgpack.packb([1.0, [CAPTURED], 0])
    for payload in (noise, packed[:at] + noise + packed[at + num_cut :]):
        with suppress(EventError):
            assert isinstance(decode_batch(payload), EventBatch)
