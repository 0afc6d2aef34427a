"""Speculative entries: the blocks of a request just routed count as present on (worker, epoch) before they are.

    place -> present -> first token -> present for the publish delay -> gone: the index says it now
                     -> failure     -> gone at once
    a request that never ends is forgotten after a TTL, which only catches leaks

Kept in the gateway, never written to the index, never merged with it.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from collections.abc import Sequence

from cache.types import BlockHash, Epoch, WorkerId


class Speculation:
    """The blocks of one request on one worker."""

    __slots__ = ("hashes", "present", "where")

    def __init__(self, where: tuple[WorkerId, Epoch], hashes: Sequence[BlockHash]) -> None:
        self.where = where
        self.hashes = hashes
        self.present = True


class Overlay:
    def __init__(self, *, publish_delay_s: float, ttl_s: float) -> None:
        self._publish_delay_s = publish_delay_s
        self._ttl_s = ttl_s
        self._blocks: dict[tuple[WorkerId, Epoch], Counter[BlockHash]] = {}
        self._ends: list[tuple[float, int, Speculation]] = []
        self._order = itertools.count()

    def add(self, worker_id: WorkerId, epoch: Epoch, hashes: Sequence[BlockHash], now_s: float) -> Speculation:
        where = (worker_id, epoch)
        speculation = Speculation(where, hashes)
        self._blocks.setdefault(where, Counter()).update(hashes)
        self._end_at(speculation, now_s + self._ttl_s)
        return speculation

    def confirm(self, speculation: Speculation, now_s: float) -> None:
        """The first token is out: the index will say it after the publish delay."""
        self._end_at(speculation, now_s + self._publish_delay_s)

    def remove(self, speculation: Speculation) -> None:
        """The request failed, or its entries are confirmed. Once is enough; more changes nothing."""
        if not speculation.present:
            return
        speculation.present = False
        blocks = self._blocks[speculation.where]
        for block_hash in speculation.hashes:
            count = blocks[block_hash] - 1
            if count:
                blocks[block_hash] = count
            else:
                del blocks[block_hash]
        if not blocks:
            del self._blocks[speculation.where]

    def expire(self, now_s: float) -> None:
        """Forget what has ended. Call it before `matched`."""
        while self._ends and self._ends[0][0] <= now_s:
            self.remove(heapq.heappop(self._ends)[2])

    def matched(self, worker_id: WorkerId, epoch: Epoch, hashes: Sequence[BlockHash]) -> int:
        """Blocks at the head of `hashes` that are on their way there. What is present is prefix-closed: bisect."""
        blocks = self._blocks.get((worker_id, epoch))
        if blocks is None or not hashes or hashes[0] not in blocks:
            return 0
        low, high = 1, len(hashes)
        while low < high:
            middle = (low + high) // 2
            if hashes[middle] in blocks:
                low = middle + 1
            else:
                high = middle
        return low

    @property
    def num_entries(self) -> int:
        return sum(len(blocks) for blocks in self._blocks.values())

    def _end_at(self, speculation: Speculation, end_s: float) -> None:
        heapq.heappush(self._ends, (end_s, next(self._order), speculation))
