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

    def locate(self, event: BlockStored, position: int, parent: Node | None, block_size: int) -> None:
        """Take root and hashes from the parent and from this block of an event, if tokens and root identify it.

        `parent`: None for the first block of a prompt.
        """
        size, keys, num_blocks = event.block_size, event.extra_keys, len(event.block_hashes)
        if len(event.token_ids) != size * num_blocks or (keys and len(keys) != num_blocks):
            return
        own_keys = keys[position] if keys else None
        if parent is None:
            root, own_keys = _salt(own_keys, event)
            parent = Node(b"", root=root, last=root)
        entries = _entries(own_keys, event.lora_name, size)
        if parent.root is None or parent.last is None or entries is None:
            return
        begin = len(parent.tail)
        tokens = [*parent.tail, *event.token_ids[position * size : (position + 1) * size]]
        media = [*parent.tail_media, *[MediaStart(name, begin + offset) for name, offset in entries if offset >= 0]]
        self.root, self.adapter = parent.root, None if event.cache_salt is None else event.lora_name
        self.num_tokens = parent.num_tokens + size
        self.hashes = hash_chain(parent.last, tokens, block_size, media)
        self.last = self.hashes[-1] if self.hashes else parent.last
        done = len(self.hashes) * block_size
        self.tail = tokens[done:] or ()
        tail = [MediaStart(each.identity, each.position - done) for each in media if each.position >= done]
        self.tail_media = tail or ()

    def later_hashes(self) -> list[BlockHash]:
        """Return the hashes whose stops depend on this block's: its own, and those inside the next blocks."""
        return [*self.hashes, *(block_hash for child in self.children or () for block_hash in child.hashes)]

    def stop_at(self, block_hash: BlockHash, block_size: int) -> int:
        """Return where a hit stops that matches up to one of `hashes`, in tokens."""
        is_end = block_hash == self.last and self.num_tokens % block_size == 0
        if is_end:
            return self.stop
        return 0 if self.parent is None else self.parent.stop


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
