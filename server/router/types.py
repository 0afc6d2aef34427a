"""The router's request, and its refusals."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from typing import Final, NewType

import msgspec

from cache.types import BlockHash, WorkerIncarnation
from server.errors import TTFT_BUDGET, OverloadedError, UnavailableError
from worker.common.capabilities import TOKENS

RETRY_AFTER_S: Final = 1.0  # short: a worker may start or return at any time
MAX_KEY_CHARS: Final = 128  # twice a digest: UUIDs and user names are kept as they are
Key = NewType("Key", str)
"""A key of a dict that outlives its request, from a client's or model's text. Only `short_key` makes one."""


def short_key(text: str) -> Key:
    """Return a text of at most `MAX_KEY_CHARS` characters: the text itself, or a digest of a long one."""
    if len(text) <= MAX_KEY_CHARS:
        return Key(text)
    return Key(blake2b(text.encode("utf-8", "replace"), digest_size=32).hexdigest())


class NoWorkerError(UnavailableError):
    """No worker can take this request now."""

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = RETRY_AFTER_S,
        longest_context: int | None = None,
        is_silent: bool = False,
    ) -> None:
        """`longest_context`: the workers' longest context, if the request fits into none: retrying does not help.

        `is_silent`: a worker that could take the request does not answer now.
        """
        super().__init__(message, retry_after_s=retry_after_s)
        self.is_silent = is_silent
        self.longest_context = longest_context


class QueueFullError(OverloadedError, code="queue_full"):
    """Too many prompt tokens wait already."""


class TtftBudgetError(OverloadedError, code="ttft_budget_exceeded"):
    """No worker is predicted to give the first token within `budget_s`."""

    def __init__(self, predicted_s: float, budget_s: float) -> None:
        """`predicted_s`: the earliest prediction."""
        super().__init__(
            f"The first token is predicted after {predicted_s:.3g} s, and the budget is {budget_s:g} s. "
            f"Ask again later, or with a longer {TTFT_BUDGET}.",
            retry_after_s=max(1.0, predicted_s - budget_s),
            headers=((b"x-headstart-predicted-ttft", b"%.3f" % predicted_s),),
        )


class RouteRequest(msgspec.Struct, frozen=True, gc=False):
    """The parts of a request that decide where it goes."""

    request_id: str
    model: str
    num_prompt_tokens: int
    hashes: Sequence[BlockHash]
    """The prompt's full blocks. The last token is always computed, so a match never covers the whole prompt."""
    namespace: str | None = None
    """Only workers with this namespace: the prompt was rendered and tokenised for them. None: any."""
    numerics: str | None = None
    """Only workers of this numerics class: the request resumes a stream."""
    excluded: frozenset[WorkerIncarnation] = frozenset()
    """Workers that have failed this request. A restarted worker has another epoch, and may get it."""
    full: frozenset[WorkerIncarnation] = frozenset()
    """Those of them that may have room again: their queue was full."""
    affinity_key: Key | None = None
    """The conversation, with its tenant."""
    hard_affinity: bool = False
    """Only the affinity key's own worker, among those that may take the request."""
    needs: frozenset[str] = frozenset({TOKENS})
    """Only workers with all of these `WorkerMember.capabilities`."""
    num_context_tokens: int = 0
    """Tokens that the worker's context must hold: the prompt, and the requested length of the answer."""
    ttft_budget_s: float | None = None
    """Only workers whose predicted time to first token is not longer."""
    is_retry: bool = False
    """A worker has refused it, or was lost: it goes before new requests."""
    priority: int = 0
    """Lower is earlier."""
    tenant: str = ""
    weight: float = 1.0
    """The tenant's, for its turns in the hold queue."""
    root: BlockHash = BlockHash(b"")
    """The parent of the first block; empty: its blocks are not copied to other workers."""
    client_id: Key = Key("")
    """The client's own id of the request; empty: none."""
    is_whole: bool = False
    """The answer comes as a whole, and its first token is not seen."""
