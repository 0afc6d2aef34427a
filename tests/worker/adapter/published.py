"""An engine's blocks as a gateway keeps them, from the events of `EngineBlocks`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from cache.events import BlockEvent, Removed, Stops, Stored
from cache.types import BlockHash
from worker.adapter.blocks import Applied


class Published(dict[BlockHash, int]):
    """The blocks, each with the number of blocks after which a hit on it stops (0: none, or an engine without ends)."""

    def apply(self, applied: Applied) -> None:
        if applied.cleared:
            self.clear()
        self.replay(applied.events)

    def replay(self, events: Iterable[BlockEvent]) -> Published:
        """Apply events, each of which changes something."""
        for event in events:
            match event:
                case Stored(block_hash):
                    assert block_hash not in self
                    self[block_hash] = 0
                case Removed(block_hash):
                    del self[block_hash]
                case Stops(block_hash, num_blocks):
                    assert self[block_hash] != num_blocks
                    self[block_hash] = num_blocks
        return self

    def num_matched(self, chain: Sequence[BlockHash]) -> int:
        return next((at for at, block in enumerate(chain) if block not in self), len(chain))

    def stop(self, chain: Sequence[BlockHash], block_size: int, num_tokens: int) -> int:
        """Return where a hit stops: never at the end of a prompt, as its last token is always computed."""
        stops = [self[block] * block_size for block in reversed(chain[: self.num_matched(chain)])]
        return next((stop for stop in stops[:2] if stop < num_tokens), 0)
