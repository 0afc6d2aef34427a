"""How somebody looks on while requests are routed, at no cost while nobody does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from server.router.placement import RouteRequest
from server.router.policies import Option
from server.router.scoring import Choice


@dataclass(frozen=True, slots=True)
class Decision:
    """One request that was just placed, and what every candidate would have cost."""

    request: RouteRequest
    chosen: Option
    choices: Sequence[Choice]
    index_answered: bool


class DecisionWatcher(Protocol):
    """Called by the router, in the event loop; must be quick."""

    def wants(self, now_s: float) -> bool:
        """Called once a decision: whether this one shall be told in full."""

    def decided(self, decision: Decision) -> None: ...

    def started(self, request_id: str, num_cached_tokens: int) -> None:
        """A worker has taken a request, told or not, and found so many tokens cached."""
