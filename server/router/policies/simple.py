"""The rules without a cost: longest prefix, round robin, least load, consistent hash."""

from __future__ import annotations

from collections.abc import Sequence

from server.router.placement import RouteRequest
from server.router.policies.base import FleetView, Option, StatelessPolicy
from server.router.policies.rendezvous import weights


class LongestPrefix(StatelessPolicy):
    """The longest cached prefix, ties to the least load: what the product's owner asked for, literally.

    It collapses as soon as prompts share a system prompt: kept to be compared with.
    """

    def scores(self, request: RouteRequest, options: Sequence[Option], fleet: FleetView) -> Sequence[float]:
        longest = max(option.matched_tokens for option in options)
        return [option.num_outstanding if option.matched_tokens == longest else float("inf") for option in options]


class RoundRobin:
    """Each worker in turn, in the order of their ids."""

    def __init__(self) -> None:
        self._last = ""

    def scores(self, request: RouteRequest, options: Sequence[Option], fleet: FleetView) -> Sequence[float]:
        after = [option.member.worker_id for option in options if option.member.worker_id > self._last]
        chosen = min(after) if after else min(option.member.worker_id for option in options)
        return [0.0 if option.member.worker_id == chosen else 1.0 for option in options]

    def placed(self, request: RouteRequest, option: Option) -> None:
        self._last = option.member.worker_id


class LeastLoad(StatelessPolicy):
    """The fewest outstanding requests."""

    def scores(self, request: RouteRequest, options: Sequence[Option], fleet: FleetView) -> Sequence[float]:
        return [option.num_outstanding for option in options]


class ConsistentHash(StatelessPolicy):
    """Rendezvous hashing of the affinity key, else of the prompt's first blocks."""

    def __init__(self, num_blocks: int = 2) -> None:
        self._num_blocks = num_blocks

    def scores(self, request: RouteRequest, options: Sequence[Option], fleet: FleetView) -> Sequence[float]:
        key = request.affinity_key.encode() if request.affinity_key else b"".join(request.hashes[: self._num_blocks])
        return weights(key or request.request_id.encode(), options)
