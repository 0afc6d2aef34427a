from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.stores.chain_lru import ChainLRU
from cache.types import BlockHash, ChainLink
from tests.block_events import replay
from tests.cache.stores.store_parts import chain, tree

LINKS = tree(3)
STEPS = st.lists(st.tuples(st.sampled_from(("add", "add", "add", "touch", "evict", "forget")), st.integers(0, 27)))


@given(STEPS)
def test_any_history_is_that_of_a_plain_list(steps: list[tuple[str, int]]) -> None:
    """Compare with a list sorted by last use, which is searched for the first leaf."""
    lru = ChainLRU()
    used: list[ChainLink] = []
    records: dict[BlockHash, int] = {}
    published: set[BlockHash] = set()
    for number, (what, at) in enumerate(steps):
        link = LINKS[at % len(LINKS)]
        has_parent = link.depth == 0 or link.parent in records
        assert lru.accepts(link) == (has_parent and link.block_hash not in records)
        match what:
            case "add" if lru.accepts(link):
                lru.add(link, number)
                records[link.block_hash] = number
                used.append(link)
            case "touch" if (held := lru.get(link.block_hash)) is not None:
                assert (held.link, held.record) == (link, records[link.block_hash])
                lru.touch(held)
                used.remove(link)
                used.append(link)
            case "evict":
                parents = {link.parent for link in used}
                leaves = [leaf for leaf in used if leaf.block_hash not in parents | {link.block_hash}]
                expected = records.pop(leaves[0].block_hash) if leaves else None
                assert lru.evict(keep=link.block_hash) == expected
                used = [link for link in used if link.block_hash in records]
            case "forget":
                lost = [BlockHash(link.block_hash)] if link.block_hash in records else []
                for held_link in LINKS:
                    if held_link.parent in lost and held_link.block_hash in records:
                        lost.append(held_link.block_hash)
                found = lru.forget(lambda held, link=link: held.link == link)  # type: ignore[misc]
                assert sorted(found) == sorted(records.pop(block_hash) for block_hash in lost)
                used = [link for link in used if link.block_hash in records]
        before = set(published)
        events = lru.take_events()
        replay(events, published)
        assert published == set(lru._blocks) == set(records)
        assert len(events) == len(published ^ before), "an event changed nothing"
        order = {block_hash: place for place, block_hash in enumerate(lru._blocks)}
        assert all(link.depth == 0 or order[link.parent] < order[link.block_hash] for link in used)
        assert len(lru._leaves) <= len(lru), "the queue of leaves grows without bound"


def test_a_block_without_its_parent_is_a_broken_invariant() -> None:
    with pytest.raises(AssertionError, match="not held"):
        ChainLRU().add(chain([0, 1])[1], 0)


def test_a_parent_at_another_depth_is_no_parent() -> None:
    links = chain([0, 1])
    lru = ChainLRU()
    lru.add(links[0], 0)
    assert not lru.accepts(ChainLink(links[1].block_hash, links[1].parent, 2))
