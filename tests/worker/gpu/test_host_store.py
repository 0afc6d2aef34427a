"""Blocks leave a device's pool for host memory and come back, bit for bit, while other blocks are written."""

from __future__ import annotations

import threading

import pytest
import torch

from cache.stores.host import HostStore
from cache.types import BlockHash, BlockId, ChainLink
from worker.attention.base import AttentionShape
from worker.attention.block_copier import make_copier
from worker.attention.kv_cache import KVCache

pytestmark = pytest.mark.gpu
SHAPE = AttentionShape(num_layers=4, num_heads=8, num_kv_heads=2, head_dim=64, scale=1.0)
NUM_BLOCKS, BLOCK_SIZE, NUM_SAVED = 64, 16, 24
ROOT = BlockHash(bytes(32))


def slots(number: int) -> slice:
    return slice(number * BLOCK_SIZE, (number + 1) * BLOCK_SIZE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_blocks_come_back_bit_for_bit(device: str, dtype: torch.dtype) -> None:
    cache = KVCache(SHAPE, NUM_BLOCKS, BLOCK_SIZE, dtype, torch.device(device))
    pool = cache.rows.view(torch.uint8)
    pool.copy_(torch.randint(0, 256, pool.shape, dtype=torch.uint8))
    copier = make_copier(cache)
    store = HostStore([copier.new_payload(NUM_SAVED)], copier.num_bytes)
    hashes = [ROOT, *(BlockHash(number.to_bytes(32, "big")) for number in range(1, NUM_SAVED + 1))]
    links = [ChainLink(hashes[number + 1], hashes[number], number) for number in range(NUM_SAVED)]
    saved = pool[:, : (1 + NUM_SAVED) * BLOCK_SIZE].cpu().clone()
    payload, stopping = copier.new_payload(), threading.Event()

    def read(number: int) -> bool:
        def fill(room: memoryview) -> bool:
            copier.read(BlockId(1 + number), room)
            return True

        return store.write(links[number], payload, store.version, fill)

    def write(number: int) -> bool:
        target = BlockId(NUM_BLOCKS - 1 - number)
        return store.read(links[number], payload, lambda room: copier.write(target, room))

    def step() -> None:
        while not stopping.is_set():
            pool[:, slots(NUM_SAVED + 2)] += 1  # a block of a running sequence

    steps = threading.Thread(target=step)
    steps.start()
    try:
        assert all(map(read, range(NUM_SAVED)))
        pool[:, : (1 + NUM_SAVED) * BLOCK_SIZE].zero_()
        assert all(map(write, range(NUM_SAVED)))
    finally:
        stopping.set()
        steps.join()
    for number in range(NUM_SAVED):
        came = pool[:, slots(NUM_BLOCKS - 1 - number)].cpu()
        assert torch.equal(came, saved[:, slots(1 + number)]), f"block {number} differs"
    assert not pool[:, : (1 + NUM_SAVED) * BLOCK_SIZE].any(), "a block was written that was not meant"
