"""Copies single blocks between the pool and host memory, off the engine thread.

A payload is a block of all layers: (2 * layers, block size, kv heads * head_dim) in the pool's dtype, contiguous.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch

from cache.types import BlockId
from worker.attention.kv_cache import KVCache


class BlockCopier:
    """A `worker.kv_transfer.pool_blocks.Copier` over a KV cache. Any thread may call it.

    It copies with numpy, which uses none of torch's threads and releases the interpreter's lock.
    """

    def __init__(self, cache: KVCache) -> None:
        rows = cache.rows.view(torch.uint8)
        self.num_bytes = cache.block_bytes
        self._size = cache.block_size
        self._shape = (rows.shape[0], self._size, rows.shape[2])
        self._rows: Any = rows if rows.is_cuda else rows.numpy()

    def new_payload(self, count: int = 1) -> memoryview:
        """Return a buffer for `count` consecutive payloads."""
        return memoryview(bytearray(count * self.num_bytes))

    def read(self, block_id: BlockId, payload: memoryview) -> None:
        # The step that wrote a findable block is complete: the engine has collected its results.
        self._copy(self._host(payload), self._slots(block_id))

    def write(self, block_id: BlockId, payload: memoryview) -> None:
        # Steps in flight may read a reserved block as padding, where any finite value is right.
        self._copy(self._slots(block_id), self._host(payload))

    def _slots(self, block_id: BlockId) -> Any:
        return self._rows[:, block_id * self._size : (block_id + 1) * self._size]

    def _host(self, payload: memoryview) -> Any:
        return np.frombuffer(payload, np.uint8).reshape(self._shape)

    def _copy(self, target: Any, source: Any) -> None:
        np.copyto(target, source)


class _CudaCopier(BlockCopier):
    """Copies by DMA from and to pinned payloads, on a stream of each thread, so that no step waits."""

    def __init__(self, cache: KVCache) -> None:
        super().__init__(cache)
        self._device = cache.device
        self._local = threading.local()

    def new_payload(self, count: int = 1) -> memoryview:
        pinned = torch.empty(count * self.num_bytes, dtype=torch.uint8, pin_memory=True)
        return memoryview(pinned.numpy())  # type: ignore[arg-type]

    def _host(self, payload: memoryview) -> Any:
        return torch.frombuffer(payload, dtype=torch.uint8).view(self._shape)

    def _copy(self, target: Any, source: Any) -> None:
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._local.stream):
            target.copy_(source, non_blocking=True)
            self._local.stream.synchronize()


def make_copier(cache: KVCache) -> BlockCopier:
    """Return the copier for the cache's device."""
    return _CudaCopier(cache) if cache.device.type == "cuda" else BlockCopier(cache)
