"""The trie: the results that TGI documents for its own, holds and namespaces."""

from __future__ import annotations

import pytest

from cache.allocators.radix_trie import RadixTrie
from cache.types import BlockHash, BlockId


def ids(*values: int) -> list[BlockId]:
    return [BlockId(value) for value in values]


def insert(trie: RadixTrie, *keys: int) -> int:
    """Insert keys that are their own blocks, as in TGI's tests."""
    known, _ = trie.insert(trie.root(), keys, ids(*keys), [b"" for _ in keys])  # type: ignore[list-item]
    return len(known)


def find(trie: RadixTrie, *keys: int, namespace: object = None) -> list[BlockId]:
    """Return the blocks of the longest prefix, and mark them as used."""
    match = trie.match(trie.root(namespace), keys)  # type: ignore[arg-type]
    trie._touch(match.last)
    return match.block_ids


def test_insertions_return_the_known_prefix() -> None:
    trie = RadixTrie()
    assert insert(trie, 0, 1, 2) == 0
    assert insert(trie, 0, 1, 2) == 3
    assert insert(trie, 1, 2, 3) == 0
    assert insert(trie, 0, 1, 2, 3, 4) == 3
    assert insert(trie, 0, 1, 2, 3, 5, 6, 7) == 4
    trie.check_integrity([])


def test_eviction_cuts_leaves() -> None:
    trie = RadixTrie()
    insert(trie, 0, 1, 2)
    insert(trie, 0, 1, 2, 3, 5, 6, 7)
    insert(trie, 0, 1, 2, 3, 4)
    insert(trie, 1, 2, 3)
    assert trie.evict(1)[0] == [7]
    assert find(trie, 0, 1, 2, 3, 5, 6, 7) == [0, 1, 2, 3, 5, 6]
    find(trie, 0, 1, 2, 3, 4)
    find(trie, 1, 2, 3)
    assert trie.evict(2)[0] == [5, 6]
    assert find(trie, 0, 1, 2, 3, 5, 6, 7) == [0, 1, 2, 3]
    find(trie, 1, 2, 3)
    assert trie.evict(3)[0] == [4, 3, 2]
    assert find(trie, 0, 1, 2, 3, 4) == [0, 1]
    assert trie.evict(10)[0] == [1, 2, 3, 0, 1]
    trie.check_integrity([])
    assert trie.num_blocks == 0


def test_eviction_returns_the_hashes_of_every_leaf() -> None:
    trie = RadixTrie()
    for keys in ((0, 1, 2), (0, 1, 3, 4), (5, 6)):
        trie.insert(trie.root(), keys, ids(*keys), [BlockHash(bytes([key])) for key in keys])
    block_ids, hashes = trie.evict(5)
    assert block_ids == [2, 3, 4, 0, 1]
    assert hashes == [bytes([key]) for key in (2, 4, 3, 1, 0)]


def test_a_partial_match_goes_no_deeper() -> None:
    trie = RadixTrie()
    insert(trie, 0, 1, 2)
    insert(trie, 0, 1, 2, 9)
    assert find(trie, 0, 1, 9) == [0, 1]  # 9 follows 2, not 1


def test_an_empty_namespace_is_forgotten() -> None:
    trie = RadixTrie()
    for namespace in range(100):
        trie.insert(trie.root(namespace), [0], ids(1), [b""])  # type: ignore[list-item]
        trie.evict(1)
        trie.release(trie.hold(trie.match(trie.root(namespace), [0])))
        assert find(trie, 0, namespace=namespace) == []
    assert list(trie.nodes()) == []


def test_every_key_has_one_block() -> None:
    trie = RadixTrie()
    with pytest.raises(AssertionError, match="2 keys for 1 blocks"):
        trie.insert(trie.root(), [0, 1], ids(1))
