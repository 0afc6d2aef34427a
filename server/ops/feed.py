"""The live feed: GET /events on the ops port, as server-sent events, for the dashboard and `headstart top`.

event: hello      once: version, policy, the last minutes' traffic, the last decisions
event: snapshot   twice a second: traffic, index, a row for every worker
event: decisions  four times a second, if there are any
event: prefixes   every two seconds, if it changed: the tree of shared prefixes

One producer makes each frame once, for all viewers, and only while there are any.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Final

import msgspec
from starlette.types import Receive, Scope, Send

from server.errors import UnavailableError
from server.http.stream import CancelOnDisconnect, ClientGoneError, SseWriter, client_of
from server.ops.decisions import DecisionLog
from server.ops.overview import Overview
from server.ops.prefix_tree import MAX_ROWS, tree_rows
from server.request_context import context_of

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
TICKS_PER_SNAPSHOT: Final = 2
TICKS_PER_TREE: Final = 8
MAX_VIEWERS: Final = 32
MAX_UNREAD: Final = 32
"""Frames kept for a slow viewer, who loses the oldest ones."""
HISTORY_POINTS: Final = 240
"""One a snapshot: two minutes."""
_POINT: Final = ("output_tokens_per_s", "decisions_per_s", "hit_rate", "ttft_p50_s", "in_flight")


class Viewer:
    """One reader of the feed."""

    def __init__(self) -> None:
        self._frames: asyncio.Queue[bytes | None] = asyncio.Queue(MAX_UNREAD)

    def put(self, frame: bytes | None) -> None:
        """Add a frame; None ends the feed."""
        if self._frames.full():
            self._frames.get_nowait()
        self._frames.put_nowait(frame)

    async def frames(self) -> AsyncIterator[bytes]:
        """Yield every frame, until the feed closes."""
        while (frame := await self._frames.get()) is not None:
            yield frame


class Feed:
    """The producer and its viewers; as an ASGI app, one viewer per connection. Owned by the event loop."""

    def __init__(self, overview: Overview, decisions: DecisionLog) -> None:
        self._overview = overview
        self._decisions = decisions
        self._traffic = overview.traffic()
        self._viewers: set[Viewer] = set()
        self._producer: asyncio.Task[None] | None = None
        self._history: deque[tuple[float | None, ...]] = deque(maxlen=HISTORY_POINTS)
        self._last: dict[str, bytes] = {}
        """The latest frame of each kind that a new viewer needs at once."""
        self._closed = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        context_of(scope).route = "events"
        writer = SseWriter(send, list)
        with self.viewing() as viewer:
            try:
                with CancelOnDisconnect(client_of(scope)):
                    async for frame in viewer.frames():
                        await writer.write(frame)
            except ClientGoneError:
                return  # closing the page is how a viewer leaves
            await writer.write(b"", more=False)

    @contextmanager
    def viewing(self) -> Iterator[Viewer]:
        """Add a viewer. Raises UnavailableError."""
        if self._closed or len(self._viewers) >= MAX_VIEWERS:
            reason = "This gateway is stopping." if self._closed else f"{MAX_VIEWERS} viewers look on already."
            raise UnavailableError(reason, retry_after_s=5.0)
        if self._producer is None:
            self._start()
        viewer = Viewer()
        for frame in (self._hello(), *self._last.values()):
            viewer.put(frame)
        self._viewers.add(viewer)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._stop()

    def close(self) -> None:
        """End every viewer's stream, for good."""
        self._closed = True
        self._stop()
        self._send(None)

    def _start(self) -> None:
        self._decisions.start()
        self._traffic = self._overview.traffic()
        self._history.clear()
        self._send_snapshot()
        self._send_tree()
        self._producer = asyncio.create_task(self._produce(), name="feed")
        self._producer.add_done_callback(self._produced)

    def _stop(self) -> None:
        self._decisions.stop()
        if self._producer is not None:
            self._producer.cancel()
            self._producer = None

    def _produced(self, task: asyncio.Task[None]) -> None:
        """End the viewers of a producer that failed; they reconnect and start another."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("the live feed failed", exc_info=error)
        self._stop()
        self._send(None)

    async def _produce(self) -> None:
        tick = 0
        while True:
            await asyncio.sleep(TICK_S)
            tick += 1
            if (decisions := self._decisions.drain()) is not None:
                self._send(event("decisions", decisions))
            if tick % TICKS_PER_SNAPSHOT == 0:
                self._send_snapshot()
            if tick % TICKS_PER_TREE == 0:
                self._send_tree()

    def _send(self, frame: bytes | None) -> None:
        for viewer in self._viewers:
            viewer.put(frame)

    def _send_tree(self) -> None:
        frame = event("prefixes", {"prefixes": tree_rows(self._overview.prefixes(MAX_ROWS))})
        if frame != self._last.get("prefixes"):
            self._last["prefixes"] = frame
            self._send(frame)

    def _send_snapshot(self) -> None:
        totals = self._overview.totals(self._decisions.num_decisions)
        traffic = self._traffic.add(totals)
        self._history.append((time.time(), *(traffic[name] for name in _POINT)))
        snapshot = {
            "at": time.time(),
            "draining": self._overview.lifecycle.draining,
            "traffic": traffic,
            "totals": asdict(totals),
            "index": self._overview.index_state(),
            "workers": self._overview.worker_rows(),
        }
        self._last["snapshot"] = event("snapshot", snapshot)
        self._send(self._last["snapshot"])

    def _hello(self) -> bytes:
        history = {"columns": ("at", *_POINT), "rows": list(self._history)}
        return event(
            "hello", {**self._overview.about(), "history": history, "decisions": list(self._decisions.recent.values())}
        )


def event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), msgspec.json.encode(data))
