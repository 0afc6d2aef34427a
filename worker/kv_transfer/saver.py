"""A thread that copies blocks from the pool to a store below it, in the background."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from typing import Final

from cache.stores.base import BlockStore
from cache.types import BlockHash, ChainLink
from worker.kv_transfer.pool_blocks import PoolBlocks

logger = logging.getLogger(__name__)

_MAX_QUEUED: Final = 65_536
"""Blocks in the queue. When the store is slower than the engine, the oldest are dropped."""
_NICE: Final = 10
"""The thread yields to the engine's."""


class BlockSaver:
    """Saves the blocks that the engine thread offers, each after the blocks before it in its chain."""

    def __init__(self, store: BlockStore, pool: PoolBlocks, saved: Callable[[BlockStore, int], None]) -> None:
        """`saved` receives the number of blocks just saved, in this thread."""
        self._store = store
        self._pool = pool
        self._saved = saved
        self.queue: deque[BlockHash] = deque(maxlen=_MAX_QUEUED)
        self._queueing = threading.Lock()
        """`_is_idle` is set only while the queue is empty."""
        self._wake = threading.Event()
        self._is_idle = threading.Event()
        self._is_idle.set()
        self._thread: threading.Thread | None = None
        self._stopping = False

    def start_thread(self) -> None:
        self._thread = threading.Thread(target=self._run, name=f"save-{self._store.tier}", daemon=True)
        self._thread.start()

    def offer(self, hashes: Iterable[BlockHash]) -> None:
        """Queue findable blocks. Those that are evicted before their turn are not saved."""
        if offered := list(hashes):
            with self._queueing:
                self._is_idle.clear()
                self.queue.extend(offered)
            self._wake.set()

    def flush(self, timeout_s: float) -> None:
        """Wait until all that was offered is saved."""
        if self._thread is not None:
            self._is_idle.wait(timeout_s)

    def stop(self) -> None:
        """End the thread after the current block."""
        self._stopping = True
        self._wake.set()

    def _run(self) -> None:
        with suppress(OSError):  # only Linux has a niceness for each thread
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)
        payload = self._pool.new_payload()
        while not self._stopping:
            self._wake.wait()
            self._wake.clear()
            while not self._stopping and (block_hash := self._next()) is not None:
                try:
                    if num_saved := self.save(block_hash, payload):
                        self._saved(self._store, num_saved)
                except Exception:
                    logger.exception("a block was not saved")
            with self._queueing:
                if not self.queue:
                    self._is_idle.set()

    def _next(self) -> BlockHash | None:
        with suppress(IndexError):
            return self.queue.popleft()
        return None

    def save(self, block_hash: BlockHash, payload: memoryview) -> int:
        """Save a block, after its missing ancestors. Return the number of blocks saved."""
        version = self._store.version
        missing: list[ChainLink] = []
        while block_hash not in self._store:
            link = self._pool.allocator.link(block_hash)
            if link is None:
                return 0
            missing.append(link)
            if link.depth == 0:
                break
            block_hash = link.parent
        for number, link in enumerate(reversed(missing)):
            if not self._store.write(link, payload, version, partial(self._pool.read, link.block_hash)):
                return number
        return len(missing)
