"""The router's request, its view of a worker, and its refusal."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from cache.records import WorkerLoad, WorkerMember
from cache.types import BlockHash, WorkerIncarnation
from server.router.block_plan import BlockPlan, Peers
from server.router.load_tracker import WorkerLoadEstimate


class NoWorkerError(Exception):
    """No worker can take this request now. Try again after `retry_after_s`; `contended`: 429 rather than 503."""

    def __init__(
        self,
        message: str,
        *,
        contended: bool,
        retry_after_s: float,
        unsupported: Sequence[str] = (),
        longest_context: int | None = None,
    ) -> None:
        """`unsupported`: features of the request that none of the workers has, so that no other time helps.

        `longest_context`: the workers' longest, if the request fits in none, for which no other time helps either.
        """
        super().__init__(message)
        self.unsupported = unsupported
        self.longest_context = longest_context
        self.contended = contended
        self.retry_after_s = retry_after_s


class TtftBudgetError(NoWorkerError):
    """Every worker that may take the request is predicted to give its first token after `budget_s`."""

    def __init__(self, predicted_s: float, budget_s: float) -> None:
        """`predicted_s`: the earliest prediction."""
        message = f"The first token is predicted after {predicted_s:.3g} s, and the budget is {budget_s:g} s."
        super().__init__(message, contended=True, retry_after_s=max(1.0, predicted_s - budget_s))
        self.predicted_s = predicted_s


class RouteRequest(msgspec.Struct, frozen=True, gc=False):
    """The parts of a request that decide where it goes."""

    request_id: str
    model: str
    num_prompt_tokens: int
    hashes: Sequence[BlockHash]
    """The prompt's full blocks. The last token is always computed, so a match never covers the whole prompt."""
    numerics: str | None = None
    """Only workers of this numerics class: the request resumes a stream."""
    excluded: frozenset[WorkerIncarnation] = frozenset()
    """Workers that have failed this request. One that has restarted since may have it."""
    affinity_key: str | None = None
    """The conversation, with its tenant."""
    hard_affinity: bool = False
    """Only the affinity key's own worker, among those that may take the request."""
    adapter: str = ""
    """Only workers that serve this LoRA adapter."""
    required: tuple[str, ...] = ()
    """Features that the worker must have (`worker.wire.required_features`)."""
    embeds: bool = False
    """Only workers that make embeddings; else only those that generate text."""
    num_context_tokens: int = 0
    """Tokens that the worker's context has to hold: the prompt and what is demanded of the answer."""
    ttft_budget_s: float | None = None
    """Only workers whose predicted time to first token is not longer."""
    priority: int = 0
    """Lower is earlier."""
    tenant: str = ""

    @property
    def may_be_held(self) -> bool:
        """It may wait at the gateway: it is new, has no budget, and may go to any worker."""
        return self.ttft_budget_s is None and self.numerics is None and not self.hard_affinity


class WorkerView(msgspec.Struct, eq=False):
    """One worker as one decision sees it, and what the request would cost there."""

    member: WorkerMember
    load: WorkerLoad
    """Its last report."""
    estimate: WorkerLoadEstimate
    index_tokens: int
    """Prompt tokens cached there, as the index says."""
    pending_tokens: int
    """Prompt tokens that in-flight requests will have cached there."""
    matched_tokens: int
    """Prompt tokens that count as cached there, of full blocks."""
    prefill_tokens_per_s: float
    prefill_s: float
    """Prefill time of this request there, without loading."""
    queue_s: float
    """How long other prefills there delay its first token."""
    num_displaced: float
    """Prefills there that it would delay.

    A float: half of each step stays with the oldest prefill and other gateways' work, which together count 0.5.
    """
    kv_usage: float
    """Share of the pool that running requests and this one would hold; above 1 they do not fit."""
    kv_wait_s: float
    """Wait until its blocks fit into the pool there."""
    recent_s: float
    """Prefill seconds assigned to the worker, decayed over a minute."""
    report_age_s: float
    """Age of the last report, at most 1 s; 0 if no other gateway sends here."""
    guard: str | None = None
    """Why the worker cannot take the request."""
    score: float | None = None
    """The policy's; None for a guarded worker."""
    load_cost_s: float = 0.0
    """Cost of loading and fetching."""
    plan: BlockPlan | None = None
    """The blocks that it loads and fetches; None where there are none."""
    peers: Peers | None = None
    """Where the plan fetches from: any of the holders."""

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that it need not compute: in the pool, loaded or fetched."""
        return self.matched_tokens if self.plan is None else self.plan.end_tokens

    @property
    def load_s(self) -> float:
        """How long it loads and fetches blocks before its prefill, while its engine computes for others."""
        return 0.0 if self.plan is None else self.plan.load_s

    @property
    def wait_s(self) -> float:
        """Time from the decision until it prefills, as far as the worker's load tells."""
        return self.queue_s + (self.kv_wait_s if self.kv_usage > 1.0 else 0.0)  # below, it is the price of evictions

    @property
    def predicted_ttft_s(self) -> float:
        """Time from the decision to the first token, as far as the worker's load tells."""
        return self.wait_s + self.load_s + self.prefill_s

    @property
    def num_outstanding(self) -> int:
        """Requests there that have not ended. Max of own count and report, since the report may already count ours."""
        return max(self.estimate.num_outstanding, self.load.num_running + self.load.num_waiting)

    @property
    def num_waiting(self) -> int:
        """Requests there without a first token."""
        return max(self.estimate.num_queued, self.load.num_waiting)
