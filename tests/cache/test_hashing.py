from __future__ import annotations

import struct
from contextlib import nullcontext
from hashlib import blake2b

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.hashing import MediaStart, Namespace, check_hashes, encode_tokens, hash_chain, index_entry
from cache.types import BlockHash

NAMESPACE = Namespace(model="SmolLM2-135M-Instruct", revision="r1", tokenizer="t1", block_size=4)
TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)
STARTS = st.tuples(st.sampled_from(["", "a", "ab", "b"]), st.integers(0, 50))
MEDIA = st.lists(STARTS, max_size=4, unique_by=lambda start: start[1])


def test_golden_vectors() -> None:
    """The format is a contract between versions and processes: these values never change."""
    root = NAMESPACE.root(salt=b"salt")
    assert NAMESPACE.fingerprint == "0e60788967df6511e0ec98df046d1783"
    assert root.hex() == "c776a04f61d5ee9e8533e78a91675011"
    assert [link.hex() for link in hash_chain(root, [0, 1, 2, 3, 4, 5, 2**32 - 1, 7, 8], 4)] == [
        "68d03023735e43425732bb01eb6f8081",
        "34920b39dc269fd6f1dda22882f0a5fa",
    ]
    assert index_entry(BlockHash(root)) == root[:8]


def test_golden_vectors_with_media() -> None:
    """Two media in the first block: only that block's input grows, and all hashes after it change."""
    media = [MediaStart("a", 1), MediaStart("é", 2)]
    chain = hash_chain(NAMESPACE.root(salt=b"salt"), range(12), 4, media)
    entries = b"\1\0\0\0a\1\0\0\0" + b"\2\0\0\0" + "é".encode() + b"\2\0\0\0"
    hashed = NAMESPACE.root(salt=b"salt") + struct.pack("<4I", 0, 1, 2, 3) + entries
    first = BlockHash(blake2b(hashed, digest_size=16, person=b"headstart-block").digest())
    assert chain == [first, *hash_chain(first, range(4, 12), 4)]
    assert [link.hex() for link in chain] == [
        "3935ddb98bb4c0b89776afc5c68d1251",
        "5dde532cb851212e04020430d1c5ff54",
        "eef62ccec757d8fa635d7852531e82ca",
    ]


@given(st.integers(4, 40), st.integers(1, 5), MEDIA, MEDIA)
def test_media_count_from_their_block_on(
    num_tokens: int, block_size: int, left: list[tuple[str, int]], right: list[tuple[str, int]]
) -> None:
    """Chains over equal tokens are equal up to the first block whose media differ."""
    chains, media = [], [sorted((MediaStart(*m) for m in side), key=lambda m: m.position) for side in (left, right)]
    for side in media:
        chains.append(hash_chain(NAMESPACE.root(salt=b""), range(num_tokens), block_size, side))
    for block, hashes in enumerate(zip(*chains, strict=True)):
        begun = [[m for m in side if m.position < (block + 1) * block_size] for side in media]
        assert (hashes[0] == hashes[1]) == (begun[0] == begun[1])


@given(TOKENS, st.integers(1, 5))
def test_each_block_is_hashed_onto_the_one_before(token_ids: list[int], block_size: int) -> None:
    parent = root = NAMESPACE.root(salt=b"x")
    expected = []
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        block = encode_tokens(token_ids[start : start + block_size])
        parent = BlockHash(blake2b(parent + block, digest_size=16, person=b"headstart-block").digest())
        expected.append(parent)
    assert hash_chain(root, token_ids, block_size) == expected


@given(TOKENS, TOKENS)
def test_hashes_agree_exactly_on_the_common_prefix(left: list[int], right: list[int]) -> None:
    root = NAMESPACE.root(salt=b"x")
    for block, (a, b) in enumerate(zip(hash_chain(root, left, 4), hash_chain(root, right, 4), strict=False)):
        assert (a == b) == (left[: 4 * block + 4] == right[: 4 * block + 4])


@pytest.mark.parametrize(
    "other",
    [
        Namespace("SmolLM2-135M-Instruct", "r1", "t1", 8),
        Namespace("SmolLM2-135M-Instruct", "r1", "t2", 4),
        Namespace("SmolLM2-135M-Instruct", "r2", "t1", 4),
        Namespace("other", "r1", "t1", 4),
        Namespace("SmolLM2-135M-Instructr1", "", "t1", 4),  # no two field sets share an encoding
    ],
)
def test_every_field_of_the_namespace_counts(other: Namespace) -> None:
    assert other.fingerprint != NAMESPACE.fingerprint
    assert other.root(salt=b"s") != NAMESPACE.root(salt=b"s")


def test_salt_and_adapter_count() -> None:
    roots = {
        NAMESPACE.root(salt=s, adapter=a) for s, a in [(b"", ""), (b"a", ""), (b"", "a"), (b"a", "a"), (b"aa", "")]
    }
    assert len(roots) == 5


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_token_ids_outside_u32_are_refused(token_id: int) -> None:
    with pytest.raises(OverflowError):
        encode_tokens([token_id])


def test_block_size_is_checked() -> None:
    with pytest.raises(ValueError, match="block_size must be at least 1, got 0"):
        Namespace("m", "r", "t", 0)


def test_only_whole_hashes_pass() -> None:
    for num_bytes in range(65):
        with pytest.raises(ValueError, match="whole number") if num_bytes % 16 else nullcontext():
            check_hashes(bytes(num_bytes))
