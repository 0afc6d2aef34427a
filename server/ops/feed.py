"""The live feed: GET /events on the ops port, as server-sent events, for the dashboard and `headstart top`.

event: hello      once: version, policy, the last minutes' traffic, the last decisions
event: snapshot   twice a second: traffic, index, a row for every worker
event: decisions  four times a second, if there are any
event: prefixes   every two seconds, if it changed: the tree of shared prefixes
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from server.errors import UnavailableError
from server.http.stream import CancelOnDisconnect, ClientGoneError, SseWriter, client_of
from server.ops.overview import Overview
from server.ops.traffic import Traffic, read_totals
from server.request_context import CURRENT
from server.router.prefix_tree import MAX_ROWS, tree_rows

TICK_S: Final = 0.25
TICKS_PER_SNAPSHOT: Final = 2
TICKS_PER_TREE: Final = 8
MAX_VIEWERS: Final = 32
MAX_UNREAD: Final = 32
"""Frames kept for a slow viewer, who loses the oldest ones."""
HISTORY_POINTS: Final = 240
"""One a snapshot: two minutes."""
_POINT: Final = ("output_tokens_per_s", "decisions_per_s", "hit_rate", "ttft_p50_s", "in_flight")

Frames = asyncio.Queue[bytes | None]
"""Frames that one viewer has yet to read; None ends the feed."""


class Feed:
    """An ASGI app, one viewer per connection. `run` makes each frame once, for all viewers, while there are any."""

    def __init__(self, overview: Overview) -> None:
        self._overview = overview
        self._decisions = overview.router.decisions
        self._traffic = Traffic(overview.metrics.ttft_s.bounds)
        self._viewers: set[Frames] = set()
        self._history: deque[tuple[float | None, ...]] = deque(maxlen=HISTORY_POINTS)
        self._last: dict[str, bytes] = {}
        """The latest frame of each kind that a new viewer needs at once."""
        self._closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        CURRENT.get().route = "events"
        writer = SseWriter(send, list)
        with self._viewing() as frames:
            try:
                with CancelOnDisconnect(client_of(scope)):
                    while (frame := await frames.get()) is not None:
                        await writer.write(frame)
            except ClientGoneError:
                return  # closing the page is how a viewer leaves
            await writer.write(b"", more=False)

    async def run(self) -> None:
        for tick in itertools.count(1):
            await asyncio.sleep(TICK_S)
            if not self._viewers:
                continue
            if (decisions := self._decisions.drain()) is not None:
                self._send(event("decisions", decisions))
            if tick % TICKS_PER_SNAPSHOT == 0:
                self._send_snapshot()
            if tick % TICKS_PER_TREE == 0:
                self._send_tree()

    def close(self) -> None:
        """End every viewer's stream, for good."""
        self._closed = True
        self._send(None)

    @contextmanager
    def _viewing(self) -> Iterator[Frames]:
        """Add a viewer. Raises UnavailableError."""
        if self._closed or len(self._viewers) >= MAX_VIEWERS:
            reason = "This gateway is stopping." if self._closed else f"{MAX_VIEWERS} viewers look on already."
            raise UnavailableError(reason, retry_after_s=5.0)
        if not self._viewers:
            self._decisions.active = True
            self._decisions.recent.clear()
            self._decisions.drain()
            self._traffic = Traffic(self._overview.metrics.ttft_s.bounds)
            self._history.clear()
            self._send_snapshot()
            self._send_tree()
        frames = Frames(MAX_UNREAD)
        for frame in (self._hello(), *self._last.values()):
            frames.put_nowait(frame)
        self._viewers.add(frames)
        try:
            yield frames
        finally:
            self._viewers.discard(frames)
            self._decisions.active = bool(self._viewers)

    def _send(self, frame: bytes | None) -> None:
        for frames in self._viewers:
            if frames.full():
                frames.get_nowait()
            frames.put_nowait(frame)

    def _send_tree(self) -> None:
        frame = event("prefixes", {"prefixes": tree_rows(self._overview.prefixes(MAX_ROWS))})
        if frame != self._last.get("prefixes"):
            self._last["prefixes"] = frame
            self._send(frame)

    def _send_snapshot(self) -> None:
        overview, at = self._overview, time.time()
        totals = read_totals(overview.metrics, self._decisions.num_decisions, overview.services.num_streamed_tokens)
        traffic = self._traffic.add(totals)
        self._history.append((at, *(traffic[name] for name in _POINT)))
        snapshot = {
            "at": at,
            "draining": overview.api.draining,
            "traffic": traffic,
            "totals": totals,
            "index": overview.index_state(),
            "workers": overview.worker_rows(),
        }
        self._last["snapshot"] = event("snapshot", snapshot)
        self._send(self._last["snapshot"])

    def _hello(self) -> bytes:
        hello = {
            "version": version("headstart"),
            "gateway": self._overview.services.requests.gateway_id,
            "policy": self._overview.router.policy,
            "history": {"columns": ("at", *_POINT), "rows": list(self._history)},
            "decisions": list(self._decisions.recent.values()),
        }
        return event("hello", hello)


def event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
