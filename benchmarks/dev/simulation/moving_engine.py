"""The simulated worker that shares its time, with a tier below the pool and blocks fetched from peers.

    link       one per worker, for what it sends and what it fetches: a transfer holds the source's and the target's,
               and waits until both are free
    tier       an LRU that gets every block of a prompt with its first token, before the pool evicts any;
               loads hold a link of their own, one at a time
    request    allocated, then loading while others run, then a prefill of the rest

Loads and fetches are planned as in workers: only by seconds, at the rates that they report.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.dev.simulation.engine import Job
from benchmarks.dev.simulation.shared_engine import SharedWorker
from benchmarks.dev.simulation.traces import ROOT, TraceRequest
from cache.allocators.hash import HashAllocation, HashAllocator
from cache.types import BlockHash
from server.router.fetch_plan import FetchPlan, cheapest_plan
from worker.contracts.exchange import Handover, OfferedChain
from worker.http.blocks import BACKGROUND_PAUSE
from worker.kv_transfer.mover import NUM_FETCHES, POOL_SHARE, plan_chains


@dataclass(slots=True, eq=False)
class Link:
    """A path for one transfer at a time."""

    free_s: float = 0.0


@dataclass(slots=True, eq=False)
class MovingWorker(SharedWorker):
    tier: HashAllocator | None = None
    peers: Mapping[str, MovingWorker] = field(default_factory=dict)
    """All workers, by URL."""
    link: Link = field(default_factory=Link)
    tier_link: Link = field(default_factory=Link)
    arriving: dict[BlockHash, float] = field(default_factory=dict)
    """When each block that is being fetched for a request arrives."""
    awaiting: set[Job] = field(default_factory=set)
    """Requests whose blocks are fetched for another one."""

    def num_reusable_tokens(self, job: Job) -> int:
        in_pool = SharedWorker.num_reusable_tokens(self, job)
        first = in_pool // self.model.block_size
        coming = sum(block in self.arriving or block in self.computing for block in job.request.hashes[first:])
        if coming:
            return in_pool + coming * self.model.block_size
        plan = self._plan(job, in_pool)
        return in_pool if plan is None else plan.end_tokens

    def fetch(self, job: Job, now_s: float) -> None:
        first = job.num_cached_tokens // self.model.block_size
        if (arrives_s := self.arriving.get(job.request.chain[first])) is not None:
            job.loaded_s = arrives_s
            self.awaiting.add(job)
            return
        if (plan := self._plan(job, job.num_cached_tokens)) is not None:
            if sum(plan.tier_tokens):
                seconds = sum(plan.tier_tokens) / self.model.tier_tokens_per_s[0]
                job.loaded_s = transfer(now_s, seconds, self.tier_link)
            if plan.peer_tokens:
                source = job.placement.source
                assert source is not None, "a plan without its source"
                seconds = plan.peer_tokens / self.model.fetch_tokens_per_s
                job.loaded_s = transfer(job.loaded_s, seconds, self.link, self.peers[source.url].link)
                stop = plan.end_tokens // self.model.block_size
                self.arriving |= dict.fromkeys(job.request.chain[first:stop], job.loaded_s)
            job.num_cached_tokens = plan.end_tokens
        SharedWorker.fetch(self, job, now_s)

    def start(self, job: Job, now_s: float) -> None:
        """Begin the prefill: the blocks that have come are findable."""
        assert job.allocation is not None
        if job in self.awaiting:
            self.awaiting.remove(job)
            job.allocation.free()
            assert self.allocate(job), "the blocks that it has released are free"
        for block in job.request.chain[: job.num_cached_tokens // self.model.block_size]:
            self.arriving.pop(block, None)
        job.allocation.commit(job.request.block_ids, job.num_cached_tokens // self.model.block_size)
        self.computing.update(job.request.hashes[job.num_cached_tokens // self.model.block_size :])
        SharedWorker.start(self, job, now_s)

    def finish_prefill(self, now_s: float) -> Job:
        job = SharedWorker.finish_prefill(self, now_s)
        if self.tier is not None:
            request = job.request
            written = self.tier.allocate(len(request.hashes), request.block_ids, ROOT, hashes=request.chain)
            assert written is not None, "a prompt larger than the tier"
            written.commit(request.block_ids, len(request.hashes))
            written.free()
        return job

    def num_held_blocks(self, request: TraceRequest) -> int:
        """Return the longest prefix in the pool or the tier, both of which are prefix-closed."""
        stores = (self.cache, self.tier)
        return max(s.find(request.block_ids, ROOT, hashes=request.chain) for s in stores if s is not None)

    def copy(
        self, hashes: Sequence[BlockHash], source: MovingWorker, now_s: float
    ) -> tuple[float, HashAllocation] | None:
        """Begin to fetch a chain for no request, with a part of the link. Return when and where it arrives."""
        num_held = len(self.cache.find_blocks(hashes))
        if num_held == len(hashes) or (allocation := self.cache.reserve(ROOT, hashes)) is None:
            return None
        pace = 1.0 + BACKGROUND_PAUSE if source.num_decoding or source.num_active else 1.0
        num_tokens = (len(hashes) - num_held) * self.model.block_size
        return now_s + pace * num_tokens / self.model.fetch_tokens_per_s, allocation

    def warm_start(self, peers: Sequence[MovingWorker], time_s: float, now_s: float) -> float:
        """Fetch what peers used last, as workers do before they register. Return the seconds that it takes."""
        room = int(POOL_SHARE * self.cache.num_blocks)
        offers = [
            Handover(peer.member.url, "", "", tuple(OfferedChain.of(chain) for chain in peer.cache.recent_chains(room)))
            for peer in peers
        ]
        took_s = 0.0
        for offer, chain in plan_chains(offers, room):
            copy = self.copy(chain.block_hashes(), self.peers[offer.url], now_s)
            if copy is not None:
                took_s += (copy[0] - now_s) / NUM_FETCHES
                if took_s <= time_s:
                    copy[1].fill(len(chain.block_hashes()))
                copy[1].free()
            if took_s > time_s:
                break
        return min(took_s, time_s)

    def _plan(self, job: Job, num_pool_tokens: int) -> FetchPlan | None:
        """Plan with what is there now: a source may have evicted what it was named for."""
        request, model, source = job.request, self.model, job.placement.source
        most_tokens = request.num_prompt_tokens - 1
        tiers, peer_end_tokens = [], 0
        if self.tier is not None:
            end = self.tier.find(request.block_ids, ROOT, hashes=request.chain) * model.block_size
            tiers = [(min(end, most_tokens), model.tier_tokens_per_s[0])]
        if source is not None and not self.peers[source.url].is_dead:
            num_blocks = min(source.num_blocks, self.peers[source.url].num_held_blocks(request))
            peer_end_tokens = min(num_blocks * model.block_size, most_tokens)
        rate, fetch_rate = model.prefill_tokens_per_s, model.fetch_tokens_per_s
        return cheapest_plan(request.num_prompt_tokens, num_pool_tokens, rate, tiers, peer_end_tokens, fetch_rate)


def transfer(now_s: float, duration_s: float, *links: Link) -> float:
    """Hold the links as soon as all are free; return when the transfer ends."""
    end_s = max(now_s, *(link.free_s for link in links)) + duration_s
    for link in links:
        link.free_s = end_s
    return end_s
