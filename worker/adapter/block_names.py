"""A block of another engine, and the hashes of our blocks that end inside it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from cache.hashing import MediaStart, hash_chain
from cache.types import HASH_BYTES, BlockHash
from worker.adapter.kv_events import BlockStored, EngineHash

_Keys = tuple[Any, ...] | None
"""Further inputs of a block's hash: LoRA name, (identity, offset) of each image, salt of the first block."""
_SALT: Final = re.compile(rf"[0-9a-f]{{{2 * HASH_BYTES}}}")


@dataclass(slots=True, eq=False)
class Node:
    """A block of the engine."""

    key: EngineHash
    is_orphan: bool
    """A block before it is unknown, and so is the root."""
    parent: Node | None = None
    """The block before it, whose root is known."""
    is_ambiguous: bool = False
    """Its name came after different parents, so it does not identify the blocks before it."""
    children: set[Node] | None = None
    is_held: bool = False
    is_visible: bool = False
    stored_at: int = 0
    """The batch that stored it, or a block after it, last."""
    root: BlockHash | None = None
    adapter: str | None = None
    """Its LoRA adapter, for an engine whose blocks get new names if it loads the adapter again (SGLang)."""
    hashes: Sequence[BlockHash] = ()
    """The hashes of our blocks that end inside this one."""
    last: BlockHash | None = None
    """The hash of our last block up to its end, or the root; None while the root is unknown."""
    tail: Sequence[int] = ()
    """The tokens after `last`."""
    tail_media: Sequence[MediaStart] = ()
    """The media that begin in `tail`, by their positions in it."""
    num_tokens: int = 0
    """The tokens up to its end, if the root is known."""
    runs: dict[int, int] | None = None
    """By KV group, how many adjacent blocks up to this one it holds; see `groups.py`."""
    stop: int = 0
    """Where a hit stops whose match ends with this block, in tokens; 0 for an engine without ends (`groups.py`)."""

    def later_hashes(self) -> list[BlockHash]:
        """Return the hashes whose stops depend on this block's: its own, and those inside the next blocks."""
        return [*self.hashes, *(block_hash for child in self.children or () for block_hash in child.hashes)]

    def stop_at(self, block_hash: BlockHash, block_size: int) -> int:
        """Return where a hit stops that matches up to one of `hashes`, in tokens."""
        is_end = block_hash == self.last and self.num_tokens % block_size == 0
        if is_end:
            return self.stop
        return 0 if self.parent is None else self.parent.stop


@dataclass(frozen=True, slots=True)
class Names:
    """The hashes of our blocks that end inside the blocks of one event, from position `first` up to `end`."""

    root: BlockHash
    tokens: list[int]
    """The parent's tail, and the tokens of the named blocks."""
    media: list[MediaStart]
    """The media that begin in `tokens`, by their positions in it."""
    hashes: list[BlockHash]
    """The parent's last hash, and the hashes of `tokens`."""
    first: int
    end: int
    num_tail: int
    num_before: int
    """The tokens before the first of these blocks."""
    engine_block_size: int
    block_size: int
    adapter: str | None = None
    """`Node.adapter`."""

    @classmethod
    def of(cls, event: BlockStored, first: int, parent: Node | None, is_orphan: bool, block_size: int) -> Names:
        """Name the blocks of an event from position `first` that tokens and root identify."""
        num_blocks, size = len(event.block_hashes), event.block_size
        keys = event.extra_keys or (None,) * num_blocks
        if is_orphan or len(event.token_ids) != size * num_blocks or len(keys) != num_blocks:
            return _NO_NAMES
        media: list[MediaStart] = []
        if parent is not None:
            root, own_keys = parent.root, keys[first]
            last, tail, media = parent.last, parent.tail, [*parent.tail_media]
        else:
            root, own_keys = _salt(keys[first], event)
            last, tail = root, ()
        if root is None or last is None:
            return _NO_NAMES
        end = first
        while end < num_blocks:
            entries = _entries(own_keys if end == first else keys[end], event.lora_name, size)
            if entries is None:
                break
            begin = len(tail) + (end - first) * size
            media += [MediaStart(identity, begin + offset) for identity, offset in entries if offset >= 0]
            end += 1
        if end == first:
            return _NO_NAMES
        tokens = [*tail, *event.token_ids[first * size : end * size]]
        hashes = [last, *hash_chain(last, tokens, block_size, media)]
        num_before = 0 if parent is None else parent.num_tokens
        adapter = None if event.cache_salt is None else event.lora_name
        return cls(root, tokens, media, hashes, first, end, len(tail), num_before, size, block_size, adapter)

    def assign(self, node: Node, position: int) -> None:
        """Give the node at a position of the event its hashes, if it is in the named range."""
        if position >= self.end:
            return
        begin = self.num_tail + (position - self.first) * self.engine_block_size
        end = begin + self.engine_block_size
        # The first block completes a block that its parent's tail began; the tail is everything before `begin`.
        num_before, num_done = begin // self.block_size, end // self.block_size
        done = num_done * self.block_size
        node.root, node.adapter = self.root, self.adapter
        node.num_tokens = self.num_before + end - self.num_tail
        node.hashes = self.hashes[num_before + 1 : num_done + 1]
        node.last = self.hashes[num_done]
        node.tail = self.tokens[done:end] if end % self.block_size else ()
        node.tail_media = (
            ()
            if not node.tail
            else [MediaStart(each.identity, each.position - done) for each in self.media if done <= each.position < end]
        )


_NO_NAMES: Final = Names(BlockHash(bytes(HASH_BYTES)), [], [], [], 0, 0, 0, 0, 1, 1)


def _salt(keys: _Keys, event: BlockStored) -> tuple[BlockHash | None, _Keys]:
    """Return the root that a first block has as its salt, and its keys before the salt."""
    salt, rest = (event.cache_salt, keys) if event.cache_salt is not None or not keys else (keys[-1], keys[:-1])
    if not isinstance(salt, str) or not _SALT.fullmatch(salt):
        return None, None
    if event.cache_salt is None and event.lora_name is not None and (rest or ())[:1] != (event.lora_name,):
        return None, None
    return BlockHash(bytes.fromhex(salt)), rest


def _entries(keys: _Keys, lora_name: str | None, size: int) -> Sequence[tuple[str, int]] | None:
    """Return the media in a block of `size` tokens, each with its offset, which is negative if it began earlier.

    None: the block's hash covers more than tokens, parent, LoRA name and media.
    """
    if not keys:
        return ()
    if lora_name is not None:
        if keys[0] != lora_name:
            return None
        keys = keys[1:]
    for each in keys:
        if not isinstance(each, (list, tuple)) or len(each) != 2:
            return None
        identity, offset = each
        if type(identity) is not str or type(offset) is not int or offset >= size:
            return None
    return keys
