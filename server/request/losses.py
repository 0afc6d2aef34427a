"""What one request has lived through, and whether it may be tried again.

A worker's death says little about its requests, but for those that it had accepted and not given a token since: these
are suspects. The next worker is told, and computes the prefills of suspects one at a time, each not before it has said
that it begins. So a second death has one culprit at most. A token clears a request of all suspicion.
"""

from __future__ import annotations

from enum import Enum, auto

from cache.records import WorkerMember
from cache.types import WorkerIncarnation
from server.errors import ApiError, InternalError, WorkerLostError
from server.workers.client import WorkerRefused

MAX_SUSPICIONS = 2
"""A request that was begun on so many workers that died of it, as it seems, is not tried again."""
MAX_LOSSES = 5
MAX_REFUSALS = 8
MAX_SECOND_CHANCES = 2
MAX_LOOKS = 4


class Stage(Enum):
    """How far an attempt has come."""

    SENT = auto()
    ACCEPTED = auto()
    BEGUN = auto()
    """The worker has said that the prefill begins."""
    ANSWERED = auto()
    """A token has come."""


class Losses:
    """The failed attempts of one generation."""

    __slots__ = (
        "excluded",
        "last_refusal",
        "num_looks",
        "num_losses",
        "num_refusals",
        "num_second_chances",
        "num_suspicions",
    )

    def __init__(self) -> None:
        self.excluded: set[WorkerIncarnation] = set()
        """Boots of workers that shall not have the request again."""
        self.num_losses = 0
        self.num_suspicions = 0
        self.num_refusals = 0
        self.num_second_chances = 0
        self.num_looks = 0
        self.last_refusal: WorkerRefused | None = None
        """Of all refusals the one that can be tried again first."""

    @property
    def is_suspect(self) -> bool:
        return self.num_suspicions > 0

    def cleared(self) -> None:
        """It has got a token."""
        self.num_suspicions = 0

    def exclude(self, worker: WorkerMember) -> None:
        self.excluded.add((worker.worker_id, worker.epoch))

    def lost(self, worker: WorkerMember, stage: Stage) -> ApiError | None:
        """A worker was lost with the request; why it is not tried again, or None."""
        self.exclude(worker)
        self.num_losses += 1
        if stage is Stage.BEGUN or (stage is Stage.ACCEPTED and not self.num_suspicions):
            self.num_suspicions += 1
        if self.num_suspicions >= MAX_SUSPICIONS:
            return InternalError("The request failed on several workers and is not tried again.")
        if self.num_losses >= MAX_LOSSES:
            return WorkerLostError("The request has lost too many workers.", retry_after_s=1.0)
        return None

    def refused(self, worker: WorkerMember, error: WorkerRefused) -> bool:
        """A worker would not have it. False: enough."""
        self.num_refusals += 1
        last = self.last_refusal
        if last is None or again_s(error) < again_s(last):
            self.last_refusal = error
        if error.status != 409 or self.num_refusals > 1:
            self.exclude(worker)
        return self.num_refusals <= MAX_REFUSALS

    def stale(self) -> bool:
        """A kept connection had ended before an answer. False: it is not the first trouble and counts as a loss."""
        if self.num_refusals:
            return False
        self.num_refusals += 1
        return True

    def second_chance(self) -> bool:
        """Nobody else is left: whether those who lost it before may have it again, should they live."""
        if not self.num_losses or self.num_suspicions or self.num_second_chances >= MAX_SECOND_CHANCES:
            return False
        self.num_second_chances += 1
        self.excluded.clear()
        return True

    def look_again(self) -> bool:
        """No worker can take it, and none was lost: whether one may soon start in the place of one that stops."""
        self.num_looks += 1
        return not self.num_losses and self.num_looks <= MAX_LOOKS


def again_s(refused: WorkerRefused) -> float:
    """When to come again."""
    said_s = refused.failed.retry_after_s
    return 1.0 if said_s is None else said_s
