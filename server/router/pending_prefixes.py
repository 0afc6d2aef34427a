"""Speculative entries: the blocks of a request just routed count as present on (worker, epoch) before they are.

    place -> present -> first token -> present for the publish delay -> gone: the index says it now
                     -> failure     -> gone at once
    a request that never ends is forgotten after a TTL, which only catches leaks

Kept in the gateway, never written to the index, never merged with it.
"""

from __future__ import annotations

from collections import deque
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
        self._blocks: dict[tuple[WorkerId, Epoch], dict[BlockHash, int]] = {}
        self._open: dict[Speculation, float] = {}
        """Those without a first token and when they are forgotten: in that order, since the TTL is one for all."""
        self._confirmed: deque[tuple[float, Speculation]] = deque()
        """As above, with the publish delay."""

    def add(self, worker_id: WorkerId, epoch: Epoch, hashes: Sequence[BlockHash], now_s: float) -> Speculation:
        where = (worker_id, epoch)
        speculation = Speculation(where, hashes)
        blocks = self._blocks.setdefault(where, {})
        for block_hash in hashes:
            blocks[block_hash] = blocks.get(block_hash, 0) + 1
        self._open[speculation] = now_s + self._ttl_s
        return speculation

    def confirm(self, speculation: Speculation, now_s: float) -> None:
        """The first token is out: the index will say it after the publish delay."""
        if self._open.pop(speculation, None) is not None:
            self._confirmed.append((now_s + self._publish_delay_s, speculation))

    def remove(self, speculation: Speculation) -> None:
        """The request failed, or its entries are confirmed. Once is enough; more changes nothing."""
        if not speculation.present:
            return
        speculation.present = False
        self._open.pop(speculation, None)
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
        while self._confirmed and self._confirmed[0][0] <= now_s:
            self.remove(self._confirmed.popleft()[1])
        while self._open and next(iter(self._open.values())) <= now_s:
            self.remove(next(iter(self._open)))

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
