"""The hand-over of a worker that leaves: its chains go to peers with enough room.

Those that no peer holds go first. Of these and of the others, the most recently used go first.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from http.client import HTTPException
from typing import Final

from cache.records import WorkerMember
from cache.redis_index import RegistryEntry
from cache.types import BlockHash
from worker.contracts.exchange import MAX_BLOCKS, MAX_CHAINS, BlockExchange, Handover, OfferedChain
from worker.kv_transfer.peers import FetchError
from worker.kv_transfer.warm_start import peers_of

logger = logging.getLogger(__name__)

HANDOVER_S: Final = 10.0
"""Time for a hand-over, after the last open request."""
ROOM_SHARE: Final = 0.5
"""The share of a peer's free blocks that a hand-over may take. They hold its least recently used blocks."""


Held = Callable[[Sequence[RegistryEntry], Sequence[BlockHash]], Awaitable[Sequence[bool]]]
"""Asks the index for each block whether one of the workers has it: `Publisher.held`."""


async def hand_over(member: WorkerMember, exchange: BlockExchange, entries: Sequence[RegistryEntry], held: Held) -> int:
    """Offer the chains of `member` to those of the registry's workers that can hold them. Return the blocks taken."""
    peers = peers_of(member, entries)
    room = [int(ROOM_SHARE * peer.load.num_free_blocks) for peer in peers]
    chains = await exchange.latest_chains(exchange.num_blocks if any(room) else 0)
    num_unused = sum(max(0, peer.load.num_blocks - peer.num_entries) for peer in peers)
    most = most_offered(exchange.num_blocks, num_unused)
    chains = unique_first(chains, await held(peers, [chain.tip for chain in chains]), most)
    offers = [
        asyncio.to_thread(_offer, exchange, peer.member, Handover(member.url, member.epoch, member.layout, offered))
        for peer, offered in zip(peers, share_out(chains, room), strict=True)
        if offered
    ]
    num_blocks = sum(await asyncio.gather(*offers))
    logger.info("handed %d blocks to %d peers", num_blocks, len(offers))
    return num_blocks


def most_offered(num_blocks: int, num_unused: int) -> int:
    """Return how many of a pool's `num_blocks` to offer to peers with `num_unused` blocks that hold nothing.

    Where blocks of peers have to go, the less recently used half is not worth them.
    """
    return max(num_unused, num_blocks // 2)


def unique_first(chains: Sequence[OfferedChain], held: Sequence[bool], most: int) -> list[OfferedChain]:
    """Return chains of at most that many blocks, those that are `held` elsewhere last."""
    chosen = []
    for chain, _ in sorted(zip(chains, held, strict=True), key=lambda pair: pair[1]):
        if chain.num_blocks <= most:  # a chain that is too long leaves the room to others
            most -= chain.num_blocks
            chosen.append(chain)
    return chosen


def share_out(chains: Sequence[OfferedChain], room: Sequence[int]) -> list[tuple[OfferedChain, ...]]:
    """Give each chain to the peer with the most room left, in blocks."""
    left = list(room)
    shares: list[list[OfferedChain]] = [[] for _ in room]
    for chain in chains:
        largest = max(range(len(left)), key=left.__getitem__)
        if left[largest] >= chain.num_blocks <= MAX_BLOCKS and len(shares[largest]) < MAX_CHAINS:
            left[largest] -= chain.num_blocks
            shares[largest].append(chain)
    return [tuple(share) for share in shares]


def _offer(exchange: BlockExchange, peer: WorkerMember, handover: Handover) -> int:
    try:
        return exchange.offer(peer.url, peer.epoch, handover, HANDOVER_S)
    except (OSError, HTTPException, FetchError, ValueError) as error:
        logger.warning("%s takes no blocks: %s", peer.url, error)
        return 0
