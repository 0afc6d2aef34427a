"""The block pool of a simulated engine, and the events that it sends: vLLM's, and those that changes to it propose.

A prompt is a list of token ids and marks: `CAT` and `DOG` begin an image, and `MORE` goes on with it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Literal

from cache.hashing import MediaStart, hash_chain
from cache.types import BlockHash
from worker.adapter.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, EngineHash, Event

ROOT = BlockHash(b"A" * 16)
OTHER = BlockHash(b"B" * 16)
ROOTS = (ROOT, OTHER, None)
"""None: the request came without a salt."""
LORAS = (None, "adapter", "0" * 32)
LORA_ROOTS = {"adapter": BlockHash(b"C" * 16), "0" * 32: BlockHash(b"D" * 16)}
"""A gateway's root depends on the adapter, so one root never stands with and without it."""
CAT, DOG, MORE = -1, -2, -3
IMAGES = {CAT: "cat", DOG: "dog"}
PLACEHOLDER = 7
Removals = Literal["each", "last", "counted"]
"""A removal is sent for each copy (vLLM 0.32), only for the last, or with the number of remaining copies."""
REMOVALS: tuple[Removals, ...] = ("each", "last", "counted")


def ids_of(prompt: Sequence[int]) -> list[int]:
    """Return the engine's token ids of a prompt."""
    return [PLACEHOLDER if each < 0 else each for each in prompt]


def media_of(prompt: Sequence[int]) -> list[MediaStart]:
    return [MediaStart(IMAGES[each], position) for position, each in enumerate(prompt) if each in IMAGES]


def entries_of(prompt: Sequence[int], begin: int, end: int) -> tuple[list[object], ...]:
    """Return the images in a range of a prompt, as vLLM's extra keys name them."""
    found: list[list[object]] = []
    for start in media_of(prompt[:end]):
        length = next((at for at, each in enumerate(prompt[start.position + 1 :], 1) if each != MORE), len(prompt))
        if start.position + length > begin:
            found.append([start.identity, start.position - begin])
    return tuple(found)


def our_chain(root: BlockHash, prompt: Sequence[int], block_size: int) -> list[BlockHash]:
    return hash_chain(root, ids_of(prompt), block_size, media_of(prompt))


@dataclass(frozen=True)
class Block:
    key: EngineHash
    parent: EngineHash | None
    root: BlockHash | None
    tokens: tuple[int, ...]
    """All from the start of the prompt."""


@dataclass
class FakeEngine:
    """The block pool of an engine, which counts copies and reports changes."""

    block_size: int
    removals: Removals = "each"
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
            block = Block(int.from_bytes(digest) if digest[0] % 2 else digest, key, root, tuple(tokens[:end]))
            chain.append(block)
            key = block.key
        return chain

    def serve(self, tokens: Sequence[int], root: BlockHash | None, lora: str | None, copy_from: int | None) -> None:
        """Compute a prompt. It reuses what is held, or, from a block on, computes it next to another that does."""
        chain = self.chain(tokens, root, lora)
        hits = next((at for at, block in enumerate(chain) if not self.copies.get(block.key)), len(chain))
        first = hits if copy_from is None else min(hits, copy_from)
        stored = chain[first:]
        self._say_stored(tokens, root, lora, chain, first)
        for block in stored:
            self.blocks[block.key] = block
            self.copies[block.key] = self.copies.get(block.key, 0) + 1

    def num_found(self, tokens: Sequence[int], root: BlockHash | None, lora: str | None) -> int:
        """The prompt's tokens that it finds: whole blocks, and never the last token."""
        chain = self.chain(tokens, root, lora)[: (len(tokens) - 1) // self.block_size]
        hits = next((at for at, block in enumerate(chain) if not self.copies.get(block.key)), len(chain))
        return hits * self.block_size

    def report_reuse(self, tokens: Sequence[int], root: BlockHash | None, lora: str | None) -> None:
        """Report again the blocks that a prompt reuses (`kv_cache_report_mode: full`)."""
        num_blocks = self.num_found(tokens, root, lora) // self.block_size
        self._say_stored(tokens, root, lora, self.chain(tokens, root, lora)[:num_blocks], 0)

    def _say_stored(
        self, tokens: Sequence[int], root: BlockHash | None, lora: str | None, chain: list[Block], first: int
    ) -> None:
        stored = chain[first:]
        if not stored:
            return
        salts = [root.hex()] if root is not None else []
        names = [lora] if lora is not None else []
        size = self.block_size
        entries = [entries_of(tokens, at * size, (at + 1) * size) for at in range(len(chain))]
        keys = tuple((*names, *each, *(() if at else salts)) or None for at, each in enumerate(entries))
        self.events.append(
            BlockStored(
                tuple(block.key for block in stored),
                stored[0].parent,
                tuple(ids_of(tokens[first * size : len(chain) * size])),
                self.block_size,
                "GPU",
                lora,
                keys[first:],
                0,
                "full_attention",
            )
        )

    def evict(self, key: EngineHash) -> int:
        """Evict a copy, and return how many are left."""
        num_left = self.copies[key] = self.copies[key] - 1
        if not num_left:
            del self.copies[key]
        if self.removals == "counted":
            self.events.append(BlockRemoved((key,), "GPU", 0, (num_left,)))
        elif self.removals == "each" or not num_left:
            self.events.append(BlockRemoved((key,), "GPU", 0))
        return num_left

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
        chains = [our_chain(block.root, block.tokens, block_size) for block in found if block.root is not None]
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
