"""What the HTTP side and the router say to each other.

router.place(RouteRequest) -> Placement        decision made, booked on the worker
placement.prefill_started(cached)              the worker took it from its queue
placement.first_token()                        prefill is over: the speculative entry may be confirmed
placement.close(ok)                            exactly once, whatever ended the request
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from cache.records import WorkerMember
from cache.types import BlockHash, Epoch, WorkerId

Boot = tuple[WorkerId, Epoch]
"""One life of a worker."""


class NoWorkerError(Exception):
    """No worker can take this request now. Try again after `retry_after_s`; `contended`: 429 rather than 503."""

    def __init__(self, message: str, *, contended: bool, retry_after_s: float) -> None:
        super().__init__(message)
        self.contended = contended
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class RouteRequest:
    request_id: str
    model: str
    num_prompt_tokens: int
    hashes: Sequence[BlockHash]
    """The prompt's full blocks; the last token is always computed, so a match never covers the whole prompt."""
    numerics: str | None = None
    """Only workers of this numerics class (a resumed stream)."""
    excluded: frozenset[Boot] = frozenset()
    """Boots of workers that have already failed this request; a worker that has been restarted may have it."""
    affinity_key: str | None = None


class Placement(Protocol):
    """One request on one worker's books. Every method may be called in any state and at most one close counts."""

    @property
    def worker(self) -> WorkerMember: ...

    @property
    def promised_tokens(self) -> int:
        """Prompt tokens that the index and the overlay said are cached there."""

    def prefill_started(self, num_cached_tokens: int) -> None: ...

    def first_token(self) -> None: ...

    def close(self, *, ok: bool) -> None: ...


class Router(Protocol):
    async def place(self, request: RouteRequest) -> Placement:
        """Choose and book. Raises NoWorkerError. Never fails because of Redis."""

    def workers(self, model: str | None = None) -> list[WorkerMember]:
        """The workers known now, live ones first."""
