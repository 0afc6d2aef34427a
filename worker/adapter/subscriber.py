"""Follows an engine's cache events over ZMQ: delivers batches in order, fetches lost ones, detects restarts.

    engine's PUB    --(topic, number, payload)-->  SUB       live
    engine's ROUTER <--(b"", first number)-------  DEALER    replay: what the engine still has, then number -1

Batches are numbered from 0. Every replay begins with the last batch received. An engine that has another batch under
that number, or none, has restarted. An idle engine is asked, too, so a lost last batch is soon noticed.
Source: vllm/distributed/kv_events.py.
"""

from __future__ import annotations

import asyncio
import stat
import time
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import zmq
import zmq.asyncio

from worker.adapter.api import EventSource
from worker.adapter.kv_events import EventBatch, EventError, decode_batch
from worker.common.sockets import is_loopback

_NUMBER_BYTES: Final = 8  # of a batch, as vLLM writes it
_END: Final = (-1).to_bytes(_NUMBER_BYTES, "big", signed=True)
_MAX_MESSAGE_BYTES: Final = 256 * 2**20  # bounds what a publisher can make this process hold
_MAX_QUEUED: Final = 100_000
"""Batches that wait here, as many as the engine keeps. Further batches are lost and fetched again."""
_OPTIONS: Final = {zmq.IPV6: 1, zmq.LINGER: 0, zmq.RCVHWM: _MAX_QUEUED, zmq.MAXMSGSIZE: _MAX_MESSAGE_BYTES}
Tell = Callable[[str, EventBatch | None], object]
"""Receives each event with its name. Before the next `batch`, those after a `gap` are lost permanently; after a
`restart` the engine's cache is empty. The others are counted: duplicate, bad, replay, unanswered."""


def engine_binds(source: EventSource) -> bool:
    """Return whether an engine binds its endpoint. It connects to any other endpoint, which the reader binds."""
    if source.binds is not None:
        return source.binds
    endpoint = source.endpoint
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


def check_endpoint(endpoint: str, *, exposed: bool) -> None:
    """Raise ValueError for an endpoint that another machine or another user can reach, unless `exposed`.

    Events carry the tokens and salts of every prompt in plain text.
    """
    parts = urlsplit(endpoint)
    if parts.scheme == "ipc":
        folder = Path(endpoint.removeprefix("ipc://")).parent
        if not folder.is_dir():
            raise ValueError(f"{endpoint}: there is no folder {folder}")
        if not exposed and stat.S_IMODE(folder.stat().st_mode) & 0o077:
            raise ValueError(f"{endpoint}: other users can enter {folder}: give it mode 0700")
    elif parts.scheme != "tcp" or parts.port is None:
        raise ValueError(f"{endpoint}: expected tcp://HOST:PORT or ipc://PATH")
    elif not exposed and not is_loopback(parts.hostname or ""):
        raise ValueError(
            f"{endpoint}: events carry prompts and salts in plain text: use 127.0.0.1, or --events-exposed if only "
            "the engine can reach that port"
        )


@dataclass(eq=False)
class EventSubscriber:
    """The events of one engine, or of one data-parallel rank. Everything runs on the event loop of `run`.

    It connects to the endpoint of its source if the engine binds it, and binds it otherwise. The constructor raises
    ValueError for an endpoint that others can reach, unless it is exposed. It raises OSError for a port that is taken.
    """

    _source: EventSource
    _tell: Tell
    _: KW_ONLY
    idle_s: float = 0.5
    replay_timeout_s: float = 1.0
    silent_s: float = 5.0
    """For `is_silent`."""
    _next: int = field(default=0, init=False)
    """The number of the next batch."""
    _next_live: int = field(default=0, init=False)
    """The lowest number that the live socket can deliver, unless the engine restarts."""
    _last_ts: float = field(default=0.0, init=False)
    _last_payload: bytes | None = field(default=None, init=False)
    """The batch before `_next`; None if the engine has sent none since its start."""
    _heard_s: float = field(default_factory=time.monotonic, init=False)
    _replay: zmq.asyncio.Socket | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        source = self._source
        for each in filter(None, (source.endpoint, source.replay_endpoint)):
            check_endpoint(each, exposed=source.is_exposed)
        self._context = zmq.asyncio.Context()
        for option, value in _OPTIONS.items():
            self._context.setsockopt(option, value)
        self._arrivals = self._context.socket(zmq.SUB)
        # It waits, and another object reads: its two futures for each message would cost more than reading it.
        self._live = zmq.Socket[bytes].shadow(self._arrivals)
        self._live.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        try:
            if engine_binds(source):
                self._live.connect(source.connect_address(source.endpoint))
            else:
                self._live.bind(source.endpoint.replace("localhost", "127.0.0.1"))
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, f"{source.endpoint}: {error.strerror}") from None

    @property
    def is_silent(self) -> bool:
        """No batch and no replay has arrived for `silent_s`: the engine is away, or publishes elsewhere."""
        return time.monotonic() - self._heard_s >= self.silent_s

    async def run(self) -> None:
        """Follow the events until cancelled."""
        await self.catch_up()
        while True:
            try:
                frames = self._live.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                if not await self._arrivals.poll(round(1000 * self.idle_s)):
                    await self.catch_up()
            else:
                await self._take_live(frames)
                await asyncio.sleep(0)  # yield between batches

    def close(self) -> None:
        """Close the sockets. Cancel `run` first."""
        self._context.destroy(linger=0)

    async def _take_live(self, frames: list[bytes]) -> None:
        """Deliver a live batch, after the missing batches before it."""
        if len(frames) != 3 or len(frames[1]) != _NUMBER_BYTES:
            self._tell("bad", None)
            return
        topic, number_bytes, payload = frames
        if self._source.topic and topic != self._source.topic.encode():
            return  # another topic with the same prefix
        number = int.from_bytes(number_bytes, "big")
        if number < self._next:
            # A socket never delivers a number twice: this batch came by a replay, or the engine has restarted.
            if number >= self._next_live and not self._is_newer(payload):
                self._next_live = number + 1
                self._tell("duplicate", None)
                return
            self._restart()
        if number > self._next:
            await self.catch_up()
        self._next_live = number + 1
        if number >= self._next:
            self._deliver(number, payload)

    def _is_newer(self, payload: bytes) -> bool:
        try:
            return decode_batch(payload).ts > self._last_ts
        except EventError:
            return False

    def _restart(self) -> None:
        """Forget the batches so far: another engine numbers its own from 0."""
        self._next = self._next_live = 0
        self._last_ts = 0.0
        self._last_payload = None
        self._tell("restart", None)

    def _deliver(self, number: int, payload: bytes) -> None:
        """Deliver a batch that is not older than `_next`."""
        if number > self._next:
            self._tell("gap", None)
        self._next = number + 1
        self._last_payload = payload
        self._heard_s = time.monotonic()
        try:
            batch = decode_batch(payload)
        except EventError:
            self._tell("bad", None)
            self._tell("gap", None)
            return
        self._last_ts = batch.ts
        self._tell("batch", batch)

    async def catch_up(self) -> None:
        """Deliver the batches that the engine still has after the last one. Detect a restart.

        It gives up when the engine does not answer. Others call it before `run`.
        """
        if not self._source.replay_endpoint:
            return
        self._tell("replay", None)
        if self._replay is None:
            self._replay = self._context.socket(zmq.DEALER)
            self._replay.connect(self._source.connect_address(self._source.replay_endpoint))
        expected = None if self._last_payload is None else self._next - 1
        next_before = self._next
        await self._replay.send_multipart((b"", (expected or 0).to_bytes(_NUMBER_BYTES, "big")))
        while await self._replay.poll(round(1000 * self.replay_timeout_s)):
            frames = await self._replay.recv_multipart()
            self._heard_s = time.monotonic()
            if len(frames) < 3 or len(frames[-2]) != _NUMBER_BYTES:
                self._tell("bad", None)
                continue
            number_bytes, payload = frames[-2:]
            is_end = number_bytes == _END
            number = int.from_bytes(number_bytes, "big")
            if expected is not None and (is_end or (number == expected and payload != self._last_payload)):
                self._restart()
                if not is_end and number > 0:  # the new engine has batches before this one
                    self._close_replay()
                    return await self.catch_up()
            expected = None
            if is_end:
                return
            if number > self._next > next_before:  # a long answer has a gap: vLLM drops what is read late
                self._close_replay()
                return await self.catch_up()
            if number >= self._next:
                self._deliver(number, payload)
        # Not an error: the engine may be busy or away. A late answer must not count for the next request.
        self._tell("unanswered", None)
        self._close_replay()

    def _close_replay(self) -> None:
        """Drop the rest of an answer."""
        if self._replay is not None:
            self._replay.close(linger=0)
            self._replay = None
