"""The stream of one request to its gateway, and the limits of the queue in front of the engine.

A queue is worth having only while it drains in time. Each tenant with requests in it has an equal share of its limits:
a flood fills its own share, and the next tenant finds room. The wait of a new request is estimated as round robin
(`worker.scheduler.fairness`) would give it, from the time between two starts while others wait:

    wait = start interval x min(all that wait, (requests of its tenant that wait + 1) x tenants that wait)
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Final

from worker.engine.protocol import RequestKey
from worker.http.tracing import StreamTrace
from worker.wire import End, Failed, Frame, GenerateRequest, pack_frame

MAX_COALESCED_FRAMES: Final = 4096


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue in front of the engine."""

    max_waiting_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    """Prompt tokens, cached ones included."""
    max_queue_s: float = 120.0
    """The longest estimated wait."""


@dataclass(slots=True, eq=False)
class _TenantShare:
    num_requests: int = 0
    num_tokens: int = 0


_NO_SHARE: Final = _TenantShare()


class QueueAccounting:
    """Counts the waiting requests by tenant and refuses those over the limits. Owned by the event loop."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._shares: dict[str, _TenantShare] = {}
        self.num_requests = 0

    def add(self, request: GenerateRequest) -> None:
        share = self._shares.setdefault(request.tenant, _TenantShare())
        share.num_requests += 1
        share.num_tokens += len(request.prompt_ids)
        self.num_requests += 1

    def remove(self, request: GenerateRequest) -> None:
        """Take out a request that has started or ended."""
        share = self._shares[request.tenant]
        share.num_requests -= 1
        share.num_tokens -= len(request.prompt_ids)
        self.num_requests -= 1
        if share.num_requests == 0:
            del self._shares[request.tenant]

    def wait_s(self, tenant: str, start_interval_s: float) -> float:
        """Estimate the wait of a new request of the tenant."""
        num_tenants = len(self._shares) + (tenant not in self._shares)
        num_own = self._shares.get(tenant, _NO_SHARE).num_requests
        return start_interval_s * min(self.num_requests, (num_own + 1) * num_tenants)

    def refusal(self, request: GenerateRequest, start_interval_s: float) -> Failed | None:
        """Return why the request may not join the queue now, and when to retry; None: it may."""
        limits, num_tenants = self._limits, len(self._shares)
        share = self._shares.get(request.tenant, _NO_SHARE)
        wait_s = self.wait_s(request.tenant, start_interval_s)
        too_late = request.deadline_s is not None and wait_s > request.deadline_s
        if share.num_requests and num_tenants * share.num_requests >= limits.max_waiting_requests:
            reason = f"{share.num_requests} requests wait already"
        elif (
            share.num_requests and num_tenants * (share.num_tokens + len(request.prompt_ids)) > limits.max_queued_tokens
        ):
            reason = f"{share.num_tokens} tokens wait already"
        elif self.num_requests and (too_late or wait_s > limits.max_queue_s):
            reason = f"the queue takes {wait_s:.1f} s" + (", which is past the request's deadline" if too_late else "")
        else:
            return None
        return Failed("queue_full", reason, retryable=True, retry_after_s=wait_s or None)


class Stream:
    """One open request: a buffer of frames between the dispatcher and the connection."""

    __slots__ = ("_frames", "_wake", "ended", "key", "last", "request", "started", "trace")

    def __init__(self, key: RequestKey, request: GenerateRequest) -> None:
        self.key = key
        self.request = request
        self.started = False
        self.ended = False
        self.last: End | Failed | None = None
        """The frame with which it ended; None: it is open, or its client left before."""
        self.trace: StreamTrace | None = None
        self._frames: list[Frame] = []
        self._wake = asyncio.Event()

    def put(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._wake.set()

    async def take(self) -> bytes:
        """Wait for frames and return them packed; b"" when the stream has ended and all are taken."""
        while not self._frames:
            if self.ended:
                return b""
            self._wake.clear()
            await self._wake.wait()
        frames, self._frames = self._frames[:MAX_COALESCED_FRAMES], self._frames[MAX_COALESCED_FRAMES:]
        return b"".join(map(pack_frame, frames))

    def close(self) -> None:
        """End the stream; `take` still returns the buffered frames."""
        self.ended = True
        self._wake.set()
