"""The one protocol behind which every allocator stands.

An allocator owns the pool of KV blocks. A sequence asks it for room and receives an `Allocation`: a block table that
only grows, of which a first part may already hold the KV of the prompt's prefix. "Does not fit" is a value, not an
exception, and changes nothing. A broken invariant is an AssertionError.

    sequence tokens   |<------ num_cached_tokens ------>|<- computed by this sequence ->|<- room ->|
    block_table       [  7  ][ 12 ][  3  ][  9  ][  4  ][ 15 ][ 16 ][  2  ]
                       ^ shared: ref counted, never written          ^ own: written at slots()

The life of a block: free -> taken by allocate/extend -> written by a forward -> committed (findable, if full) ->
released by free -> still findable while free -> evicted when taken again. A block becomes findable only through
`commit`, that is after the forward that wrote it has returned; a failed step simply never commits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from cache.events import BlockEvent
from cache.types import BlockHash, BlockId


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counters since the start and gauges of now. `num_free_blocks` includes evictable blocks that keep their hash."""

    num_blocks: int
    num_free_blocks: int
    num_cached_blocks: int
    query_tokens: int
    hit_tokens: int
    evictions: int
    lru_tail_age: int
    """How long the pool remembers: allocations, and for `radix` commits, since the block that is evicted next was used.
    0 while nothing needs to be evicted."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """The engine must copy the KV of `source` to `destination`, in the order given, before the next forward."""

    source: BlockId
    destination: BlockId


class Allocation(Protocol):
    """One sequence's hold on the pool. It is freed exactly once, by its owner; a second `free` asserts."""

    @property
    def block_table(self) -> Sequence[BlockId]:
        """Physical blocks in token order; grows at its end, and is never to be changed by the reader."""

    @property
    def num_cached_tokens(self) -> int:
        """Tokens of the prompt whose KV was found at `allocate`: always less than the prompt's length."""

    @property
    def capacity(self) -> int:
        """Tokens that fit into the blocks held now."""

    def slots(self, start: int, stop: int) -> list[int]:
        """Flat pool positions (block id * block size + offset) of tokens start..stop-1, stop <= capacity."""

    def extend(self, num_tokens: int) -> bool:
        """Make room for `num_tokens` tokens in total; the blocks of those not yet computed become this sequence's own.

        Call it before every step that writes, with the number of tokens that will be computed after it; after
        `allocate` it may be left out as long as nothing was forked. False: it does not fit and nothing has changed.
        A shared block that would be written is replaced by a copy (see `Allocator.take_copies`).
        """

    def commit(self, token_ids: Sequence[int], num_computed: int) -> None:
        """The KV of token_ids[:num_computed] is written: full blocks in it become findable.

        `token_ids` are all tokens of the sequence so far, prompt and output; those committed earlier are unchanged.
        """

    def fork(self) -> Allocation:
        """Another sequence with the same computed tokens, sharing every block. Never fails: it takes no block.

        Commit what is computed before. Afterwards both sequences call `extend` before they write.
        """

    def free(self) -> None:
        """Release every block, tail first. Committed blocks stay findable until they are evicted."""


class Allocator(Protocol):
    """Owner of the pool: blocks 1 .. num_blocks - 1 (block 0 is the null block)."""

    @property
    def block_size(self) -> int: ...

    @property
    def num_blocks(self) -> int: ...

    @property
    def num_free_blocks(self) -> int:
        """Blocks that an allocation could take now, evictable ones included."""

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that a sequence of so many tokens holds."""

    def allocate(
        self,
        num_tokens: int,
        token_ids: Sequence[int],
        root: BlockHash,
        *,
        reuse: bool = True,
        hashes: Sequence[BlockHash] | None = None,
    ) -> Allocation | None:
        """Room for `num_tokens` (>= 1) tokens of a sequence that begins with `token_ids`, or None: does not fit.

        `root` (see `cache.hashing`) keeps tenants, models and adapters apart. At least one token of `token_ids` is
        always left to compute. `reuse=False` reads nothing from the cache (prompt logprobs) but still writes.
        `hashes` is `hash_chain(root, token_ids, block_size)` if the caller has it: a request that waits is hashed once.
        More room than `num_tokens` is held when more is found cached.
        """

    def find(self, token_ids: Sequence[int], root: BlockHash, *, hashes: Sequence[BlockHash] | None = None) -> int:
        """Tokens that `allocate` would find cached now. Changes nothing, not even the order of eviction."""

    def take_events(self) -> list[BlockEvent]:
        """Events since the last call, in order. Call it after every step."""

    def take_copies(self) -> list[BlockCopy]:
        """Copies that the engine owes since the last call, in order."""

    def held(self) -> Iterator[BlockHash]:
        """Every findable hash, parents before children."""

    def reset(self) -> bool:
        """Forget everything cached. False, and nothing changed, while any allocation lives."""

    def stats(self) -> CacheStats: ...

    def check_integrity(self) -> None:
        """Assert every invariant of the pool. Linear in its size: for tests and for idle time."""
