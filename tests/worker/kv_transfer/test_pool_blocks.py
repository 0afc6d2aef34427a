"""Blocks of the pool, read by one thread while another evicts and overwrites them."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from random import Random

import pytest

from cache.allocators.hash import HashAllocator
from cache.hashing import hash_chain
from cache.types import BlockHash, BlockId
from tests.waiting import HANG_S
from tests.worker.kv_transfer.moving_engine import BLOCK_SIZE, PAYLOAD_BYTES, BytesCopier
from tests.worker.scheduler.engine import ROOT
from worker.kv_transfer.pool_blocks import PoolBlocks

NUM_BLOCKS = 9
NUM_PROMPTS = 12
MIN_READS = 400


@pytest.fixture(autouse=True)
def _threads_in_turns() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(2e-6)
    yield
    sys.setswitchinterval(before)


class ByteByByte(BytesCopier):
    """Slow enough for a block to be overwritten while it is read."""

    def read(self, block_id: BlockId, payload: memoryview) -> None:
        for index in range(PAYLOAD_BYTES):
            payload[index] = self.blocks[block_id][index]

    def overwrite(self, block_id: BlockId, data: bytes) -> None:
        for index in range(PAYLOAD_BYTES):
            self.blocks[block_id][index] = data[index]


def test_a_reader_never_gets_the_bytes_of_another_block() -> None:
    allocator = HashAllocator(NUM_BLOCKS, BLOCK_SIZE)
    copier = ByteByByte(NUM_BLOCKS)
    pool = PoolBlocks(allocator, copier)
    prompts = [range(100 * number, 100 * number + 2 * BLOCK_SIZE) for number in range(NUM_PROMPTS)]
    chains = [hash_chain(ROOT, prompt, BLOCK_SIZE) for prompt in prompts]
    stop = threading.Event()
    wrong: list[tuple[BlockHash, bytes]] = []
    outcomes = {True: 0, False: 0}

    def read() -> None:
        random, payload = Random(1), copier.new_payload()
        while not stop.is_set() and not wrong:
            block_hash = random.choice(random.choice(chains))
            is_read = pool.read(block_hash, payload)
            outcomes[is_read] += 1
            if is_read and payload != block_hash:
                wrong.append((block_hash, bytes(payload)))

    reader = threading.Thread(target=read)
    reader.start()
    random = Random(2)
    num_turns = 0
    while not wrong and (num_turns < 2000 or min(outcomes.values()) < MIN_READS):
        num_turns += 1
        assert num_turns < 200_000, outcomes
        number = random.randrange(NUM_PROMPTS)
        allocation = allocator.allocate(2 * BLOCK_SIZE, prompts[number], ROOT)
        assert allocation is not None
        first = allocation.num_cached_tokens // BLOCK_SIZE
        for block_id, block_hash in zip(allocation.block_table[first:], chains[number][first:], strict=True):
            copier.overwrite(block_id, block_hash)
        allocation.commit(prompts[number], 2 * BLOCK_SIZE)
        allocation.free()
        if num_turns % 500 == 0:
            assert allocator.reset()
    stop.set()
    reader.join(HANG_S)
    assert wrong == []


def test_blocks_without_a_hash_repeat_no_read() -> None:
    """A running request takes them all the time."""
    allocator, copier, num_reads = HashAllocator(NUM_BLOCKS, BLOCK_SIZE), BytesCopier(NUM_BLOCKS), 0
    prompt = range(BLOCK_SIZE)
    allocation = allocator.allocate(BLOCK_SIZE, prompt, ROOT)
    assert allocation is not None
    allocation.commit(prompt, BLOCK_SIZE)

    def read(block_id: BlockId, payload: memoryview) -> None:
        nonlocal num_reads
        num_reads += 1
        assert allocation.extend((1 + num_reads) * BLOCK_SIZE)

    copier.read = read  # type: ignore[method-assign]
    (block_hash,) = hash_chain(ROOT, prompt, BLOCK_SIZE)
    assert PoolBlocks(allocator, copier).read(block_hash, copier.new_payload())
    assert num_reads == 1


def test_a_block_that_is_evicted_at_every_try_is_a_miss() -> None:
    allocator = HashAllocator(NUM_BLOCKS, BLOCK_SIZE)
    copier = BytesCopier(NUM_BLOCKS)
    prompt, other = range(BLOCK_SIZE), range(50, 50 + 8 * BLOCK_SIZE)
    (block_hash,) = hash_chain(ROOT, prompt, BLOCK_SIZE)
    num_reads = 0

    def compute(token_ids: range) -> None:
        allocation = allocator.allocate(len(token_ids), token_ids, ROOT)
        assert allocation is not None
        allocation.commit(token_ids, len(token_ids))
        allocation.free()

    def read(block_id: BlockId, payload: memoryview) -> None:
        nonlocal num_reads
        num_reads += 1
        compute(other)
        assert allocator.block_of(block_hash) is None
        compute(prompt)

    copier.read = read  # type: ignore[method-assign]
    compute(prompt)
    assert not PoolBlocks(allocator, copier).read(block_hash, copier.new_payload())
    assert 1 < num_reads < 10
