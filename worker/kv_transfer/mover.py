"""The mover: whole chains go from one worker to another, when a worker joins and when it leaves.

There is one operation: a worker adopts a chain, and fetches its blocks from a peer. The worker that joins or leaves
makes the plan:

warm_start    a worker that joins adopts what its peers used last, before it registers
hand_over     a worker that leaves offers its chains to peers with enough room, which adopt them. Chains that no peer
              holds go first. Of these and of the others, the most recently used go first.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from operator import attrgetter, itemgetter
from typing import Final

from msgspec.structs import replace

from cache.records import WorkerMember
from cache.redis_index import RegistryEntry
from cache.types import BlockHash
from worker.contracts.exchange import MAX_BLOCKS, MAX_CHAINS, BlockExchange, ChainsWanted, Handover, OfferedChain

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 8
"""Peers that are asked, chosen at random."""
NUM_FETCHES: Final = 2
"""Chains that come at a time: the engine's other fetch threads stay free for requests."""
POOL_SHARE: Final = 0.5
"""The share of the own pool that may be filled."""
_ASK_SHARE: Final = 0.2
"""The share of `time_s` that a peer has to answer before it is left out."""
MAX_SENT_HASHES: Final = 1 << 20  # 16 MiB in an offer, half of what a worker reads
HANDOVER_S: Final = 10.0
"""Time for a hand-over, after the last open request."""
ROOM_SHARE: Final = 0.5
"""The share of a peer's free blocks that a hand-over may take. They hold its least recently used blocks."""

PeerEpoch = tuple[str, str]
"""The URL of a worker that gave blocks, and its epoch."""
HeldLookup = Callable[[Sequence[RegistryEntry], Sequence[BlockHash]], Awaitable[Sequence[bool]]]
"""Asks the index for each block whether one of the workers has it: `RegistryUpkeep.held`."""


@dataclass(eq=False)
class _Room:
    """Chains for one pool. A block that several of them have takes the room of one."""

    num_left: int
    """Blocks that may still be added."""
    chains: list[OfferedChain] = field(default_factory=list, init=False)
    num_hashes: int = field(default=0, init=False)
    """Hashes in a message with the chains, which repeats what they share."""
    _blocks: set[BlockHash] = field(default_factory=set, init=False)

    def add(self, chain: OfferedChain) -> int:
        """Add a chain if its new blocks fit. Return how many they are; 0 if they do not fit."""
        new = set(chain.block_hashes()) - self._blocks
        if len(new) > self.num_left:
            return 0
        self.num_left -= len(new)
        self._blocks |= new
        self.num_hashes += chain.num_blocks
        self.chains.append(chain)
        return len(new)


def peers_of(member: WorkerMember, entries: Sequence[RegistryEntry]) -> list[RegistryEntry]:
    """Return the workers of the registry whose blocks `member` can use, and which stay."""
    return [
        entry
        for entry in entries
        if entry.member.worker_id != member.worker_id
        and entry.member.layout == member.layout
        and entry.lease_left_s > 0
        and not entry.load.draining
    ]


async def warm_start(
    member: WorkerMember, exchange: BlockExchange, entries: Sequence[RegistryEntry], time_s: float
) -> Counter[PeerEpoch]:
    """Fill at most half of the pool within `time_s`, each peer's latest chains first. Return the blocks by peer."""
    begun_s, max_blocks = time.monotonic(), min(MAX_BLOCKS, int(POOL_SHARE * exchange.num_blocks))
    peers = [entry.member for entry in peers_of(member, entries) if entry.num_entries]
    chosen = random.sample(peers, min(MAX_PEERS, len(peers)) if max_blocks else 0)
    wanted = [ChainsWanted(peer.epoch, exchange.layout, max_blocks) for peer in chosen]
    asked = [
        exchange.ask(peer.url, peer.epoch, each, Handover, _ASK_SHARE * time_s)
        for peer, each in zip(chosen, wanted, strict=True)
    ]
    offers = [
        replace(answer, url=peer.url, epoch=peer.epoch)  # the registry's: an answer must not lead elsewhere
        for peer, answer in zip(chosen, await asyncio.gather(*asked), strict=True)
        if answer is not None
    ]
    plan, fetched = plan_chains(offers, max_blocks), Counter[PeerEpoch]()

    async def adopt(offer: Handover, chain: OfferedChain) -> None:
        fetched[offer.url, offer.epoch] += 0  # list the peer in any case: a chain that is given up may still come
        num_blocks = await exchange.adopt(offer.url, offer.epoch, chain)
        fetched[offer.url, offer.epoch] += num_blocks

    with suppress(TimeoutError):
        async with asyncio.timeout(begun_s + time_s - time.monotonic()):
            for start in range(0, len(plan), NUM_FETCHES):
                await asyncio.gather(*(adopt(*move) for move in plan[start : start + NUM_FETCHES]))
    logger.info("warm start: %d blocks of %d peers in %.1f s", fetched.total(), len(chosen), time.monotonic() - begun_s)
    return fetched


def has_purged(fetched: Counter[PeerEpoch], entries: Sequence[RegistryEntry]) -> bool:
    """Return whether a peer that gave blocks has begun another epoch: they may have been purged there."""
    epochs = dict(fetched.keys())
    alive = (entry.member for entry in entries if entry.lease_left_s > 0)  # a dead one may have had the same URL
    return any(epochs.get(member.url, member.epoch) != member.epoch for member in alive)


def plan_chains(offers: Sequence[Handover], max_blocks: int) -> list[tuple[Handover, OfferedChain]]:
    """Take the peers' chains in turn, the latest first, with at most `max_blocks` distinct blocks."""
    room, plan = _Room(max_blocks), []
    for position in range(max((len(offer.chains) for offer in offers), default=0)):
        for offer in offers:
            if position < len(offer.chains) and room.add(offer.chains[position]):
                plan.append((offer, offer.chains[position]))
    return plan


async def hand_over(
    member: WorkerMember, exchange: BlockExchange, entries: Sequence[RegistryEntry], held: HeldLookup
) -> int:
    """Offer the chains of `member` to those of the registry's workers that can hold them. Return the blocks taken."""
    peers = peers_of(member, entries)
    free_blocks = [int(ROOM_SHARE * peer.load.num_free_blocks) for peer in peers]
    chains = await exchange.latest_chains(exchange.num_blocks if any(free_blocks) else 0)
    num_unused = sum(max(0, peer.load.num_blocks - peer.num_entries) for peer in peers)
    # Where peers must evict blocks, only the more recently used half of the pool is worth it.
    room = _Room(max(num_unused, exchange.num_blocks // 2))
    are_held = await held(peers, [chain.block_hashes()[-1] for chain in chains])
    for chain, _ in sorted(zip(chains, are_held, strict=True), key=itemgetter(1)):
        room.add(chain)  # one that is too long leaves the room to others
    shares = [
        (peer.member, Handover(member.url, member.epoch, member.layout, offered))
        for peer, offered in zip(peers, share_out(room.chains, free_blocks), strict=True)
        if offered
    ]
    offers = (exchange.ask(peer.url, peer.epoch, offer, dict[str, int], HANDOVER_S) for peer, offer in shares)
    num_blocks = sum((answer or {}).get("adopted_blocks", 0) for answer in await asyncio.gather(*offers))
    logger.info("handed %d blocks to %d peers", num_blocks, len(shares))
    return num_blocks


def share_out(chains: Sequence[OfferedChain], max_blocks: Sequence[int]) -> list[tuple[OfferedChain, ...]]:
    """Give each chain to the peer with most room of those whose message takes it. `max_blocks`: of each peer."""
    rooms = [_Room(num_blocks) for num_blocks in max_blocks]
    for chain in chains:
        able = [room for room in rooms if room.num_hashes + chain.num_blocks <= MAX_SENT_HASHES]
        able = [room for room in able if len(room.chains) < MAX_CHAINS]
        if able and chain.num_blocks <= MAX_BLOCKS:
            max(able, key=attrgetter("num_left")).add(chain)
    return [tuple(room.chains) for room in rooms]
