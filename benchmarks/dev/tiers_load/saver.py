"""The saver by itself: the thread that copies blocks from the pool to a disk, without an engine."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import Final

import torch

from cache.allocators.hash import HashAllocator
from cache.block_record import RecordFormat
from cache.events import Stored
from cache.stores.disk import DiskStore
from cache.types import HASH_BYTES, BlockHash
from worker.attention.block_copier import make_copier
from worker.attention.kv_cache import KVCache
from worker.kv_transfer.pool_blocks import PoolBlocks
from worker.kv_transfer.saver import BlockSaver
from worker.model.load import find_checkpoint, find_family

_TIMEOUT_S: Final = 120.0


class SaverBench:
    """A pool of random blocks of the model's shape, all findable."""

    def __init__(self, model: str, num_blocks: int, block_size: int) -> None:
        checkpoint = find_checkpoint(model)
        shape = checkpoint.config(find_family(checkpoint.model_type)).attention
        cache = KVCache(shape, num_blocks + 1, block_size, torch.float32, torch.device("cpu"))
        cache.rows.normal_()
        self._allocator = HashAllocator(num_blocks + 1, block_size)
        self._pool = PoolBlocks(self._allocator, make_copier(cache))
        token_ids = list(range(num_blocks * block_size))
        allocation = self._allocator.allocate(len(token_ids), token_ids, BlockHash(bytes(HASH_BYTES)))
        assert allocation is not None
        allocation.commit(token_ids, len(token_ids))
        self._hashes = [event.block_hash for event in self._allocator.take_events() if type(event) is Stored]
        self._record = RecordFormat(bytes(HASH_BYTES), self._pool.num_bytes)
        self.block_bytes = self._pool.num_bytes
        self.num_bytes = len(self._hashes) * self.block_bytes

    def seconds(self) -> tuple[float, float]:
        """Return what it takes to save all blocks, and that until the device has them."""
        with tempfile.TemporaryDirectory() as folder:
            store = DiskStore(Path(folder), self._record, 2 * self.num_bytes)
            saver = BlockSaver(store, self._pool, lambda store, num_blocks: None)
            saver.start_thread()
            begun_s = time.perf_counter()
            saver.offer(self._hashes)
            saver.flush(_TIMEOUT_S)
            saved_s = time.perf_counter() - begun_s
            assert len(store) == len(self._hashes), "blocks were not saved"
            for path in Path(folder).rglob("*.blocks"):
                file = os.open(path, os.O_RDONLY)
                os.fsync(file)
                os.close(file)
            synced_s = time.perf_counter() - begun_s
            saver.stop()
            store.close()
        return saved_s, synced_s
