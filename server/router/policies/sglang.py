"""The cache_aware rule of the SGLang gateway: match threshold 0.5, imbalance 32 absolute and 1.1 relative.

If the fleet is out of balance the least loaded worker wins whatever it holds. Otherwise the worker whose approximate
tree matches best, if the match is above the threshold, else the worker with the smallest tree. The trees record what
was routed, not what is cached; above some multiple of the worker's pool their least recently used entries go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Final

from cache.types import BlockHash
from server.router.placement import RouteRequest
from server.router.policies.base import FleetView, Option

_MAX_BLOCKS: Final = 1 << 20


class Sglang:
    def __init__(
        self, threshold: float = 0.5, absolute: int = 32, relative: float = 1.1, tree_pools: float = 4.0
    ) -> None:
        self._threshold = threshold
        self._absolute = absolute
        self._relative = relative
        self._tree_pools = tree_pools
        self._trees: dict[str, OrderedDict[BlockHash, None]] = {}

    def scores(self, request: RouteRequest, options: Sequence[Option], fleet: FleetView) -> Sequence[float]:
        loads = [option.num_outstanding for option in options]
        if max(loads) - min(loads) > self._absolute and max(loads) > self._relative * min(loads):
            return loads
        matches = [self._matched(option.member.worker_id, request.hashes) for option in options]
        best = max(matches)
        if best * options[0].member.block_size > self._threshold * request.num_prompt_tokens:
            return [-matched for matched in matches]
        return [len(self._trees.get(option.member.worker_id, ())) for option in options]

    def placed(self, request: RouteRequest, option: Option) -> None:
        tree = self._trees.setdefault(option.member.worker_id, OrderedDict())
        for block_hash in request.hashes:
            tree[block_hash] = None
            tree.move_to_end(block_hash)
        max_blocks = self._tree_pools * option.num_blocks or _MAX_BLOCKS
        while len(tree) > max_blocks:
            tree.popitem(last=False)

    def _matched(self, worker_id: str, hashes: Sequence[BlockHash]) -> int:
        tree = self._trees.get(worker_id)
        if tree is None:
            return 0
        for position, block_hash in enumerate(hashes):
            if block_hash not in tree:
                return position
        return len(hashes)
