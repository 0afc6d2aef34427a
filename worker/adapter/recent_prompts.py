"""The prompts that passed through an adapter last, within a bound of memory."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from cache.hashing import encode_tokens
from cache.types import BlockHash
from worker.contracts.exchange import MAX_BLOCKS, MAX_CHAINS_BYTES, OfferedChain
from worker.wire import GenerateRequest

MIN_BLOCKS: Final = 4
"""Shorter prompts save too little."""
_OVERHEAD_BYTES: Final = 512
"""Memory of a kept prompt next to its tokens and hashes."""


class RecentPrompts:
    """Prompts of text with what roots their chains, so no tenant's counts for another. Owned by `PromptChains`."""

    def __init__(self, block_size: int, max_bytes: int = MAX_CHAINS_BYTES) -> None:
        """By default, all of them fit into one answer."""
        self.num_bytes = 0
        self._block_size = block_size
        self._max_bytes = max_bytes
        self._chains: OrderedDict[BlockHash, OfferedChain] = OrderedDict()
        """By the last block, the latest last."""

    def note(self, request: GenerateRequest, hashes: Sequence[BlockHash], *, is_latest: bool = True) -> None:
        """Keep a prompt as the latest, or else as the oldest, instead of its prefixes.

        Forget the oldest ones beyond the bound. `hashes`: those of its full blocks.
        """
        if request.media or not MIN_BLOCKS <= len(hashes) <= MAX_BLOCKS:
            return
        token_ids = encode_tokens(request.prompt_ids[: len(hashes) * self._block_size])
        chain = OfferedChain(request.root, b"".join(hashes), token_ids, request.adapter)
        if _num_bytes(chain) > self._max_bytes:
            return
        for block_hash in hashes:
            if (prefix := self._chains.pop(block_hash, None)) is not None:
                self.num_bytes -= _num_bytes(prefix)
        self._chains[hashes[-1]] = chain
        self._chains.move_to_end(hashes[-1], last=is_latest)
        self.num_bytes += _num_bytes(chain)
        while self.num_bytes > self._max_bytes:
            _, oldest = self._chains.popitem(last=False)
            self.num_bytes -= _num_bytes(oldest)

    def latest(self, max_blocks: int) -> list[OfferedChain]:
        """Return the prompts, the latest first, with `max_blocks` different blocks at most."""
        seen: set[BlockHash] = set()
        chains = []
        for chain in reversed(self._chains.values()):
            new = set(chain.block_hashes()) - seen
            if new and len(seen) + len(new) <= max_blocks:  # a chain that is too long leaves the space to others
                seen |= new
                chains.append(chain)
        return chains

    def clear(self) -> None:
        self._chains.clear()
        self.num_bytes = 0


def _num_bytes(chain: OfferedChain) -> int:
    return _OVERHEAD_BYTES + len(chain.hashes) + len(chain.token_ids) + len(chain.adapter.encode())
