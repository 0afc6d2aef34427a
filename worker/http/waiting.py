"""What waits for the engine, by tenant, and when the door closes: a queue is worth having only while it drains in time.

Every tenant with something in the queue has an equal share of its limits, so a flood fills its own share and the next
tenant finds room. The time that a newcomer would wait is estimated from the time between two starts while others wait:

    wait = start interval x min(all that wait, (what its tenant has waiting + 1) x tenants that wait)

which is what round robin gives it; see `scheduler.fair_share` for the order in which they really start.
"""

from __future__ import annotations

from dataclasses import dataclass

from worker.scheduler.budget import BatchLimits
from worker.wire import Failed, GenerateRequest


@dataclass(slots=True, eq=False)
class _Share:
    num_requests: int = 0
    num_tokens: int = 0


def num_queued_tokens(request: GenerateRequest) -> int:
    """What a request adds to the queue: its prompt, whatever of it may be cached."""
    return len(request.prompt_ids)


class Waiting:
    """Owned by the event loop."""

    __slots__ = ("_limits", "_shares", "num_requests")

    def __init__(self, limits: BatchLimits) -> None:
        self._limits = limits
        self._shares: dict[str, _Share] = {}
        self.num_requests = 0

    def add(self, request: GenerateRequest) -> None:
        share = self._shares.setdefault(request.tenant, _Share())
        share.num_requests += 1
        share.num_tokens += num_queued_tokens(request)
        self.num_requests += 1

    def remove(self, request: GenerateRequest) -> None:
        """It has started, or ended without."""
        share = self._shares[request.tenant]
        share.num_requests -= 1
        share.num_tokens -= num_queued_tokens(request)
        self.num_requests -= 1
        if share.num_requests == 0:
            del self._shares[request.tenant]

    def wait_s(self, tenant: str, start_interval_s: float) -> float:
        """How long a newcomer of the tenant would wait."""
        share = self._shares.get(tenant)
        num_tenants = len(self._shares) + (share is None)
        num_own = 0 if share is None else share.num_requests
        return start_interval_s * min(self.num_requests, (num_own + 1) * num_tenants)

    def refusal(self, request: GenerateRequest, start_interval_s: float) -> Failed | None:
        """Why the request may not join the queue now, and when to come again; None: it may."""
        limits, share = self._limits, self._shares.get(request.tenant)
        num_tenants = len(self._shares) + (share is None)
        wait_s = self.wait_s(request.tenant, start_interval_s)
        if share is not None and num_tenants * share.num_requests >= limits.max_waiting_requests:
            reason = f"{share.num_requests} requests wait already"
        elif share is not None and num_tenants * (share.num_tokens + num_queued_tokens(request)) > (
            limits.max_queued_tokens
        ):
            reason = f"{share.num_tokens} tokens wait already"
        elif self.num_requests and wait_s > limits.max_queue_s:
            reason = f"the queue takes {wait_s:.1f} s"
        elif request.deadline_s is not None and self.num_requests and wait_s > request.deadline_s:
            reason = f"the queue takes {wait_s:.1f} s, which is past the request's deadline"
        else:
            return None
        return Failed("queue_full", reason, retryable=True, retry_after_s=wait_s or None)
