"""Where prompts went lately: the index of a gateway that cannot reach the shared one.

Block by block the last worker that got it, so that a conversation stays where it is. Two generations bound it: when
the young one is full it becomes the old one, and what was old is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

from cache.types import BlockHash, Epoch, WorkerId

_Where = tuple[WorkerId, Epoch]


class RecentPlacements:
    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._young: dict[BlockHash, _Where] = {}
        self._old: dict[BlockHash, _Where] = {}

    def add(self, worker_id: WorkerId, epoch: Epoch, hashes: Sequence[BlockHash]) -> None:
        if len(self._young) + len(hashes) > self._max_blocks // 2:
            self._old, self._young = self._young, {}
        self._young.update(dict.fromkeys(hashes[: self._max_blocks // 2], (worker_id, epoch)))

    def matched(self, hashes: Sequence[BlockHash]) -> dict[_Where, int]:
        """For each worker the last block of `hashes` that went to it last, counted from the head.

        Earlier blocks may have gone elsewhere since: whoever got a block once got everything before it.
        """
        young, old = self._young, self._old
        matched: dict[_Where, int] = {}
        for position, block_hash in enumerate(hashes, 1):
            where = young.get(block_hash) or old.get(block_hash)
            if where is None:
                break
            matched[where] = position
        return matched

    def __len__(self) -> int:
        return len(self._young) + len(self._old)
