"""The warm start of a worker that joins: it fetches recently used chains of its peers before it registers."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Sequence
from http.client import HTTPException
from typing import Final

from cache.records import WorkerMember
from cache.redis_index import RegistryEntry
from cache.types import BlockHash
from worker.contracts.exchange import BlockExchange, ChainsWanted, Handover, OfferedChain
from worker.kv_transfer.peers import FetchError

logger = logging.getLogger(__name__)

MAX_PEERS: Final = 8
"""Peers that are asked, chosen at random."""
_NUM_FETCHES: Final = 2
"""Chains that come at a time: the engine's other fetch threads stay free for requests."""
_POOL_SHARE: Final = 0.5
"""The share of the own pool that may be filled."""


def peers_of(member: WorkerMember, entries: Sequence[RegistryEntry]) -> list[RegistryEntry]:
    """Return the workers of the registry whose blocks `member` can exchange, and which stay."""
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
) -> int:
    """Fill at most half of the pool within `time_s`, each peer's latest chains first.

    Return the blocks that came. A peer that fails or stalls costs at most the time.
    """
    begun_s, room = time.monotonic(), int(_POOL_SHARE * exchange.num_blocks)
    end_s = begun_s + time_s
    peers = [entry.member for entry in peers_of(member, entries) if entry.load.num_free_blocks < entry.load.num_blocks]
    chosen = random.sample(peers, min(MAX_PEERS, len(peers)))
    answers = await asyncio.gather(*(asyncio.to_thread(_ask, exchange, peer, room, time_s) for peer in chosen if room))
    plan = _plan([answer for answer in answers if answer is not None], room)
    num_blocks = 0
    for start in range(0, len(plan), _NUM_FETCHES):
        if time.monotonic() >= end_s:
            break
        futures = [
            asyncio.wrap_future(exchange.adopt(peer.url, peer.epoch, BlockHash(chain.root), chain.block_hashes()))
            for peer, chain in plan[start : start + _NUM_FETCHES]
        ]
        done, _ = await asyncio.wait(futures, timeout=end_s - time.monotonic())
        num_blocks += sum(future.result() for future in done)
    took_s = time.monotonic() - begun_s
    logger.info("warm start: %d blocks of %d peers in %.1f s", num_blocks, len(chosen), took_s)
    return num_blocks


def _plan(offers: Sequence[Handover], room: int) -> list[tuple[Handover, OfferedChain]]:
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
    wanted = ChainsWanted(peer.epoch, peer.layout, max_blocks)
    try:
        offer = exchange.ask_chains(peer.url, wanted, timeout_s)
    except (OSError, HTTPException, FetchError, ValueError) as error:
        logger.warning("%s offers no chains: %s", peer.url, error)
        return None
    # The registry has the address and the epoch; an answer must not lead elsewhere.
    return Handover(peer.url, peer.epoch, peer.layout, offer.chains)
