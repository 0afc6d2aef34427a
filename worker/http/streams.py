"""The open requests as the HTTP side sees them: frames in from the engine's thread, bytes out to the gateway.

The engine hands over a whole step's frames at once, so the event loop is woken once a step, not once a token.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Final

from worker.http.tracing import StreamTrace
from worker.http.waiting import Waiting
from worker.scheduler.plan import EngineOutput
from worker.scheduler.request import RequestKey
from worker.wire import End, Failed, Frame, GenerateRequest, Started, pack_frame

MAX_COALESCED_FRAMES: Final = 4096


class Stream:
    """One open request. `take` gives what has come since, packed; `ended` once nothing more will come."""

    __slots__ = ("_frames", "_wake", "ended", "key", "last", "request", "started", "trace")

    def __init__(self, key: RequestKey, request: GenerateRequest) -> None:
        self.key = key
        self.request = request
        self.started = False
        self.ended = False
        self.last: End | Failed | None = None
        """The frame with which it ended; None: it has not, or its reader left before."""
        self.trace: StreamTrace | None = None
        self._frames: list[Frame] = []
        self._wake = asyncio.Event()

    def put(self, frame: Frame) -> None:
        self._frames.append(frame)
        self._wake.set()

    async def take(self) -> bytes:
        """Wait for frames and return all that there are; b"" when the stream has ended and all are taken."""
        while not self._frames:
            if self.ended:
                return b""
            self._wake.clear()
            await self._wake.wait()
        frames, self._frames = self._frames[:MAX_COALESCED_FRAMES], self._frames[MAX_COALESCED_FRAMES:]
        return b"".join(map(pack_frame, frames))

    def close(self) -> None:
        """Nobody listens any more."""
        self.ended = True
        self._wake.set()


class Streams:
    """Owner of the open streams; lives in the event loop, only `deliver` is called from the engine's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop, waiting: Waiting) -> None:
        self._loop = loop
        self.waiting = waiting
        """Of the open streams, those whose prefill has not begun."""
        self._open: dict[RequestKey, Stream] = {}
        self._keys = itertools.count()
        self._on_empty: list[Callable[[], None]] = []

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: GenerateRequest) -> Stream:
        stream = Stream(RequestKey(next(self._keys)), request)
        self._open[stream.key] = stream
        self.waiting.add(request)
        return stream

    def close(self, stream: Stream) -> bool:
        """End a stream from this side. True: the engine still works for it and has to be told."""
        if self._open.get(stream.key) is not stream:
            return False
        self._end(stream)
        return True

    def by_request_id(self, request_id: str) -> list[Stream]:
        """Usually one; a gateway that repeats a request before its old connection is seen broken has two."""
        return [stream for stream in self._open.values() if stream.request.request_id == request_id]

    def deliver(self, emissions: list[EngineOutput]) -> None:
        """Called by the engine's thread."""
        self._loop.call_soon_threadsafe(self._dispatch, emissions)

    def fail_all(self, failed: Failed) -> None:
        """The engine is dead: no open stream gets another frame."""
        for stream in list(self._open.values()):
            stream.put(failed)
            stream.last = failed
            self._end(stream)

    async def wait_empty(self) -> None:
        """Return once no stream is open."""
        while self._open:
            emptied = asyncio.Event()
            self._on_empty.append(emptied.set)
            await emptied.wait()

    def _dispatch(self, emissions: list[EngineOutput]) -> None:
        for key, frame in emissions:
            stream = self._open.get(key)
            if stream is None:  # its client has gone
                continue
            stream.put(frame)
            match frame:
                case Started():
                    self._start(stream)
                case End() | Failed():
                    stream.last = frame
                    self._end(stream)

    def _start(self, stream: Stream) -> None:
        if not stream.started:
            stream.started = True
            self.waiting.remove(stream.request)

    def _end(self, stream: Stream) -> None:
        self._start(stream)
        stream.close()
        del self._open[stream.key]
        if not self._open:
            waiters, self._on_empty = self._on_empty, []
            for wake in waiters:
                wake()
