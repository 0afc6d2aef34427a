"""The block pool of a simulated engine, and the events that it sends."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

from cache.hashing import hash_chain
from cache.types import BlockHash
from worker.adapter.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event

ROOT = BlockHash(b"A" * 16)
OTHER = BlockHash(b"B" * 16)
ROOTS = (ROOT, OTHER, None)
"""None: the request came without a salt."""
LORAS = (None, "adapter", "0" * 32)


@dataclass(frozen=True)
class Block:
    key: EngineHash
    parent: EngineHash | None
    root: BlockHash | None
    tokens: tuple[int, ...]
    """All from the start of the prompt."""


@dataclass
class FakeEngine:
    """The block pool of an engine, which counts copies and says what changes."""

    block_size: int
    copies: dict[EngineHash, int] = field(default_factory=dict)
    blocks: dict[EngineHash, Block] = field(default_factory=dict)
    """All that were ever stored."""
    events: list[Event] = field(default_factory=list)

    def take_events(self) -> list[Event]:
        events, self.events = self.events, []
        return events

    def chain(self, tokens: Sequence[int], root: BlockHash | None, lora: str | None) -> list[Block]:
        """The full blocks of a prompt."""
        chain: list[Block] = []
        key: EngineHash | None = None
        for end in range(self.block_size, len(tokens) + 1, self.block_size):
            named = repr((key, tokens[end - self.block_size : end], root, lora)).encode()
            digest = blake2b(named, digest_size=8).digest()
            block = Block(int.from_bytes(digest) if len(tokens) % 2 == 0 else digest, key, root, tuple(tokens[:end]))
            chain.append(block)
            key = block.key
        return chain

    def serve(self, tokens: Sequence[int], root: BlockHash | None, lora: str | None, copy_from: int | None) -> None:
        """Compute a prompt. It reuses what is held, or, from a block on, computes it next to another that does."""
        chain = self.chain(tokens, root, lora)
        hits = next((at for at, block in enumerate(chain) if not self.copies.get(block.key)), len(chain))
        first = hits if copy_from is None else min(hits, copy_from)
        stored = chain[first:]
        if not stored:
            return
        salts = [root.hex()] if root is not None else []
        names = [lora] if lora is not None else []
        later = tuple(names) or None
        keys = (tuple(names + salts) or None, *(later for _ in chain[1:]))
        self.events.append(
            BlockStored(
                tuple(block.key for block in stored),
                stored[0].parent,
                tuple(tokens[first * self.block_size : len(chain) * self.block_size]),
                self.block_size,
                None,
                "GPU",
                lora,
                keys[first:],
                0,
                "full_attention",
            )
        )
        for block in stored:
            self.blocks[block.key] = block
            self.copies[block.key] = self.copies.get(block.key, 0) + 1

    def evict(self, key: EngineHash) -> None:
        self.copies[key] -= 1
        if not self.copies[key]:
            del self.copies[key]
        self.events.append(BlockRemoved((key,), "GPU", 0))

    def leaves(self) -> list[EngineHash]:
        parents = {self.blocks[key].parent for key in self.copies}
        return [key for key in self.copies if key not in parents]

    def reset(self) -> None:
        self.copies = {}
        self.events.append(AllBlocksCleared())

    def is_findable(self, key: EngineHash | None) -> bool:
        while key is not None:
            if not self.copies.get(key):
                return False
            key = self.blocks[key].parent
        return True

    def held(self, block_size: int) -> set[BlockHash]:
        """The hashes of our blocks that the engine holds with all before them."""
        found = [self.blocks[key] for key in self.copies if self.is_findable(key)]
        chains = [hash_chain(block.root, block.tokens, block_size) for block in found if block.root is not None]
        return {block_hash for chain in chains for block_hash in chain}


def stored(
    *keys: EngineHash,
    parent: EngineHash | None = None,
    tokens: Iterable[int] = (),
    size: int = 2,
    extra: tuple[tuple[object, ...] | None, ...] | None = None,
    **fields: object,
) -> BlockStored:
    token_ids = tuple(tokens) or tuple(range(size * len(keys)))
    return BlockStored(keys, parent, token_ids, size, extra_keys=extra, **fields)  # type: ignore[arg-type]
