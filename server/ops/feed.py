"""The live feed: GET /events on the ops port, as server-sent events, for the dashboard and `headstart top`.

event: hello      once: version, policy, the last minutes' traffic, the last decisions
event: snapshot   twice a second: traffic, index, a row for every worker
event: changes    once, and when something has happened: the last changes, `server/ops/changes.py`
event: decisions  four times a second, if there are any
event: prefixes   every two seconds, if it changed: the tree of shared prefixes, use by tenant
"""

from __future__ import annotations

import asyncio
import itertools
import math
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from typing import Any, Final

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from server.errors import UnavailableError
from server.http.stream import CancelOnDisconnect, SseWriter, client_of, sse
from server.ops.changes import FeedChanges
from server.ops.overview import Overview
from server.ops.prefix_tree import MAX_ROWS, tree_rows
from server.request_context import CURRENT

RATE_WINDOW_S: Final = 5.0  # short: a shown rate follows a change within seconds
QUANTILE_WINDOW_S: Final = 60.0  # long: a p99 needs many requests
TICK_S: Final = 0.25  # short: a reader sees changes at once
TICKS_PER_SNAPSHOT: Final = 2  # a reader can follow numbers twice a second
TICKS_PER_TREE: Final = 8  # every two seconds: the tree is the largest frame
MAX_VIEWERS: Final = 32  # each is sent every snapshot
MAX_TENANTS: Final = 16  # rows that a screen shows
MAX_UNREAD: Final = 32
"""Frames kept for a slow viewer; the oldest are dropped."""
HISTORY_POINTS: Final = 240
"""Two minutes, one point per snapshot."""
_POINT: Final = ("output_tokens_per_s", "decisions_per_s", "hit_rate", "ttft_p50_s", "in_flight")

FrameQueue = asyncio.Queue[bytes | None]
"""The frames that one viewer has yet to read; None ends the feed."""


Totals = dict[str, Any]
"""Counters since the process started, as JSON."""


def read_totals(overview: Overview) -> Totals:
    """Return the current totals. Output tokens count as they come, all others at the end of their request."""
    metrics = overview.metrics
    return {
        "at_s": time.monotonic(),
        "num_decisions": overview.decisions.num_decisions,
        "prompt_tokens": metrics.prompt_tokens.sum(),
        "cached_tokens": metrics.cached_tokens.sum(),
        "output_tokens": metrics.output_tokens.sum() + overview.api.services.num_streamed_tokens,
        "in_flight": metrics.num_in_flight,
        "ttft_counts": metrics.ttft_s.cumulative(),  # one per bucket
    }


class Traffic:
    """Rates and quantiles of the last seconds, from totals added at regular intervals."""

    def __init__(self, ttft_bounds_s: Sequence[float]) -> None:
        self._bounds_s = ttft_bounds_s
        self._samples: deque[Totals] = deque()

    def add(self, totals: Totals) -> dict[str, Any]:
        """Return the current numbers; None where nothing was measured."""
        samples, now_s = self._samples, totals["at_s"]
        samples.append(totals)
        while now_s - samples[0]["at_s"] > QUANTILE_WINDOW_S:
            samples.popleft()
        rate_start = next(sample for sample in samples if now_s - sample["at_s"] <= RATE_WINDOW_S)
        window_start, elapsed_s = samples[0], now_s - rate_start["at_s"]
        prompt_tokens = totals["prompt_tokens"] - window_start["prompt_tokens"]
        cached_tokens = totals["cached_tokens"] - window_start["cached_tokens"]
        counts = [now - then for now, then in zip(totals["ttft_counts"], window_start["ttft_counts"], strict=True)]

        def rate(name: str) -> float | None:
            more = totals[name] - rate_start[name]  # negative: an answer that began again took its tokens back
            return more / elapsed_s if elapsed_s > 0.0 <= more else None

        return {
            "window_s": now_s - window_start["at_s"],
            "in_flight": totals["in_flight"],
            "decisions_per_s": rate("num_decisions"),
            "output_tokens_per_s": rate("output_tokens"),
            "prompt_tokens_per_s": rate("prompt_tokens"),
            "prompt_tokens": prompt_tokens,
            "hit_rate": cached_tokens / prompt_tokens if prompt_tokens else None,
            "ttft_p50_s": quantile(0.5, self._bounds_s, counts),
            "ttft_p95_s": quantile(0.95, self._bounds_s, counts),
        }


def quantile(q: float, bounds: Sequence[float], counts: Sequence[float]) -> float | None:
    """Interpolate within a bucket, as Prometheus does. `counts` are cumulative, the last bound is inf."""
    if not counts or counts[-1] <= 0:
        return None
    rank = q * counts[-1]
    index = bisect_left(counts, rank)
    lower, below = (bounds[index - 1], counts[index - 1]) if index else (0.0, 0.0)
    if bounds[index] == math.inf or counts[index] == below:
        return lower
    return lower + (bounds[index] - lower) * (rank - below) / (counts[index] - below)


class Feed:
    """An ASGI app with one viewer per connection.

    `run` samples always, so that no figure depends on who looks. While there are viewers, it makes each frame once.
    """

    def __init__(self, overview: Overview) -> None:
        self._overview = overview
        self._decisions = overview.decisions
        self._traffic = Traffic(overview.metrics.ttft_s.bounds)
        self._changes = FeedChanges()
        self._viewers: set[FrameQueue] = set()
        self._history: deque[tuple[float | None, ...]] = deque(maxlen=HISTORY_POINTS)
        self._last: dict[str, bytes] = {}
        """The latest frame of each kind that a new viewer needs at once."""
        self._closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        CURRENT.get().route = "events"
        writer = SseWriter(send, list)
        with self._viewing() as queue:
            try:
                with CancelOnDisconnect(client_of(scope)):
                    while (frame := await queue.get()) is not None:
                        await writer.write(frame)
            except ClientDisconnect:
                return  # the viewer has closed the page
            await writer.write(b"", more=False)

    async def run(self) -> None:
        for tick in itertools.count(1):
            await asyncio.sleep(TICK_S)
            self._send_decisions()
            if tick % TICKS_PER_SNAPSHOT == 0:
                self._sample(sends=bool(self._viewers))
            if self._viewers and tick % TICKS_PER_TREE == 0:
                self._send_tree()

    def close(self) -> None:
        """End every viewer's stream, and refuse new viewers."""
        self._send(None)
        self._closed = True

    @contextmanager
    def _viewing(self) -> Iterator[FrameQueue]:
        """Add a viewer. Raises UnavailableError."""
        if self._closed or len(self._viewers) >= MAX_VIEWERS:
            reason = "This gateway is stopping." if self._closed else f"{MAX_VIEWERS} viewers are connected already."
            raise UnavailableError(reason, retry_after_s=5.0)
        self._send_decisions()  # the others see now what is in the new viewer's first frame
        if not self._viewers:
            self._decisions.has_viewers = True
            self._sample(sends=True)
            self._send_tree()
        queue = FrameQueue(MAX_UNREAD)
        for frame in (self._hello(), *self._last.values()):
            queue.put_nowait(frame)
        self._viewers.add(queue)
        try:
            yield queue
        finally:
            self._viewers.discard(queue)
            self._decisions.has_viewers = bool(self._viewers)

    def _send_decisions(self) -> None:
        if (decisions := self._decisions.drain()) is not None and self._viewers:
            self._send(event("decisions", decisions))

    def _send(self, frame: bytes | None) -> None:
        for queue in () if self._closed else self._viewers:
            if queue.full():
                queue.get_nowait()
            queue.put_nowait(frame)

    def _send_latest(self, name: str, data: object) -> None:
        """Send a frame, unless it is the latest of its name already."""
        if (frame := event(name, data)) != self._last.get(name):
            self._last[name] = frame
            self._send(frame)

    def _send_tree(self) -> None:
        prefixes = tree_rows(self._overview.prefixes(MAX_ROWS))
        usage = self._overview.usage.by_tenant(MAX_TENANTS)
        self._send_latest("prefixes", {"prefixes": prefixes, "usage": usage})

    def _sample(self, *, sends: bool) -> None:
        overview, at = self._overview, time.time()
        traffic = self._traffic.add(read_totals(overview))
        self._history.append((at, *(traffic[name] for name in _POINT)))
        rows = overview.worker_rows()
        self._changes.see(rows, overview.disrupted())
        if not sends:
            return
        self._send_latest("changes", {"changes": list(self._changes.recent)})
        snapshot = {
            "at": at,
            "draining": overview.api.draining,
            "traffic": traffic,
            "index": overview.index_state(),
            "workers": rows,
            "workers_needed": overview.workers_needed(),
            "objective_s": overview.needs.objective_s,
        }
        self._send_latest("snapshot", snapshot)

    def _hello(self) -> bytes:
        hello = {
            "version": version("headstart"),
            "gateway": self._overview.api.services.requests.gateway_id,
            "policy": self._overview.router.policy,
            "grafana_url": self._overview.grafana_url,
            "history": {"columns": ("at", *_POINT), "rows": list(self._history)},
            "decisions": self._decisions.shown(),
        }
        return event("hello", hello)


def event(name: str, data: object) -> bytes:
    return sse(msgspec.json.encode(data), name)
