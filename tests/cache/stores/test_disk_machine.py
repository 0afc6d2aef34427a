"""Two workers' disk stores in one directory: random writes, reads, damage, purges and restarts."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import ClassVar

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from cache.block_record import HEADER_BYTES
from cache.events import Removed, Stored
from cache.stores.disk import DiskStore
from cache.types import BlockHash, ChainLink
from tests.block_events import replay
from tests.cache.held import cached_hashes
from tests.cache.stores.store_parts import (
    RECORD,
    ROOTS,
    assert_prefix_closed,
    chain,
    open_disk,
    reads_exactly,
    tree,
    write,
)
from tests.cache.test_allocator_machine import profile

LINKS = tree(4)
BY_HASH = {link.block_hash: link for link in LINKS}
PARENTS = {link.block_hash: link.parent for link in LINKS}
DEEP_STEPS = 50_000
WORKER = st.sampled_from((0, 0, 0, 1))
RARELY = st.sampled_from((False, False, False, False, True))
LINK = st.sampled_from(LINKS)


def path_to(link: ChainLink) -> list[ChainLink]:
    return [link] if link.depth == 0 else [*path_to(BY_HASH[link.parent]), link]


def links_in(path: Path) -> list[ChainLink]:
    """Return the blocks whose records are in a file."""
    data, size = path.read_bytes(), RECORD.record_bytes
    found = (RECORD.find_link(data[at : at + HEADER_BYTES]) for at in range(0, len(data), size))
    return [link for link in found if link is not None]


class Worker:
    """A store, the result of its events, and whether damage may have cost it blocks."""

    def __init__(self, directory: Path, max_records: int) -> None:
        self.directory = directory
        self.max_records = max_records
        self.is_damaged = False
        self.left: set[BlockHash] = set()
        """Blocks that a start did not find, and a later one may: a smaller store lost the blocks before them."""
        self.store: DiskStore
        self.published: set[BlockHash]
        self.open()

    def open(self) -> None:
        self.store = open_disk(self.directory, self.max_records, per_segment=3)
        self.published = set()

    def hear(self) -> None:
        for event in self.store.take_events():
            match event:
                case Stored(block_hash):
                    assert block_hash not in self.published
                    assert PARENTS[block_hash] in ROOTS or PARENTS[block_hash] in self.published
                case Removed(block_hash):
                    assert block_hash in self.published
                    assert not any(PARENTS[other] == block_hash for other in self.published)
            replay([event], self.published)


class DiskMachine(RuleBasedStateMachine):
    steps: ClassVar[list[int]] = [0]

    @initialize(max_records=st.sampled_from((7, 1, 2, 4, 12)))
    def begin(self, max_records: int) -> None:
        self.home = tempfile.TemporaryDirectory()
        self.workers = [Worker(Path(self.home.name), max_records) for _ in range(2)]

    @rule(who=WORKER, link=LINK)
    def write_chain(self, who: int, link: ChainLink) -> None:
        worker = self.workers[who]
        path = path_to(link)
        before = set(cached_hashes(worker.store))
        kept = write(worker.store, *path)
        assert kept == sorted(kept, reverse=True), "a block is kept without its parent"
        if not worker.is_damaged:
            assert kept.count(True) == min(len(path), worker.max_records)
        held = set(cached_hashes(worker.store))
        assert worker.is_damaged or {link.block_hash for link in path[: kept.count(True)]} <= held
        if len(before) + len(path) <= worker.max_records:
            assert before <= held or worker.is_damaged, "a block was evicted though there is room"

    @rule(who=WORKER, link=LINK)
    def write_alone(self, who: int, link: ChainLink) -> None:
        store = self.workers[who].store
        has_parent = link.depth == 0 or link.parent in store
        assert not write(store, link)[0] or has_parent

    @rule(who=WORKER, link=LINK)
    def read(self, who: int, link: ChainLink) -> None:
        worker = self.workers[who]
        was_held = link.block_hash in worker.store
        is_hit = reads_exactly(worker.store, link)
        assert is_hit == was_held or worker.is_damaged
        assert is_hit == (link.block_hash in worker.store), "a block that cannot be read is still held"

    @rule(who=WORKER, link=LINK)
    def match(self, who: int, link: ChainLink) -> None:
        store = self.workers[who].store
        path = [link.block_hash for link in path_to(link)]
        held = [block_hash in store for block_hash in path]
        assert store.match(path) == held.count(True)

    @rule(who=WORKER)
    def clear(self, who: int) -> None:
        worker = self.workers[who]
        worker.store.clear()
        worker.published.clear()
        assert len(worker.store) == 0
        assert not list(worker.store._folder.glob("*.blocks"))
        worker.is_damaged = False
        worker.left = set()

    @rule(who=WORKER, max_records=st.sampled_from((None, None, 3, 9)))
    def restart(self, who: int, max_records: int | None) -> None:
        worker = self.workers[who]
        before, folder = set(cached_hashes(worker.store)), worker.store._folder
        worker.store.close()
        is_smaller = max_records is not None and max_records < worker.max_records
        worker.max_records = max_records or worker.max_records
        worker.open()
        assert worker.store._folder == folder
        if not worker.is_damaged:
            found = set(cached_hashes(worker.store))
            assert before <= found or is_smaller, "a start lost a block"
            assert found <= before | worker.left, "a start found a block that no record had"
            worker.left = (before | worker.left) - found

    @rule(who=WORKER, at=st.integers(0, 10_000), bit=st.integers(0, 7), happens=RARELY)
    def flip_a_bit(self, who: int, at: int, bit: int, happens: bool) -> None:
        if happens and (files := sorted(self.workers[who].store._folder.glob("*.blocks"))):
            path = files[at % len(files)]
            if data := bytearray(path.read_bytes()):
                data[at % len(data)] ^= 1 << bit
                path.write_bytes(data)
                self.workers[who].is_damaged = True

    @rule(who=WORKER, at=st.integers(0, 10_000), happens=RARELY)
    def cut_or_remove_a_segment(self, who: int, at: int, happens: bool) -> None:
        if happens and (files := sorted(self.workers[who].store._folder.glob("*.blocks"))):
            path = files[at % len(files)]
            data = path.read_bytes()
            if at % 3:
                path.write_bytes(data[: at % (len(data) + 1)])
            else:
                path.unlink()
            self.workers[who].is_damaged = True

    @invariant()
    def everything_holds(self) -> None:
        for worker in getattr(self, "workers", ()):
            self.steps[0] += 1
            worker.hear()
            assert worker.published == assert_prefix_closed(worker.store, PARENTS)
            files = list(worker.store._folder.glob("*.blocks"))
            assert sum(path.stat().st_size for path in files) <= worker.max_records * RECORD.record_bytes
            if not worker.is_damaged:
                on_disk = {link.block_hash for path in files for link in links_in(path)}
                assert worker.published <= on_disk <= worker.published | worker.left
            records = [held.record for held in worker.store._chains._blocks.values()]
            assert len({*records, *worker.store._free}) == len(records) + len(worker.store._free) <= worker.max_records

    def teardown(self) -> None:
        for worker in getattr(self, "workers", ()):
            worker.store.close()
        if hasattr(self, "home"):
            self.home.cleanup()


def test_short_run() -> None:
    run_state_machine_as_test(DiskMachine, settings=profile(60, 40))


def test_a_start_finds_a_block_whose_parent_came_back() -> None:
    """A smaller store loses a parent, and keeps the records of the blocks after it until they are used again."""
    first, second = (chain([token] * 3) for token in (0, 1))
    machine = DiskMachine()
    try:
        machine.begin(max_records=4)
        machine.write_chain(0, first[2])
        machine.write_chain(0, second[2])
        machine.restart(0, 3)
        machine.write_alone(0, second[0])
        machine.everything_holds()
        machine.restart(0, None)
        machine.everything_holds()
        held = cached_hashes(machine.workers[0].store)
        assert held == [link.block_hash for link in (first[0], *second[:2])]
        machine.read(0, second[1])
    finally:
        machine.teardown()


@pytest.mark.deep
def test_deep_run() -> None:
    DiskMachine.steps[0] = 0
    while DiskMachine.steps[0] < DEEP_STEPS:
        run_state_machine_as_test(DiskMachine, settings=profile(250, 100))
    print(f"{DiskMachine.steps[0]:,} steps")
