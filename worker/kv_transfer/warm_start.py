"""The warm start of a worker that joins: it fetches recently used chains of its peers before it registers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Collection, Sequence
from http.client import HTTPException
from typing import Final, NamedTuple

from cache.records import WorkerMember
from cache.redis_index import RegistryEntry
from cache.types import BlockHash
from worker.contracts.exchange import MAX_BLOCKS, BlockExchange, ChainsWanted, Handover, OfferedChain
from worker.kv_transfer.peers import FetchError

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 8
"""Peers that are asked, chosen at random."""
NUM_FETCHES: Final = 2
"""Chains that come at a time: the engine's other fetch threads stay free for requests."""
POOL_SHARE: Final = 0.5
"""The share of the own pool that may be filled."""
_ASK_SHARE: Final = 0.2
"""The share of the time after which a peer that has not answered is left out."""


class Peer(NamedTuple):
    """A worker that gave blocks."""

    url: str
    epoch: str


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
) -> Counter[Peer]:
    """Fill at most half of the pool within `time_s`, each peer's latest chains first. Return the blocks by peer."""
    begun_s, room = time.monotonic(), min(MAX_BLOCKS, int(POOL_SHARE * exchange.num_blocks))
    end_s = begun_s + time_s
    peers = [entry.member for entry in peers_of(member, entries) if entry.num_entries]
    chosen = random.sample(peers, min(MAX_PEERS, len(peers)))
    ask_s = _ASK_SHARE * time_s
    answers = await asyncio.gather(*(asyncio.to_thread(_ask, exchange, peer, room, ask_s) for peer in chosen if room))
    plan = plan_chains([answer for answer in answers if answer is not None], room)
    fetched = Counter[Peer]()
    for start in range(0, len(plan), NUM_FETCHES):
        if time.monotonic() >= end_s:
            break
        tasks = {
            asyncio.create_task(exchange.adopt(offer.url, offer.epoch, chain)): Peer(offer.url, offer.epoch)
            for offer, chain in plan[start : start + NUM_FETCHES]
        }
        _, late = await asyncio.wait(tasks, timeout=end_s - time.monotonic())
        for task in late:
            task.cancel()
        for task, peer in tasks.items():
            fetched[peer] += 0 if task in late or task.cancelled() else task.result()
    took_s = time.monotonic() - begun_s
    logger.info("warm start: %d blocks of %d peers in %.1f s", fetched.total(), len(chosen), took_s)
    return fetched


def has_purged(peers: Collection[Peer], entries: Sequence[RegistryEntry]) -> bool:
    """Return whether one of the peers has begun another epoch: what came from it may have been purged there."""
    epochs = {peer.url: peer.epoch for peer in peers}
    return any(epochs.get(entry.member.url, entry.member.epoch) != entry.member.epoch for entry in entries)


def plan_chains(offers: Sequence[Handover], room: int) -> list[tuple[Handover, OfferedChain]]:
    """Take the peers' chains in turn, the latest first, with at most `room` different blocks."""
    taken: set[BlockHash] = set()
    plan = []
    for rank in range(max((len(offer.chains) for offer in offers), default=0)):
        for offer in offers:
            if rank >= len(offer.chains):
                continue
            new = set(offer.chains[rank].block_hashes()) - taken
            if new and len(taken) + len(new) <= room:
                taken |= new
                plan.append((offer, offer.chains[rank]))
    return plan


def _ask(exchange: BlockExchange, peer: WorkerMember, max_blocks: int, timeout_s: float) -> Handover | None:
    wanted = ChainsWanted(peer.epoch, exchange.layout, max_blocks)
    try:
        offer = exchange.ask_chains(peer.url, wanted, timeout_s)
    except (OSError, HTTPException, FetchError, ValueError) as error:
        logger.warning("%s offers no chains: %s", peer.url, error)
        return None
    # The registry has the address and the epoch; an answer must not lead elsewhere.
    return Handover(peer.url, peer.epoch, exchange.layout, offer.chains)
