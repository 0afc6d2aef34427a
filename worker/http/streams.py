"""A request's body and its stream to the gateway, and the limits of the queue in front of the engine.

A queue helps only while it drains in time. Each tenant with waiting requests has an equal share of the limits, so a
flood fills only its own share. The wait of a new request is estimated for round robin
(`worker.scheduler.fairness`):

    ahead = min(all that wait, (requests of its tenant that wait + 1) x tenants that wait)
    wait  = the longer of    start interval x ahead    and    prefill time of all that wait x ahead / all that wait

The first is 0 until enough starts were measured (`StartInterval.sure_s`). The second is known from the beginning.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from worker.contracts.engine import RefusedError, RequestKey
from worker.contracts.rates import QueuePace
from worker.http.tracing import StreamTrace
from worker.wire import End, Failed, Frame, GenerateRequest, pack

MAX_COALESCED_FRAMES: Final = 4096  # a long backlog is packed in parts, and the loop turns in between
MAX_BODY_BYTES: Final = 32 * 1024 * 1024  # as much as a gateway takes by default


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Limits of the queue in front of the engine."""

    max_waiting_requests: int = 1024
    max_queued_tokens: int = 1 << 20
    """Prompt tokens, cached ones included."""
    max_queue_s: float = 120.0
    """The longest estimated wait."""


class QueueAccounting:
    """Counts the waiting requests by tenant and refuses those over the limits. Owned by the event loop."""

    def __init__(self, limits: QueueLimits) -> None:
        self._limits = limits
        self._num_requests: Counter[str] = Counter()
        """Waiting requests by tenant."""
        self._num_tokens: Counter[str] = Counter()
        """Their prompt tokens."""

    def add(self, request: GenerateRequest) -> None:
        self._num_requests[request.tenant] += 1
        self._num_tokens[request.tenant] += len(request.prompt_ids)

    def remove(self, request: GenerateRequest) -> None:
        """Take out a request that has started or ended."""
        self._num_requests[request.tenant] -= 1
        self._num_tokens[request.tenant] -= len(request.prompt_ids)
        if self._num_requests[request.tenant] == 0:
            del self._num_requests[request.tenant], self._num_tokens[request.tenant]

    @property
    def num_requests(self) -> int:
        return self._num_requests.total()

    def wait_s(self, tenant: str, pace: QueuePace) -> float:
        """Estimate the wait of a new request of the tenant: the least that is sure."""
        num_requests, num_tenants = self.num_requests, len(self._num_requests) + (tenant not in self._num_requests)
        num_ahead = min(num_requests, (self._num_requests[tenant] + 1) * num_tenants)
        return max(pace.sure_interval_s * num_ahead, pace.prefill_s * num_ahead / max(1, num_requests))

    def refusal(self, request: GenerateRequest, pace: QueuePace) -> Failed | None:
        """Return why the request may not join the queue now, and when to retry; None: it may."""
        limits, num_tenants = self._limits, len(self._num_requests)
        num_own, num_tokens = self._num_requests[request.tenant], self._num_tokens[request.tenant]
        wait_s = self.wait_s(request.tenant, pace)
        too_late = request.deadline_s is not None and wait_s > request.deadline_s
        if num_own and num_tenants * num_own >= limits.max_waiting_requests:
            reason = f"{num_own} requests wait already"
        elif num_own and num_tenants * (num_tokens + len(request.prompt_ids)) > limits.max_queued_tokens:
            reason = f"{num_tokens} tokens wait already"
        elif self.num_requests and (too_late or wait_s > limits.max_queue_s):
            reason = f"the queue takes {wait_s:.1f} s" + (", which is past the request's deadline" if too_late else "")
        else:
            return None
        return Failed("queue_full", reason, retryable=True, retry_after_s=wait_s or None)


class Stream:
    """One open request: a buffer of frames between the dispatcher and the connection."""

    __slots__ = ("_frames", "_wake", "_write", "ended", "key", "last", "request", "started", "trace")

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
        self._write: Callable[[bytes], bool] | None = None
        """Set while the reader waits in `take`, and was not woken: frames may pass it then."""

    def put(self, frame: Frame) -> None:
        """Add a frame. Call `flush` after the last of a step."""
        self._frames.append(frame)

    def flush(self) -> None:
        """Write the frames, without a turn of the reader's task where the connection takes them."""
        is_short = len(self._frames) <= MAX_COALESCED_FRAMES
        if self._write is not None and is_short and self._write(b"".join(map(pack, self._frames))):
            self._frames = []
        else:
            self._write = None
            self._wake.set()

    @property
    def is_taken(self) -> bool:
        """True once the stream has ended and all its frames are taken."""
        return self.ended and not self._frames

    async def take(self, timeout_s: float | None = None, write: Callable[[bytes], bool] | None = None) -> bytes:
        """Wait for frames and return them packed; b"" if none come in this time, or before the end.

        `write` gets those of the meantime, packed, as long as it returns True.
        """
        if not self._frames and not self.ended:
            self._wake.clear()
            self._write = write
            timer = None if timeout_s is None else asyncio.get_running_loop().call_later(timeout_s, self._wake.set)
            try:
                await self._wake.wait()
            finally:
                self._write = None
            if timer is not None:
                timer.cancel()
        frames, self._frames = self._frames[:MAX_COALESCED_FRAMES], self._frames[MAX_COALESCED_FRAMES:]
        return b"".join(map(pack, frames))

    def close(self) -> None:
        """End the stream; `take` still returns the buffered frames."""
        self.ended, self._write = True, None
        self._wake.set()


async def read_body(request: Request, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Read the whole body. Raises ClientDisconnect, and RefusedError past `max_bytes`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise RefusedError(Failed("payload_too_large", f"the body exceeds {max_bytes} bytes", retryable=False))
    return bytes(body)
