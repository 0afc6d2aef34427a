"""The identifiers of the cache as distinct types: an id is never a hash, a hash never its truncation."""

from __future__ import annotations

from typing import Annotated, Final, Literal, NewType, get_args

from msgspec import Struct

BlockId = NewType("BlockId", int)
"""Index of a physical block in the KV pool. Block 0 is the null block and is never handed out."""

BlockHash = NewType("BlockHash", bytes)
"""16 bytes that name a full block and everything before it (see `cache.hashing`)."""

IndexEntry = NewType("IndexEntry", bytes)
"""The first 8 bytes of a `BlockHash`, for the shared index. A hint, never an identity."""

WorkerId = NewType("WorkerId", str)
Epoch = NewType("Epoch", str)
"""One incarnation of a worker's cache, from a start or a clearing to the next. Its blocks end with it."""

WorkerIncarnation = tuple[WorkerId, Epoch]
"""A worker in one of its epochs."""

GatewayId = NewType("GatewayId", str)

Tier = Literal["host", "disk"]
"""A store of blocks below the pool: pinned host memory, or files."""
TierName = Annotated[str, Tier]
"""A tier as its worker names it; a newer worker may use another name (see `cache.records`)."""
TIERS: Final = frozenset(get_args(Tier))
Place = Literal[Tier, "peer"]
"""Where blocks come from that are fetched into the pool."""

NULL_BLOCK: Final = BlockId(0)
HASH_BYTES: Final = 16  # with 128 bits, no two blocks have the same hash by chance
INDEX_ENTRY_BYTES: Final = 8  # a hint may be wrong, so it needs no whole hash


class ChainLink(Struct, frozen=True, gc=False):  # each cached block has one: less memory than a dataclass
    """A full block and its position in its chain."""

    block_hash: BlockHash
    parent: BlockHash
    """The root, at depth 0."""
    depth: int
    """Blocks before it."""
