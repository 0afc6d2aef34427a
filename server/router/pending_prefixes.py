"""Cached prefixes that the gateway has without the index: blocks being computed, and recent placements.

Both stay in the gateway and are never written to Redis.
"""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Final

from cache.types import BlockHash, WorkerIncarnation

_MAX_COMPARED: Final = 64
_Entry = tuple[float, WorkerIncarnation, Sequence[BlockHash]]
"""Its expiry, and the blocks that count as cached at a worker."""


class PendingPrefixes:
    """Blocks of requests just routed: they count as cached before the index has them.

        add -> first token -> confirm -> present for the publish delay -> gone: the index has them
            -> failure     -> cancel  -> gone at once

    A TTL ends the entries of requests that never end.
    """

    def __init__(self, *, publish_delay_s: float, ttl_s: float) -> None:
        self._publish_delay_s = publish_delay_s
        self._ttl_s = ttl_s
        self._num_references: dict[WorkerIncarnation, dict[BlockHash, int]] = {}
        self._numbers = itertools.count(1)
        self._open: dict[int, _Entry] = {}
        """Entries without a first token, in the order in which they expire, since the TTL is the same for all."""
        self._confirmed: deque[_Entry] = deque()
        """In the order in which they expire."""
        self._beginning: dict[BlockHash, dict[WorkerIncarnation, None]] = {}
        """By first block, where prompts that begin with it are pending; the latest are last."""

    def add(self, incarnation: WorkerIncarnation, hashes: Sequence[BlockHash], now_s: float) -> int:
        """Add the blocks of one request, and return a number for the entry."""
        number = next(self._numbers)
        blocks = self._num_references.setdefault(incarnation, {})
        for block_hash in hashes:
            blocks[block_hash] = blocks.get(block_hash, 0) + 1
        beginning = self._beginning.setdefault(hashes[0], {})
        beginning.pop(incarnation, None)
        beginning[incarnation] = None
        self._open[number] = (now_s + self._ttl_s, incarnation, hashes)
        return number

    def confirm(self, number: int, now_s: float) -> None:
        """Keep the entry for the publish delay: the request has its first token."""
        if (entry := self._open.pop(number, None)) is not None:
            self._confirmed.append((now_s + self._publish_delay_s, *entry[1:]))

    def cancel(self, number: int) -> None:
        """Remove the entry if its request has no first token."""
        if (entry := self._open.pop(number, None)) is not None:
            self._remove(entry)

    def expire(self, now_s: float) -> None:
        """Remove expired entries. Call it before `match`."""
        while self._confirmed and self._confirmed[0][0] <= now_s:
            self._remove(self._confirmed.popleft())
        while self._open and next(iter(self._open.values()))[0] <= now_s:
            self.cancel(next(iter(self._open)))

    def _remove(self, entry: _Entry) -> None:
        _, incarnation, hashes = entry
        blocks = self._num_references[incarnation]
        for block_hash in hashes:
            count = blocks[block_hash] - 1
            if count:
                blocks[block_hash] = count
            else:
                del blocks[block_hash]
        if hashes[0] not in blocks:
            beginning = self._beginning[hashes[0]]
            del beginning[incarnation]
            if not beginning:
                del self._beginning[hashes[0]]
        if not blocks:
            del self._num_references[incarnation]

    def holders(self, hashes: Sequence[BlockHash], limit: int) -> list[WorkerIncarnation]:
        """Return where the longest prefixes of `hashes` are pending, of the latest 64 workers that have any."""
        if not hashes or not (beginning := self._beginning.get(hashes[0])):
            return []
        latest = list(islice(reversed(beginning), _MAX_COMPARED))
        if len(latest) <= limit:
            return latest
        return sorted(latest, key=lambda incarnation: self.match(incarnation, hashes), reverse=True)[:limit]

    def match(self, incarnation: WorkerIncarnation, hashes: Sequence[BlockHash]) -> int:
        """Return the length of the prefix of `hashes` that is pending there. The pending set is prefix-closed."""
        blocks = self._num_references.get(incarnation)
        if blocks is None or not hashes or hashes[0] not in blocks:
            return 0
        return bisect_left(hashes, True, 1, key=lambda block_hash: block_hash not in blocks)


class RecentPlacements:
    """The last worker that got each block: replaces the index while Redis does not answer.

    Two generations bound it: a full young one becomes the old one, which is dropped.
    """

    def __init__(self, max_blocks: int) -> None:
        self._max_blocks = max_blocks
        self._young: dict[BlockHash, WorkerIncarnation] = {}
        self._old: dict[BlockHash, WorkerIncarnation] = {}

    def add(self, incarnation: WorkerIncarnation, hashes: Sequence[BlockHash]) -> None:
        if len(self._young) + len(hashes) > self._max_blocks // 2:
            self._old, self._young = self._young, {}
        self._young.update(dict.fromkeys(hashes[: self._max_blocks // 2], incarnation))

    def match(self, hashes: Sequence[BlockHash]) -> dict[WorkerIncarnation, int]:
        """Return for each worker the length of the prefix up to the last block whose latest placement was there.

        Earlier blocks may have gone elsewhere since, but a worker that got a block got all blocks before it.
        """
        young, old = self._young, self._old
        matched: dict[WorkerIncarnation, int] = {}
        for position, block_hash in enumerate(hashes, 1):
            incarnation = young.get(block_hash) or old.get(block_hash)
            if incarnation is None:
                break
            matched[incarnation] = position
        return matched
