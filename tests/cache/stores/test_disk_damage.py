"""Damaged, foreign and torn records: with any files in the folder, a read gives the exact block or a miss."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from cache.block_record import HEADER_BYTES, RecordFormat
from cache.stores.disk import DiskStore
from tests.cache.stores.store_parts import (
    PAYLOAD_BYTES,
    RECORD,
    assert_prefix_closed,
    chain,
    open_disk,
    payload_of,
    reads_exactly,
    segments,
    tree,
    write,
)

LINKS = tree(3)[:14]
PARENTS = {link.block_hash: link.parent for link in LINKS}
SIZE = RECORD.record_bytes
FOREIGN = (
    RecordFormat(bytes(16), PAYLOAD_BYTES, b"stale"),
    RecordFormat(bytes(16), PAYLOAD_BYTES),
    RecordFormat(b"another layout 1", PAYLOAD_BYTES, b"secret"),
)
WRITER = """
import os, random, sys
from pathlib import Path
from tests.cache.stores.store_parts import payload_of
from tests.cache.stores.test_disk_damage import KILLED_BYTES, KILLED_CHAINS, open_killed

def write_page_by_page(file, buffers, offset):
    record = b"".join(buffers)
    starts = list(range(0, len(record), 4096))
    if source.random() < 0.5:
        source.shuffle(starts)
    for start in starts:
        os.pwrite(file, record[start : start + 4096], offset + start)
    return len(record)

store = open_killed(Path(sys.argv[1]))
source = random.Random(int(sys.argv[2]))
os.pwritev = write_page_by_page
while True:
    for link in source.choice(KILLED_CHAINS):
        store.write(link, payload_of(link, KILLED_BYTES), store.version)
        print(flush=True)
"""
"""The kernel copies a record in larger pieces than a page, and in order. Then hardly a kill tears one."""
KILLED_BYTES = 1 << 20
KILLED_RECORD = RecordFormat(bytes(16), KILLED_BYTES, b"secret")
KILLED_CHAINS = [chain([first, second]) for first in range(8) for second in range(3)]

Segments = list[bytearray]


def flip_bits(source: random.Random, files: Segments) -> None:
    for _ in range(source.choice((1, 1, 2, 9))):
        data = source.choice(files)
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)


def cut(source: random.Random, files: Segments) -> None:
    data = source.choice(files)
    del data[source.randrange(len(data)) :]


def cut_a_hole(source: random.Random, files: Segments) -> None:
    data = source.choice(files)
    start = source.randrange(len(data))
    del data[start : start + source.choice((1, HEADER_BYTES, PAYLOAD_BYTES, SIZE))]


def swap_parts(source: random.Random, files: Segments) -> None:
    """Swap two whole records, headers or payloads, also of two segments."""
    start, stop = source.choice(((0, SIZE), (0, HEADER_BYTES), (HEADER_BYTES, SIZE), (HEADER_BYTES - 16, HEADER_BYTES)))
    (one, at), (other, to) = [(data, source.randrange(len(data) // SIZE) * SIZE) for data in source.choices(files, k=2)]
    first, second = one[at + start : at + stop], other[to + start : to + stop]
    one[at + start : at + stop], other[to + start : to + stop] = second, first


def tear(source: random.Random, files: Segments) -> None:
    """End a record within another one, as when its overwriting stopped half-way."""
    old, new = source.choice(files), source.choice(files)
    at, of = (source.randrange(len(data) // SIZE) * SIZE for data in (old, new))
    length = source.randrange(1, SIZE)
    old[at : at + length] = new[of : of + length]


def zero_headers(source: random.Random, files: Segments) -> None:
    data = source.choice(files)
    at = source.randrange(len(data) // SIZE) * SIZE
    length = source.choice((4, HEADER_BYTES, SIZE))
    data[at : at + length] = bytes(length)


def write_foreign_records(source: random.Random, files: Segments) -> None:
    """Replace a record by one of another layout or secret, with the right block and payload."""
    data, link, record = source.choice(files), source.choice(LINKS), source.choice(FOREIGN)
    at = source.randrange(len(data) // SIZE) * SIZE
    data[at : at + SIZE] = record.header(link, payload_of(link)) + payload_of(link)


def forge(source: random.Random, files: Segments) -> None:
    """Write valid fields with a payload and a digest made without the secret."""
    data, link = source.choice(files), source.choice(LINKS)
    at = source.randrange(len(data) // SIZE) * SIZE
    payload = memoryview(source.randbytes(PAYLOAD_BYTES))
    start = RECORD.header(link, payload)[:-16]
    data[at : at + SIZE] = start + FOREIGN[1].header(link, payload)[-16:] + payload


def append(source: random.Random, files: Segments) -> None:
    files[-1] += source.choice((source.randbytes(source.randrange(3 * SIZE)), bytes(files[0]) * 3))


MUTATIONS: tuple[Callable[[random.Random, Segments], None], ...] = (
    flip_bits,
    flip_bits,
    cut,
    cut_a_hole,
    swap_parts,
    tear,
    zero_headers,
    write_foreign_records,
    forge,
    append,
)


def change_files(source: random.Random, paths: list[Path]) -> None:
    path = source.choice(paths)
    match source.randrange(4):
        case 0:
            path.unlink()
        case 1:
            path.unlink()
            path.mkdir()
        case 2:
            path.rename(path.with_name(path.name.replace("-", "-1", 1)))
        case 3:
            path.rename(path.with_name(f"{FOREIGN[0].fingerprint}-0.blocks"))


def mutate(num_mutations: int, seed: int, folder: Path) -> tuple[int, int]:
    """Return the hits and misses in folders that were mutated, before a start or under a running store."""
    store = open_disk(folder, per_segment=5)
    write(store, *LINKS)
    store.close()
    originals = {path: path.read_bytes() for path in segments(folder)}
    source = random.Random(seed)
    counts = [0, 0]
    for _ in range(num_mutations):
        for path in folder.glob("0/*.blocks"):
            if path.is_dir():
                path.rmdir()
            elif path not in originals:
                path.unlink()
        for path, original in originals.items():
            put(path, original)
        running = open_disk(folder, per_segment=5) if source.random() < 0.3 else None
        if source.random() < 0.1:
            change_files(source, list(originals))
        else:
            files = [bytearray(original) for original in originals.values()]
            source.choice(MUTATIONS)(source, files)
            for path, data in zip(originals, files, strict=True):
                put(path, data)
        store = running or open_disk(folder, per_segment=5)
        check(store, counts)
        store.close()
    return counts[0], counts[1]


def put(path: Path, data: bytes | bytearray) -> None:
    """Replace what is in a file, but not by emptying it first: file systems wait for the disk then."""
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    os.pwrite(file, data, 0)
    if os.fstat(file).st_size != len(data):
        os.ftruncate(file, len(data))
    os.close(file)


def check(store: DiskStore, counts: list[int]) -> None:
    for link in LINKS:
        counts[not reads_exactly(store, link)] += 1
    assert_prefix_closed(store, PARENTS)
    assert all(reads_exactly(store, link) for link in LINKS if link.block_hash in store), "a miss is still held"


def test_mutations_are_misses(tmp_path: Path) -> None:
    hits, misses = mutate(1_500, 1, tmp_path)
    assert hits > 1_000
    assert misses > 1_000


@pytest.mark.deep
def test_many_mutations_are_misses(tmp_path: Path) -> None:
    hits, misses = mutate(10_000, 2, tmp_path)
    print(f"{hits:,} hits, {misses:,} misses")


def open_killed(folder: Path) -> DiskStore:
    size = KILLED_RECORD.record_bytes
    return DiskStore(folder, KILLED_RECORD, 8 * size, segment_bytes=3 * size)


def kill_writers(num_kills: int, folder: Path) -> tuple[int, int]:
    """Kill a process that writes and overwrites, again and again. Return the hits and misses of blocks held."""
    links = {link.block_hash: link for path in KILLED_CHAINS for link in path}
    parents = {link.block_hash: link.parent for link in links.values()}
    source = random.Random(3)
    counts = [0, 0]
    for number in range(num_kills):
        command = [sys.executable, "-c", WRITER, str(folder), str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            for _ in range(source.randrange(1, 20)):
                assert writer.stdout.readline()
            time.sleep(source.uniform(0.0, 0.02))  # up to some point of a later write
            writer.kill()
        store = open_killed(folder)
        held = assert_prefix_closed(store, parents)
        assert {event.block_hash for event in store.take_events()} == held
        for block_hash in held:
            if block_hash in store:  # the first miss of a chain drops the rest
                counts[not reads_exactly(store, links[block_hash], KILLED_BYTES)] += 1
        assert_prefix_closed(store, parents)
        assert sum(path.stat().st_size for path in segments(folder)) <= 8 * KILLED_RECORD.record_bytes
        store.close()
    shutil.rmtree(folder)
    return counts[0], counts[1]


def test_a_killed_writer_leaves_exact_blocks_or_misses(tmp_path: Path) -> None:
    hits, _ = kill_writers(6, tmp_path / "blocks")
    assert hits


@pytest.mark.deep
def test_many_killed_writers_leave_exact_blocks_or_misses(tmp_path: Path) -> None:
    hits, misses = kill_writers(100, tmp_path / "blocks")
    assert misses, "no kill tore a record"
    print(f"{hits:,} hits, {misses:,} misses")
