"""Assigns blocks to tenants when the engine's events carry no salt (SGLang).

Such an engine gives equal prompts of two tenants equal hashes. So its blocks are hashed from `UNSALTED_ROOT`. If recent
requests of exactly one tenant have a block's tokens, it is published under that tenant's root. If two tenants have
them, neither the block nor any block after it is published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from cache.events import BlockEvent, Removed, Stored
from cache.hashing import hash_chain
from cache.types import HASH_BYTES, BlockHash

UNSALTED_ROOT: Final = BlockHash(bytes(HASH_BYTES))
"""The parent of first blocks without a salt. Its hashes never leave this process."""


@dataclass(slots=True, eq=False)
class _Claim:
    """One of our blocks, in the requests with one root."""

    unsalted: BlockHash
    parent: _Claim | None
    root: BlockHash
    block_hash: BlockHash
    """The hash under `root`, which gateways look up."""
    children: dict[_Claim, None] = field(default_factory=dict)
    is_ambiguous: bool = False
    """Requests with another root have the block too."""
    is_published: bool = False


class RequestClaims:
    """The blocks that recent requests claim, and which of them the engine holds. Owned by `EngineBlocks`."""

    def __init__(self, block_size: int, max_claims: int) -> None:
        """`max_claims` bounds the claims on blocks that the engine does not hold."""
        self.published: dict[BlockHash, None] = {}
        """In the order of storing: parents first."""
        self._block_size = block_size
        self._max_claims = max_claims
        self._claims: dict[BlockHash, _Claim] = {}
        """By unsalted hash. The latest request comes last, its parents first."""
        self._held: set[BlockHash] = set()

    def claim(self, root: BlockHash, token_ids: Sequence[int]) -> list[BlockEvent]:
        """Claim the full blocks of these tokens for `root`. Returns the changes of what is published."""
        events: list[BlockEvent] = []
        parent: _Claim | None = None
        unsalted_hashes = hash_chain(UNSALTED_ROOT, token_ids, self._block_size)
        hashes = hash_chain(root, token_ids, self._block_size)
        for unsalted, block_hash in zip(unsalted_hashes, hashes, strict=True):
            claim = self._claims.pop(unsalted, None)
            if claim is None:
                claim = _Claim(unsalted, parent, root, block_hash)
                if parent is not None:
                    parent.children[claim] = None
            elif claim.root != root:
                claim.is_ambiguous = True
                events += self._unpublish(claim)
            self._claims[unsalted] = claim
            if unsalted in self._held:
                events += self._publish(claim)
            parent = claim
        if len(self._claims) > len(self._held) + 2 * self._max_claims:
            self._forget_oldest()
        return events

    def add(self, unsalted: BlockHash) -> list[BlockEvent]:
        """Note that the engine holds the block, and every block before it."""
        self._held.add(unsalted)
        claim = self._claims.get(unsalted)
        return [] if claim is None else self._publish(claim)

    def remove(self, unsalted: BlockHash) -> list[BlockEvent]:
        """Note that the engine no longer holds the block, nor any block after it."""
        self._held.discard(unsalted)
        claim = self._claims.get(unsalted)
        return [] if claim is None else self._unpublish(claim)

    def forget_held(self) -> None:
        """Forget what the engine holds, without events. Claims stay."""
        self._held.clear()
        self.published.clear()
        for claim in self._claims.values():
            claim.is_published = False

    def _publish(self, claim: _Claim) -> list[BlockEvent]:
        """Publish a held block that only one root claims, if all blocks before it are published."""
        parent = claim.parent
        if claim.is_published or claim.is_ambiguous or (parent is not None and not parent.is_published):
            return []
        claim.is_published = True
        self.published[claim.block_hash] = None
        return [Stored(claim.block_hash)]

    def _unpublish(self, claim: _Claim) -> list[BlockEvent]:
        """Remove a block from what is published, after all blocks that follow it."""
        if not claim.is_published:
            return []
        removed = [claim]
        for claim in removed:
            claim.is_published = False
            del self.published[claim.block_hash]
            removed += [child for child in claim.children if child.is_published]
        return [Removed(claim.block_hash) for claim in reversed(removed)]

    def _forget_oldest(self) -> None:
        """Keep the claims on held blocks and the latest of the others. A claim goes with its parent."""
        num_spare = len(self._claims) - len(self._held) - self._max_claims
        kept: dict[BlockHash, _Claim] = {}
        for unsalted, claim in self._claims.items():
            parent = claim.parent
            if unsalted not in self._held and (num_spare > 0 or (parent is not None and parent.unsalted not in kept)):
                num_spare -= 1
                if parent is not None and parent.unsalted in kept:
                    parent.children.pop(claim)
            else:
                kept[unsalted] = claim
        self._claims = kept
