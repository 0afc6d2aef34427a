"""Properties of both stores."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.stores.base import BlockStore
from cache.stores.host import HostStore
from cache.types import BlockHash, ChainLink
from tests.block_events import replay
from tests.cache.held import cached_hashes
from tests.cache.stores.store_parts import (
    PAYLOAD_BYTES,
    RECORD,
    assert_prefix_closed,
    chain,
    open_disk,
    payload_of,
    reads_exactly,
    tree,
    write,
)

MakeStore = Callable[[int], BlockStore]


@pytest.fixture(params=["host", "disk"])
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> MakeStore:
    """Make a store of a given number of blocks."""

    def make(num_blocks: int) -> BlockStore:
        if request.param == "disk":
            return open_disk(tmp_path, num_blocks)
        return HostStore([memoryview(bytearray(PAYLOAD_BYTES * num_blocks + 7))], PAYLOAD_BYTES)

    return make


def test_it_is_a_block_store(make_store: MakeStore) -> None:
    store: BlockStore = make_store(3)
    links = chain([0, 1, 0, 1])
    assert write(store, *links) == [True, True, True, False], "the fourth has no room but its own parent's"
    assert [reads_exactly(store, link) for link in links] == [True, True, True, False]
    assert store.match([link.block_hash for link in links]) == 3
    assert links[2].block_hash in store
    assert links[3].block_hash not in store
    assert cached_hashes(store) == [link.block_hash for link in links[:3]]
    assert replay(store.take_events()) == set(cached_hashes(store))
    assert store.take_events() == []


def test_a_read_and_a_second_write_are_uses(make_store: MakeStore) -> None:
    store = make_store(3)
    first, second, third, fourth, fifth = (chain([token])[0] for token in range(5))
    write(store, first, second, third)
    assert reads_exactly(store, first)
    write(store, second, fourth)
    assert set(cached_hashes(store)) == {first.block_hash, second.block_hash, fourth.block_hash}
    write(store, fifth)
    assert set(cached_hashes(store)) == {second.block_hash, fourth.block_hash, fifth.block_hash}


def test_a_link_that_differs_is_a_miss_and_drops_nothing(make_store: MakeStore) -> None:
    store = make_store(3)
    (link,) = chain([0])
    write(store, link)
    assert not reads_exactly(store, ChainLink(link.block_hash, link.block_hash, 0))
    assert not reads_exactly(store, ChainLink(link.block_hash, link.parent, 1))
    assert reads_exactly(store, link)


def test_a_clear_drops_all_without_events(make_store: MakeStore) -> None:
    store = make_store(3)
    links = chain([0, 1, 0])
    write(store, *links)
    version = store.version
    store.clear()
    assert store.version != version
    assert len(store) == 0
    assert store.take_events() == []
    assert not any(reads_exactly(store, link) for link in links)
    assert not store.write(links[0], payload_of(links[0]), version), "a block from before the purge was written"
    assert write(store, *links) == [True] * 3


def test_a_closed_store_has_nothing_and_takes_nothing(make_store: MakeStore) -> None:
    store = make_store(3)
    (link,) = chain([0])
    write(store, link)
    store.close()
    store.close()
    assert len(store) == 0
    assert not reads_exactly(store, link)
    assert write(store, link) == [False]
    store.clear()


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_write_under_way_brings_nothing_back_after_a_clear(make_store: MakeStore, when: str) -> None:
    store = make_store(2)
    keep = store._write_record
    links = chain([0, 1])

    def clear_while_writing(payload: memoryview, link: ChainLink, record: int) -> bool:
        if when == "before":
            store.clear()
        is_written = keep(payload, link, record)
        if when == "after":
            store.clear()
        return is_written

    store._write_record = clear_while_writing  # type: ignore[method-assign]
    assert write(store, links[0]) == [False]
    store._write_record = keep  # type: ignore[method-assign]
    assert len(store) == 0
    assert store.take_events() == []
    assert write(store, *links) == [True, True], "a record was lost"
    assert all(reads_exactly(store, link) for link in links)


def test_a_record_in_use_by_a_cleared_write_is_not_reused(make_store: MakeStore) -> None:
    store = make_store(1)
    keep = store._write_record
    late, early = chain([0])[0], chain([1])[0]

    def write_another_first(payload: memoryview, link: ChainLink, record: int) -> bool:
        store._write_record = keep  # type: ignore[method-assign]
        store.clear()
        if write(store, early) == [True]:
            assert store.tier == "disk", "two writes share a record"
        return keep(payload, link, record)

    store._write_record = write_another_first  # type: ignore[method-assign]
    write(store, late)
    assert write(store, early) == [True]
    assert reads_exactly(store, early)


def test_a_record_that_is_overwritten_while_it_is_read_is_a_miss(make_store: MakeStore) -> None:
    store = make_store(1)
    old, new = chain([0])[0], chain([1])[0]
    write(store, old)
    fill = store._read_record

    def overwrite_first(payload: memoryview, link: ChainLink, record: int) -> bool:
        assert write(store, new) == [True]
        return fill(payload, link, record)

    store._read_record = overwrite_first  # type: ignore[method-assign]
    assert not reads_exactly(store, old)
    store._read_record = fill  # type: ignore[method-assign]
    assert reads_exactly(store, new), "the block that took the record was dropped for the one before"


def test_blocks_in_memory_are_copied_in_place(make_store: MakeStore) -> None:
    store = make_store(2)
    (link,) = chain([0])
    payload, rooms = memoryview(bytearray(PAYLOAD_BYTES)), list[memoryview]()

    def fill(room: memoryview) -> bool:
        rooms.append(room)
        room[:] = payload_of(link)
        return True

    assert store.write(link, payload, store.version, fill)
    payload[:] = bytes(PAYLOAD_BYTES)
    assert store.read(link, payload, rooms.append)
    assert rooms[1] == payload_of(link)
    assert all((room is payload) == (store.tier == "disk") for room in rooms)
    assert (payload == bytes(PAYLOAD_BYTES)) == (store.tier == "host"), "a block was copied twice"
    assert reads_exactly(store, link)


def test_a_record_overwritten_while_it_is_copied_is_a_miss(make_store: MakeStore) -> None:
    store = make_store(1)
    old, new = chain([0])[0], chain([1])[0]
    write(store, old)
    payload = memoryview(bytearray(PAYLOAD_BYTES))
    assert not store.read(old, payload, lambda room: write(store, new))
    assert reads_exactly(store, new)


def test_a_block_that_cannot_be_copied_takes_no_record(make_store: MakeStore) -> None:
    store = make_store(1)
    old, new = chain([0])[0], chain([1])[0]
    payload = memoryview(bytearray(PAYLOAD_BYTES))
    assert not store.write(old, payload, store.version, lambda room: False)
    with pytest.raises(ZeroDivisionError):
        store.write(old, payload, store.version, lambda room: bool(1 / 0))
    assert not reads_exactly(store, old)
    assert write(store, new) == [True], "the record was lost"
    assert reads_exactly(store, new)


def test_a_parent_evicted_during_a_write_makes_it_fail(make_store: MakeStore) -> None:
    store = make_store(3)
    parent, child = chain([0, 1])
    write(store, parent)
    keep = store._write_record

    def lose_the_parent(payload: memoryview, link: ChainLink, record: int) -> bool:
        store._free += store._chains.forget(lambda held: held.link == parent)
        return keep(payload, link, record)

    store._write_record = lose_the_parent  # type: ignore[method-assign]
    assert write(store, child) == [False]
    store._write_record = keep  # type: ignore[method-assign]
    assert len(store) == 0
    others = [chain([token])[0] for token in (2, 3, 4)]
    assert write(store, *others) == [True] * 3, "a record was lost"
    assert len(store) == 3


def test_a_payload_of_another_size_is_a_broken_invariant(make_store: MakeStore) -> None:
    store = make_store(1)
    (link,) = chain([0])
    with pytest.raises(AssertionError, match="bytes"):
        store.write(link, memoryview(bytes(PAYLOAD_BYTES + 1)), store.version)
    with pytest.raises(AssertionError, match="bytes"):
        store.read(link, memoryview(bytearray(PAYLOAD_BYTES - 1)))


def test_threads_read_and_write_exact_blocks(make_store: MakeStore) -> None:
    store = make_store(12)
    links = tree(4)
    parents = {link.block_hash: link.parent for link in links}
    failures: list[BaseException] = []
    hits = [0]

    def run(seed: int) -> None:
        source = random.Random(seed)
        try:
            for _ in range(400):
                tail = source.choice(links)
                path = [tail]
                while path[0].depth:
                    path.insert(0, next(link for link in links if link.block_hash == path[0].parent))
                if seed % 2:
                    write(store, *path)
                hits[0] += sum(reads_exactly(store, link) for link in path)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    assert hits[0]
    published: set[BlockHash] = replay(store.take_events())
    assert published == assert_prefix_closed(store, parents)
    assert len(store) <= 12
    assert len(store._free) + len(store) <= 12
    assert not store._writing


def test_host_memory_is_cut_from_several_slabs() -> None:
    slabs = [memoryview(bytearray(PAYLOAD_BYTES * 2)).cast("f"), memoryview(bytearray(PAYLOAD_BYTES + 39))]
    store = HostStore(slabs, PAYLOAD_BYTES)
    assert write(store, *chain([0, 1, 0])) == [True] * 3
    assert write(store, chain([0, 1, 0, 1])[3]) == [False]
    assert all(reads_exactly(store, link) for link in chain([0, 1, 0]))


def test_host_memory_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="hold no block"):
        HostStore([memoryview(bytearray(PAYLOAD_BYTES - 1))] * 2, PAYLOAD_BYTES)
    with pytest.raises(ValueError, match="writable"):
        HostStore([memoryview(bytes(PAYLOAD_BYTES))], PAYLOAD_BYTES)


def test_a_disk_without_room_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no block"):
        open_disk(tmp_path, 0, RECORD)
