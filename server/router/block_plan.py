"""How a worker gets the blocks of a prompt that its pool lacks: from its tiers, from a peer, or by computing them.

    |<- in the pool ->|<- loaded: tier 1 ->|<- tier 2 ->|<- fetched from a peer ->|<- computed ->|
                    start                t1           t2                        peer end       prompt

A prefix is loaded in this order and the rest is computed, so a plan is the point at which each place stops. All costs
are linear, so each place gives nothing or all that it can.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import msgspec

from cache.records import Candidate
from cache.types import WorkerId, WorkerIncarnation


class BlockPlan(msgspec.Struct, frozen=True, gc=False):
    """The plan with the least seconds of loading, fetching and computing together."""

    end_tokens: int
    """Prompt tokens that need not be computed."""
    loaded_tokens: tuple[int, ...] = ()
    """From each tier; tiers behind the last one used are left out."""
    fetched_tokens: int = 0
    load_s: float = 0.0
    """Seconds of loading and fetching."""


class Peers(msgspec.Struct, frozen=True):
    """The workers of one layout that hold most of the prompt."""

    num_blocks: int
    holders: Sequence[Candidate]


PeersByLayout = dict[tuple[str, str], Peers]
"""By model and `WorkerMember.layout`."""


def cheapest_plan(
    num_prompt_tokens: int,
    start_tokens: int,
    prefill_tokens_per_s: float,
    tiers: Iterable[tuple[int, float]] = (),
    peer_end_tokens: int = 0,
    fetch_tokens_per_s: float = 0.0,
) -> BlockPlan | None:
    """Plan from `start_tokens`, the prefix in the pool; None: compute all that lies behind it.

    `tiers`: where the prefix in each ends, and its tokens/s. A tier of an unknown rate, 0.0, gives nothing, and none
    behind it is reached across its blocks. A peer matters only where it holds more than pool and tiers.
    """
    ends, loads_s = [start_tokens], [0.0]
    end_tokens, load_s = start_tokens, 0.0
    for tier_end_tokens, tokens_per_s in tiers:
        if tier_end_tokens > end_tokens:
            if not tokens_per_s:
                break
            load_s += (tier_end_tokens - end_tokens) / tokens_per_s
            end_tokens = tier_end_tokens
        ends.append(end_tokens)
        loads_s.append(load_s)
    fetches = fetch_tokens_per_s > 0.0 and peer_end_tokens > end_tokens
    if end_tokens == start_tokens and not fetches:
        return None
    computed_s = (num_prompt_tokens - peer_end_tokens) / prefill_tokens_per_s
    best_s, best_stop, best_fetches = math.inf, 0, False
    for stop, end_tokens in enumerate(ends):
        load_s = loads_s[stop]
        total_s = load_s + (num_prompt_tokens - end_tokens) / prefill_tokens_per_s
        if total_s < best_s:
            best_s, best_stop, best_fetches = total_s, stop, False
        if fetches:
            total_s = load_s + (peer_end_tokens - end_tokens) / fetch_tokens_per_s + computed_s
            if total_s < best_s:
                best_s, best_stop, best_fetches = total_s, stop, True
    if not (best_stop or best_fetches):
        return None
    end_tokens, load_s = ends[best_stop], loads_s[best_stop]
    loaded_tokens = tuple([ends[stop + 1] - ends[stop] for stop in range(best_stop)])
    if not best_fetches:
        return BlockPlan(end_tokens, loaded_tokens, 0, load_s)
    num_fetched = peer_end_tokens - end_tokens
    return BlockPlan(peer_end_tokens, loaded_tokens, num_fetched, load_s + num_fetched / fetch_tokens_per_s)


def held_blocks(candidate: Candidate) -> int:
    """Return how much of the prompt the worker can give to a peer: its pool's match, and what it can load."""
    num_blocks = candidate.matched_blocks
    for tier_blocks, tokens_per_s in zip(candidate.tier_blocks, candidate.load.tier_tokens_per_s, strict=False):
        if tier_blocks > num_blocks:
            if not tokens_per_s:
                break
            num_blocks = tier_blocks
    return num_blocks


def find_peers(
    candidates: Sequence[Candidate], broken: Container[WorkerId], failed: Container[WorkerIncarnation]
) -> PeersByLayout:
    """Return who holds most of the prompt, by model and layout.

    A draining worker still gives. One that is broken, or has failed this request, may be gone.
    """
    peers: PeersByLayout = {}
    for candidate in candidates:
        member = candidate.member
        num_blocks = held_blocks(candidate)
        if not num_blocks or not member.layout or member.worker_id in broken:
            continue
        if (member.worker_id, member.epoch) in failed:
            continue
        key = (member.model, member.layout)
        known = peers.get(key)
        if known is None or num_blocks > known.num_blocks:
            peers[key] = Peers(num_blocks, [candidate])
        elif num_blocks == known.num_blocks:
            peers[key] = Peers(num_blocks, [*known.holders, candidate])
    return peers
