"""The radix cache of one SGLang scheduler, and its events with the layout of SGLang's own structs.

A tree of pages, in a namespace for each salt and LoRA adapter. With EAGLE its keys are pairs of adjacent tokens, so a
page also covers the token after it. Only leaves are evicted.
Source: sglang/srt/disaggregation/kv_events.py, mem_cache/radix_cache.py, mem_cache/events.py (0.5.23).
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import msgspec


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[Any]
    attn_dp_rank: int | None = None


class CacheEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """A map with its type. Fields with their default are left out."""


class BlockStored(CacheEvent):
    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None
    medium: str | None = None
    cache_salt: str | None = None
    session_id: str | None = None
    lora_name: str | None = None


class BlockRemoved(CacheEvent):
    block_hashes: list[int]
    medium: str | None = None


class AllBlocksCleared(CacheEvent):
    pass


@dataclass(frozen=True)
class Space:
    """Requests with another salt or adapter share no page."""

    salt: str | None = None
    lora_name: str | None = None
    lora_id: str | None = None
    """New at every load of the adapter."""


@dataclass
class RadixCache:
    """The pages that the scheduler holds, by their names in events."""

    page_size: int
    has_pairs: bool = False
    pages: dict[int, int | None] = field(default_factory=dict)
    """The parent of each page, least recently used first."""
    events: list[CacheEvent] = field(default_factory=list)

    def take_events(self) -> list[CacheEvent]:
        events, self.events = self.events, []
        return events

    def keys(self, token_ids: Sequence[int]) -> list[Any]:
        return list(pairwise(token_ids)) if self.has_pairs else list(token_ids)

    def names(self, token_ids: Sequence[int], space: Space) -> list[int]:
        """The names of a sequence's full pages."""
        keys, names = self.keys(token_ids), []
        digest = b"" if space.salt is None else hashlib.sha256(b"sglang-cache-salt-v1\0" + space.salt.encode()).digest()
        for start in range(0, len(keys) - self.page_size + 1, self.page_size):
            digest = hashlib.sha256(digest + repr(keys[start : start + self.page_size]).encode()).digest()
            own = digest if space.lora_id is None else hashlib.sha256(space.lora_id.encode() + digest).digest()
            names.append(int.from_bytes(own[:8], "big", signed=True))
        return names

    def num_found(self, token_ids: Sequence[int], space: Space) -> int:
        """The tokens that a request finds: whole pages, and never the last token."""
        names = self.names(token_ids[: max(0, len(token_ids) - 1)], space)
        return self.page_size * next((at for at, name in enumerate(names) if name not in self.pages), len(names))

    def insert(self, token_ids: Sequence[int], space: Space, session_id: str | None = None) -> None:
        """Keep the full pages of a request."""
        names, keys, size = self.names(token_ids, space), self.keys(token_ids), self.page_size
        first = next((at for at, name in enumerate(names) if name not in self.pages), len(names))
        for name in names[:first]:
            self.pages[name] = self.pages.pop(name)
        if first == len(names):
            return
        parent = names[first - 1] if first else None
        for name, before in zip(names[first:], [parent, *names[first:]], strict=False):
            self.pages[name] = before
        self.events.append(
            BlockStored(
                names[first:],
                parent,
                keys[first * size : len(names) * size],
                size,
                None,
                "GPU",
                space.salt,
                session_id,
                space.lora_name,
            )
        )

    def leaves(self) -> list[int]:
        """The pages that can be evicted, least recently used first."""
        parents = set(self.pages.values())
        return [name for name in self.pages if name not in parents]

    def evict(self, name: int) -> None:
        del self.pages[name]
        self.events.append(BlockRemoved([name], "GPU"))

    def reset(self) -> None:
        self.pages = {}
        self.events.append(AllBlocksCleared())


class BlockStoredArray(msgspec.Struct, array_like=True, tag="BlockStored"):
    """As SGLang sent it up to 0.5.18."""

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[Any]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None


def as_array(event: CacheEvent) -> Any:
    if isinstance(event, BlockStored):
        return BlockStoredArray(event.block_hashes, event.parent_block_hash, event.token_ids, event.block_size)
    return [type(event).__name__, *([event.block_hashes] if isinstance(event, BlockRemoved) else [])]


def pack(ts: float, events: Sequence[CacheEvent], rank: int | None = None) -> bytes:
    return msgspec.msgpack.encode(Batch(ts, list(events), rank))
