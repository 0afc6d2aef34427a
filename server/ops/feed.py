"""The live feed: GET /events on the ops port, as server-sent events, for the dashboard and `headstart top`.

event: hello      once: version, policy, what the feed has seen of the last minutes, the last decisions
event: snapshot   twice a second: traffic, index, a row for every worker
event: decisions  four times a second, if there are any
event: prefixes   every few seconds, if they changed: the tree of shared prefixes

One producer makes each frame once, for all viewers. It starts with the first viewer and ends with the last: while
nobody looks, nothing runs and the router is not watched. A viewer that does not read loses frames, oldest first.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Final

from server.api.formatting import encode_json
from server.errors import UnavailableError
from server.ops.decisions import DecisionLog
from server.ops.prefix_tree import MAX_ROWS, SharedPrefix, tree_rows
from server.ops.traffic import Totals, Traffic
from server.ops.workers import FleetSources, worker_rows

log = logging.getLogger(__name__)

TICK_S: Final = 0.25
TICKS_PER_SNAPSHOT: Final = 2
TICKS_PER_TREE: Final = 8
MAX_VIEWERS: Final = 32
MAX_UNREAD: Final = 32
"""Frames kept for a slow viewer."""
HISTORY_POINTS: Final = 240
"""One a snapshot: two minutes."""
_POINT: Final = ("output_tokens_per_s", "decisions_per_s", "hit_rate", "ttft_p50_s", "in_flight")


@dataclass(frozen=True, slots=True, eq=False)
class FeedSources:
    about: dict[str, Any]
    """What never changes: version, gateway, policy."""
    fleet: FleetSources
    totals: Callable[[int], Totals]
    """The counters now, given the number of decisions seen."""
    ttft_bounds_s: tuple[float, ...]
    index: Callable[[], dict[str, Any]]
    draining: Callable[[], bool]
    prefixes: Callable[[int], Sequence[SharedPrefix]]
    """Returns at most so many, the best first."""
    decisions: DecisionLog
    """Observes the router."""


class Viewer:
    """One reader of the feed."""

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque(maxlen=MAX_UNREAD)
        self._news = asyncio.Event()
        self._ended = False

    def put(self, frame: bytes) -> None:
        self._frames.append(frame)
        self._news.set()

    def end(self) -> None:
        self._ended = True
        self._news.set()

    async def frames(self) -> AsyncIterator[bytes]:
        """Everything new, until the feed closes."""
        while not self._ended:
            await self._news.wait()
            self._news.clear()
            frames = b"".join(self._frames)
            self._frames.clear()
            if frames:
                yield frames


class Feed:
    """Owned by the event loop."""

    def __init__(self, sources: FeedSources) -> None:
        self._sources = sources
        self._viewers: set[Viewer] = set()
        self._producer: asyncio.Task[None] | None = None
        self._decisions = sources.decisions
        self._traffic = Traffic(sources.ttft_bounds_s)
        self._history: deque[tuple[float | None, ...]] = deque(maxlen=HISTORY_POINTS)
        self._last: dict[str, bytes] = {}
        """The latest frame of each kind that a new viewer needs at once."""
        self._closed = False

    @contextmanager
    def viewing(self) -> Iterator[Viewer]:
        """A viewer, as long as it looks. Raises UnavailableError."""
        if self._closed or len(self._viewers) >= MAX_VIEWERS:
            reason = "This gateway is stopping." if self._closed else f"{MAX_VIEWERS} viewers look on already."
            raise UnavailableError(reason, retry_after_s=5.0)
        viewer = Viewer()
        if self._producer is None:
            self._start()
        viewer.put(self._hello())
        for frame in self._last.values():
            viewer.put(frame)
        self._viewers.add(viewer)
        try:
            yield viewer
        finally:
            self._viewers.discard(viewer)
            if not self._viewers:
                self._stop()

    def close(self) -> None:
        """End every viewer's stream: the gateway stops."""
        self._closed = True
        for viewer in self._viewers:
            viewer.end()

    def _start(self) -> None:
        self._decisions.start()
        self._traffic = Traffic(self._sources.ttft_bounds_s)
        self._history.clear()
        self._last.clear()
        self._snapshot()
        self._producer = asyncio.create_task(self._produce(), name="feed")
        self._producer.add_done_callback(self._produced)

    def _stop(self) -> None:
        self._decisions.stop()
        if self._producer is not None:
            self._producer.cancel()
            self._producer = None

    def _produced(self, task: asyncio.Task[None]) -> None:
        """A producer that fails ends its viewers, who come back and start another."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        log.error("the live feed failed", exc_info=error)
        self._stop()
        for viewer in self._viewers:
            viewer.end()

    async def _produce(self) -> None:
        self._send_tree()
        tick = 0
        while True:
            await asyncio.sleep(TICK_S)
            tick += 1
            news = self._decisions.drain()
            if news is not None:
                self._send(event("decisions", news))
            if tick % TICKS_PER_SNAPSHOT == 0:
                self._send(self._snapshot())
            if tick % TICKS_PER_TREE == 0:
                self._send_tree()

    def _send_tree(self) -> None:
        frame = event("prefixes", {"prefixes": tree_rows(self._sources.prefixes(MAX_ROWS))})
        if frame != self._last.get("prefixes"):
            self._last["prefixes"] = frame
            self._send(frame)

    def _send(self, frame: bytes) -> None:
        for viewer in self._viewers:
            viewer.put(frame)

    def _snapshot(self) -> bytes:
        sources = self._sources
        totals = sources.totals(self._decisions.num_decisions)
        traffic = self._traffic.add(totals)
        self._history.append((time.time(), *(traffic[name] for name in _POINT)))
        frame = event(
            "snapshot",
            {
                "at": time.time(),
                "draining": sources.draining(),
                "traffic": traffic,
                "totals": asdict(totals),
                "index": sources.index(),
                "workers": worker_rows(sources.fleet),
            },
        )
        self._last["snapshot"] = frame
        return frame

    def _hello(self) -> bytes:
        history = {"columns": ("at", *_POINT), "rows": list(self._history)}
        return event("hello", {**self._sources.about, "history": history, "decisions": list(self._decisions.recent)})


def event(name: str, data: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), encode_json(data))
