"""How a worker gets the blocks that its pool lacks: from its tiers, from a peer, or by computing them."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Sequence

import msgspec

from cache.records import Candidate
from cache.types import WorkerId
from server.router.types import RouteRequest


class FetchPlan(msgspec.Struct, frozen=True, gc=False):
    """How a worker gets the blocks that its pool lacks, in the least time of fetching and computing together.

        |<- in the pool ->|<- tier 1 ->|<- tier 2 ->|<- from a peer ->|<- computed ->|
                        start         t1           t2              peer end       prompt

    Blocks are fetched in this order and the rest is computed: a plan is the point at which each place stops. All costs
    are linear, so each place gives nothing or all that it can.
    """

    end_tokens: int
    """Prompt tokens that need not be computed."""
    tier_tokens: tuple[int, ...] = ()
    """From each tier, up to the last one used."""
    peer_tokens: int = 0
    fetch_s: float = 0.0


def cheapest_plan(
    num_prompt_tokens: int,
    start_tokens: int,
    prefill_tokens_per_s: float,
    tiers: Iterable[tuple[int, float]] = (),
    peer_end_tokens: int = 0,
    fetch_tokens_per_s: float = 0.0,
) -> FetchPlan | None:
    """Plan from `start_tokens`, the end of the prefix in the pool. Return None to compute everything after it.

    `tiers`: the end of the prefix in each tier, and its tokens/s. A tier of unknown rate, 0.0, gives nothing, and
    tiers after it cannot be reached across its blocks. A peer matters where it holds more than pool and tiers.
    """
    ends, fetches_s = [start_tokens], [0.0]
    end_tokens, fetch_s = start_tokens, 0.0
    for tier_end_tokens, tokens_per_s in tiers:
        if tier_end_tokens > end_tokens:
            if not tokens_per_s:
                break
            fetch_s += (tier_end_tokens - end_tokens) / tokens_per_s
            end_tokens = tier_end_tokens
        ends.append(end_tokens)
        fetches_s.append(fetch_s)
    has_peer = fetch_tokens_per_s > 0.0 and peer_end_tokens > end_tokens
    if end_tokens == start_tokens and not has_peer:
        return None
    computed_s = (num_prompt_tokens - peer_end_tokens) / prefill_tokens_per_s
    best_s, best_stop, uses_peer = math.inf, 0, False
    for stop, end_tokens in enumerate(ends):
        fetch_s = fetches_s[stop]
        total_s = fetch_s + (num_prompt_tokens - end_tokens) / prefill_tokens_per_s
        if total_s < best_s:
            best_s, best_stop, uses_peer = total_s, stop, False
        if has_peer:
            total_s = fetch_s + (peer_end_tokens - end_tokens) / fetch_tokens_per_s + computed_s
            if total_s < best_s:
                best_s, best_stop, uses_peer = total_s, stop, True
    if not (best_stop or uses_peer):
        return None
    end_tokens, fetch_s = ends[best_stop], fetches_s[best_stop]
    tier_tokens = tuple([ends[stop + 1] - ends[stop] for stop in range(best_stop)])
    if not uses_peer:
        return FetchPlan(end_tokens, tier_tokens, 0, fetch_s)
    peer_tokens = peer_end_tokens - end_tokens
    return FetchPlan(peer_end_tokens, tier_tokens, peer_tokens, fetch_s + peer_tokens / fetch_tokens_per_s)


class Peers(msgspec.Struct, frozen=True):
    """The workers of one layout that hold most of the prompt."""

    num_blocks: int
    holders: Sequence[Candidate]


PeersByLayout = dict[tuple[str, str], Peers]
"""By model and `WorkerMember.layout`."""


def find_peers(candidates: Sequence[Candidate], broken: Container[WorkerId], request: RouteRequest) -> PeersByLayout:
    """Return the workers that hold most of the prompt, by model and layout.

    A draining worker still gives blocks. Workers that are broken or have failed this request may be gone.
    """
    peers: PeersByLayout = {}
    for candidate in candidates:
        member = candidate.member
        incarnation = member.worker_id, member.epoch
        num_blocks = _num_held_blocks(candidate)
        is_gone = member.worker_id in broken or incarnation in request.excluded
        if is_gone or not num_blocks or not member.layout:
            continue
        known = peers.get(key := (member.model, member.layout))
        if known is None or num_blocks > known.num_blocks:
            peers[key] = Peers(num_blocks, [candidate])
        elif num_blocks == known.num_blocks:
            peers[key] = Peers(num_blocks, [*known.holders, candidate])
    return peers


def _num_held_blocks(candidate: Candidate) -> int:
    """Return how many blocks of the prompt the worker can give to a peer, from its pool and its tiers."""
    num_blocks = candidate.matched_blocks
    for tier_blocks, tokens_per_s in zip(candidate.tier_blocks, candidate.load.tier_tokens_per_s, strict=False):
        if tier_blocks > num_blocks:
            if not tokens_per_s:
                break
            num_blocks = tier_blocks
    return num_blocks


def plan_fetch(
    candidate: Candidate, matched_tokens: int, tokens_per_s: float, all_peers: PeersByLayout, num_tokens: int
) -> tuple[FetchPlan | None, Peers | None]:
    """Return the worker's cheapest plan, and the peers that it fetches from; None where there is neither."""
    member, load, most_tokens = candidate.member, candidate.load, max(0, num_tokens - 1)
    block_size, fetch_rate = member.block_size, load.fetch_tokens_per_s
    tiers: Iterable[tuple[int, float]] = ()
    if candidate.tier_blocks:
        ends = [min(num_blocks * block_size, most_tokens) for num_blocks in candidate.tier_blocks]
        tiers = zip(ends, load.tier_tokens_per_s, strict=False)
    peers, peer_end_tokens = None, 0
    if all_peers and fetch_rate:
        peers = all_peers.get((member.model, member.layout))
        peer_end_tokens = 0 if peers is None else min(peers.num_blocks * block_size, most_tokens)
    plan = cheapest_plan(num_tokens, matched_tokens, tokens_per_s, tiers, peer_end_tokens, fetch_rate)
    return plan, peers if plan is not None and plan.peer_tokens else None
