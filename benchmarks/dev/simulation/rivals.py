"""The published routing rules of other gateways, re-implemented to be compared under the same traffic."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from cache.types import BlockHash, WorkerId
from server.router.cost import WorkerView
from server.router.policies import FleetView, Policy
from server.router.types import RouteRequest

_MAX_BLOCKS: Final = 1 << 20
_DYNAMO_WEIGHTS: Final[Mapping[str, float]] = {"host": 0.75, "disk": 0.25}


class Rival(Policy):
    """A rule that also follows when its requests end."""

    def on_close(self, request: RouteRequest, worker_id: WorkerId) -> None:
        """Record that the request has ended, or its worker."""


class Dynamo(Rival):
    """Dynamo's cost in blocks: the prefills of a worker and the request's own, and the blocks of live requests with it.

    A prefill is charged whole until its first token. A block that several live requests share counts once.

        prefill = blocks of prefills there + blocks of the prompt - credit
        credit  = overlap_credit * matched / (1 + credit_decay * excess) + weighted blocks of its tiers
        excess  = blocks of prefills there above those of the least loaded worker / blocks of the prompt
    """

    def __init__(
        self,
        overlap_credit: float = 1.0,
        credit_decay: float = 0.0,
        prefill_weight: float = 1.0,
        request_tokens: float = 0.0,
    ) -> None:
        """`request_tokens`: each request at a worker counts as this and its blocks."""
        self._overlap_credit = overlap_credit
        self._credit_decay = credit_decay
        self._prefill_weight = prefill_weight
        self._request_tokens = request_tokens
        self._live: dict[WorkerId, Counter[BlockHash]] = {}
        """Live requests by the full block."""
        self._num_rests: Counter[WorkerId] = Counter()
        """Blocks of live requests that are not full, which nothing shares."""

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        queued = [worker.estimate.queued_s * worker.prefill_tokens_per_s for worker in workers]
        num_tokens, least, scores = max(1, request.num_prompt_tokens), min(queued), []
        for worker, queued_tokens in zip(workers, queued, strict=True):
            block_size, worker_id = worker.member.block_size, worker.member.worker_id
            decay = 1.0 + self._credit_decay * (queued_tokens - least) / num_tokens
            credit = self._overlap_credit * worker.matched_tokens / decay
            if worker.plan is not None:
                below = zip(worker.member.tiers, worker.plan.tier_tokens, strict=False)
                credit += sum(_DYNAMO_WEIGHTS[tier] * loaded for tier, loaded in below)
            prefill_blocks = max(0.0, queued_tokens + num_tokens - credit) / block_size
            live = self._live.get(worker_id, Counter())
            num_new = len(request.hashes) - sum(map(live.__contains__, request.hashes))
            num_active = len(live) + self._num_rests[worker_id] + num_new + 1
            request_blocks = self._request_tokens * worker.num_outstanding / block_size
            scores.append(self._prefill_weight * prefill_blocks + num_active + request_blocks)
        return scores

    def on_dispatch(self, request: RouteRequest, worker: WorkerView) -> None:
        worker_id = worker.member.worker_id
        self._live.setdefault(worker_id, Counter()).update(request.hashes)
        self._num_rests[worker_id] += 1

    def on_close(self, request: RouteRequest, worker_id: WorkerId) -> None:
        live = self._live[worker_id]
        live.subtract(request.hashes)
        for block_hash in request.hashes:
            if not live[block_hash]:
                del live[block_hash]
        self._num_rests[worker_id] -= 1


FIXED_WEIGHTS: Final[Mapping[str, float]] = {"host": 0.8, "disk": 0.3, "peer": 0.3}
"""llm-d's weights of a cached block by its place; the pool's is 1. A peer has that of the farthest tier."""


@dataclass(frozen=True, slots=True)
class LlmD(Policy):
    """llm-d's weighted scorers, prefix 2, KV utilisation 1, queue 1: the published sample configuration.

    prefix = matched / total blocks;  kv = 1 - usage;  queue = (longest - own) / (longest - shortest).
    """

    prefix_weight: float = 2.0
    kv_weight: float = 1.0
    queue_weight: float = 1.0

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        longest = max(worker.num_waiting for worker in workers)
        shortest = min(worker.num_waiting for worker in workers)
        total = max(1, request.num_prompt_tokens)
        scores = []
        for worker in workers:
            load = worker.load
            usage = 1.0 - load.num_free_blocks / load.num_blocks if load.num_blocks else 0.0
            queue = (longest - worker.num_waiting) / (longest - shortest) if longest > shortest else 1.0
            prefix = self.prefix(worker) / total
            score = self.prefix_weight * prefix + self.kv_weight * (1.0 - usage) + self.queue_weight * queue
            scores.append(-score)
        return scores

    def prefix(self, worker: WorkerView) -> float:
        """Return the cached prompt tokens that count."""
        return worker.matched_tokens


class Sglang(Policy):
    """The cache_aware rule of the SGLang gateway: match threshold 0.5, imbalance 32 absolute and 1.1 relative.

    Out of balance, the least loaded worker wins. Else the worker whose approximate tree matches best wins, if the match
    is above the threshold. Else the least loaded wins. The trees record routed prompts, not cached ones. Above
    `tree_pools` times the worker's pool they drop their least recently used entries.
    """

    def __init__(
        self, threshold: float = 0.5, absolute: int = 32, relative: float = 1.1, tree_pools: float = 4.0
    ) -> None:
        self._threshold = threshold
        self._absolute = absolute
        self._relative = relative
        self._tree_pools = tree_pools
        self._trees: dict[WorkerId, OrderedDict[BlockHash, None]] = {}

    def scores(self, request: RouteRequest, workers: Sequence[WorkerView], fleet: FleetView) -> Sequence[float]:
        loads = [worker.num_outstanding for worker in workers]
        if max(loads) - min(loads) > self._absolute and max(loads) > self._relative * min(loads):
            return loads
        matches = [self._matched(worker.member.worker_id, request.hashes) for worker in workers]
        best = max(matches)
        if best * workers[0].member.block_size > self._threshold * request.num_prompt_tokens:
            return [-matched for matched in matches]
        return loads

    def on_dispatch(self, request: RouteRequest, worker: WorkerView) -> None:
        tree = self._trees.setdefault(worker.member.worker_id, OrderedDict())
        for block_hash in request.hashes:
            tree[block_hash] = None
            tree.move_to_end(block_hash)
        max_blocks = self._tree_pools * worker.load.num_blocks or _MAX_BLOCKS
        while len(tree) > max_blocks:
            tree.popitem(last=False)

    def _matched(self, worker_id: WorkerId, hashes: Sequence[BlockHash]) -> int:
        tree = self._trees.get(worker_id, OrderedDict())
        return next((at for at, block_hash in enumerate(hashes) if block_hash not in tree), len(hashes))


@dataclass(frozen=True, slots=True)
class LlmDTiers(LlmD):
    """llm-d's scorers with its weights by tier, in front of workers that load and fetch as ours do."""

    tier_weights: Mapping[str, float] = field(default_factory=lambda: FIXED_WEIGHTS)

    def prefix(self, worker: WorkerView) -> float:
        plan, weights = worker.plan, self.tier_weights
        if plan is None:
            return worker.matched_tokens
        loaded = zip(worker.member.tiers, plan.tier_tokens, strict=False)
        below = sum(weights[tier] * num_tokens for tier, num_tokens in loaded)
        return worker.matched_tokens + below + weights["peer"] * plan.peer_tokens


RIVALS: Final[Mapping[str, Callable[[], Policy]]] = {
    "sglang": Sglang,
    "llm-d": LlmD,
    "llm-d-tiers": LlmDTiers,
    "dynamo": Dynamo,
    "dynamo-agentic": partial(Dynamo, overlap_credit=2.0, prefill_weight=4.0, request_tokens=1024.0),
    "dynamo-decay": partial(Dynamo, credit_decay=1.0),
}
"""Options of Dynamo that are off by default: its preset for agents (64 blocks of 16 tokens a request), and a decay."""
