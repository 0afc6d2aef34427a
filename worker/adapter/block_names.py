"""A block of another engine, and the hashes of our blocks that end inside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

from cache.hashing import hash_chain
from cache.types import HASH_BYTES, BlockHash
from worker.adapter.claims import UNSALTED_ROOT
from worker.adapter.kv_events import BlockStored, EngineHash

_SALT: Final = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


class Node:
    """A block of the engine."""

    __slots__ = (
        "children",
        "hashes",
        "is_ambiguous",
        "is_held",
        "is_orphan",
        "is_visible",
        "key",
        "last",
        "parent",
        "root",
        "stored_at",
        "tail",
    )

    def __init__(self, key: EngineHash, is_orphan: bool) -> None:
        self.key = key
        self.parent: Node | None = None
        """The block before it, whose root is known."""
        self.is_orphan = is_orphan
        """A block before it is unknown, and with it the root."""
        self.is_ambiguous = False
        """It came behind different parents: its name does not tell the blocks before it."""
        self.children: set[Node] | None = None
        self.is_held = False
        self.is_visible = False
        self.stored_at = 0
        """The batch that stored it last."""
        self.root: BlockHash | None = None
        self.hashes: Sequence[BlockHash] = ()
        """The hashes of our blocks that end inside this one."""
        self.last: BlockHash | None = None
        """The hash of our last block up to its end, or the root; None while the root is unknown."""
        self.tail: Sequence[int] = ()
        """The tokens behind `last`."""


class Names:
    """The hashes of our blocks that end inside the blocks of one event, from the first one that has no name."""

    def __init__(
        self, event: BlockStored, first: int, parent: Node | None, is_orphan: bool, block_size: int, unsalted: bool
    ) -> None:
        self._root: BlockHash | None = None
        num_blocks = len(event.block_hashes)
        keys = event.extra_keys or (None,) * num_blocks
        if is_orphan or len(event.token_ids) != event.block_size * num_blocks or len(keys) != num_blocks:
            return
        if parent is None:
            if unsalted:
                self._root = UNSALTED_ROOT if _is_plain(keys[first], event.lora_name) else None
            else:
                self._root = _salt(keys[first], event.lora_name)
            last: BlockHash | None = self._root
        else:
            self._root = parent.root if _is_plain(keys[first], event.lora_name) else None
            last = parent.last
        if self._root is None or last is None:
            return
        named = next(
            (at for at in range(first + 1, num_blocks) if not _is_plain(keys[at], event.lora_name)), num_blocks
        )
        tail = () if parent is None else parent.tail
        self._tokens = [*tail, *event.token_ids[first * event.block_size : named * event.block_size]]
        self._hashes = [last, *hash_chain(last, self._tokens, block_size)]
        self._first = first
        self._end = named
        self._num_tail = len(tail)
        self._engine_block_size = event.block_size
        self._block_size = block_size

    def give(self, node: Node, position: int) -> None:
        """Name the node of the block at a position of the event, or leave it opaque."""
        if self._root is None or position >= self._end:
            return
        begin = self._num_tail + (position - self._first) * self._engine_block_size
        end = begin + self._engine_block_size
        # The first block of an event completes what its parent's tail began; that tail is all before `begin`.
        num_before, num_done = begin // self._block_size, end // self._block_size
        node.root = self._root
        node.hashes = self._hashes[num_before + 1 : num_done + 1]
        node.last = self._hashes[num_done]
        node.tail = self._tokens[num_done * self._block_size : end] if end % self._block_size else ()


def _salt(keys: tuple[Any, ...] | None, lora_name: str | None) -> BlockHash | None:
    """Return the root that stands as salt in a first block's keys, behind the LoRA name if there is one."""
    names = () if lora_name is None else (lora_name,)
    if not keys or keys[:-1] != names or not isinstance(keys[-1], str) or not _SALT.fullmatch(keys[-1]):
        return None
    return BlockHash(bytes.fromhex(keys[-1]))


def _is_plain(keys: tuple[Any, ...] | None, lora_name: str | None) -> bool:
    """Say whether the tokens and the LoRA name are all that went into a block's hash, besides its parent."""
    return not keys or (lora_name is not None and keys == (lora_name,))
