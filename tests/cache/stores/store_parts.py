"""Chains and payloads for tests of stores: a payload follows from its link, so any reader can verify a block."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

from cache.block_record import RecordFormat
from cache.hashing import Namespace, hash_chain
from cache.stores.base import BlockStore
from cache.stores.disk import DiskStore
from cache.types import BlockHash, ChainLink
from tests.cache.held import cached_hashes

PAYLOAD_BYTES = 40
ROOTS = tuple(Namespace("model", "main", "tokenizer", 1).root(salt=salt) for salt in (b"a", b"b"))
RECORD = RecordFormat(bytes(16), PAYLOAD_BYTES, b"secret")


def chain(tokens: Iterable[int], root: BlockHash = ROOTS[0]) -> list[ChainLink]:
    """Return the links of a chain of blocks of one token."""
    hashes = hash_chain(root, list(tokens), 1)
    return [ChainLink(*link, depth) for depth, link in enumerate(zip(hashes, [root, *hashes], strict=False))]


def tree(depth: int) -> list[ChainLink]:
    """Return the blocks of all prompts of up to `depth` tokens of a vocabulary of two, at both roots."""
    leaves = itertools.product(ROOTS, itertools.product((0, 1), repeat=depth))
    return list(dict.fromkeys(link for root, tokens in leaves for link in chain(tokens, root)))


def payload_of(link: ChainLink, num_bytes: int = PAYLOAD_BYTES) -> memoryview:
    unit = blake2b(link.block_hash + link.parent + bytes([link.depth % 256])).digest()
    return memoryview((unit * (num_bytes // len(unit) + 1))[:num_bytes])


def write(store: BlockStore, *links: ChainLink) -> list[bool]:
    return [store.write(link, payload_of(link), store.version) for link in links]


def reads_exactly(store: BlockStore, link: ChainLink, num_bytes: int = PAYLOAD_BYTES) -> bool:
    """Read a block and return whether it was a hit. A hit with other bytes is a failure."""
    payload = memoryview(bytearray(b"\xee" * num_bytes))
    is_hit = store.read(link, payload)
    assert not is_hit or payload == payload_of(link, num_bytes), "a wrong block was read"
    return is_hit


def assert_prefix_closed(store: BlockStore, parents: dict[BlockHash, BlockHash]) -> set[BlockHash]:
    """Return what the store holds."""
    held = cached_hashes(store)
    seen: set[BlockHash] = set()
    for block_hash in held:
        assert parents[block_hash] in ROOTS or parents[block_hash] in seen, "a block is held without its parent"
        seen.add(block_hash)
    assert len(held) == len(seen) == len(store)
    return seen


def open_disk(folder: Path, num_records: int = 100, record: RecordFormat = RECORD, per_segment: int = 4) -> DiskStore:
    return DiskStore(folder, record, num_records * record.record_bytes, segment_bytes=per_segment * record.record_bytes)


def segments(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.blocks"), key=lambda path: int(path.stem.partition("-")[2]))
