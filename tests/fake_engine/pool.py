"""The paged pool of one rank, as vLLM has it."""

from __future__ import annotations

import hashlib
from collections import OrderedDict


class Pool:
    """Blocks of one rank: hashes with copies, evicted least recently used first."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.num_held = 0
        """Blocks of running requests."""
        self.idle: OrderedDict[int, None] = OrderedDict()
        """Cached copies that no request holds, by copy id."""
        self.copies: dict[int, set[int]] = {}
        """Copy ids by block hash."""
        self.hash_of: dict[int, int] = {}
        self.holders: dict[int, int] = {}
        self._next_copy = 0

    def chain(self, token_ids: list[int], salt: str, lora: str | None) -> list[int]:
        hashes: list[int] = []
        last = b""
        for start in range(0, len(token_ids) - self.block_size + 1, self.block_size):
            extra = f"{lora or ''}|{salt if start == 0 else ''}"
            last = hashlib.sha256(
                last + repr(token_ids[start : start + self.block_size]).encode() + extra.encode()
            ).digest()
            hashes.append(int.from_bytes(last[:8], "big"))
        return hashes

    def match(self, hashes: list[int]) -> list[int]:
        """Hold the copies of the longest cached prefix."""
        held = []
        for block_hash in hashes:
            if not (copies := self.copies.get(block_hash)):
                break
            copy = next(iter(copies))
            self.hold(copy)
            held.append(copy)
        return held

    def hold(self, copy: int) -> None:
        if self.holders.get(copy, 0) == 0:
            self.idle.pop(copy, None)
            self.num_held += 1
        self.holders[copy] = self.holders.get(copy, 0) + 1

    def store(self, block_hash: int, removed: list[int]) -> int:
        """Take a block for a new copy, held by the caller; a full pool evicts."""
        if len(self.holders) >= self.num_blocks and self.idle:
            victim, _ = self.idle.popitem(last=False)
            self.forget(victim, removed)
        self._next_copy += 1
        copy = self._next_copy
        self.copies.setdefault(block_hash, set()).add(copy)
        self.hash_of[copy] = block_hash
        self.holders[copy] = 0
        self.hold(copy)
        return copy

    def release(self, copies: list[int]) -> None:
        for copy in reversed(copies):
            if copy not in self.holders:
                continue  # the cache was reset
            self.holders[copy] -= 1
            if self.holders[copy] == 0:
                self.num_held -= 1
                self.idle[copy] = None

    def forget(self, copy: int, removed: list[int]) -> None:
        block_hash = self.hash_of.pop(copy)
        del self.holders[copy]
        self.copies[block_hash].discard(copy)
        if not self.copies[block_hash]:
            del self.copies[block_hash]
        removed.append(block_hash)

    def reset(self) -> None:
        self.__init__(self.num_blocks, self.block_size)  # type: ignore[misc]
