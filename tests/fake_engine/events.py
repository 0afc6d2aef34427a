"""The cache events of one rank, over ZMQ: live ones, and a replay of the latest."""

from __future__ import annotations

import random
import threading
import time
from collections import deque
from typing import Any

import msgpack
import zmq

from worker.adapter.api import EventSource
from worker.adapter.subscriber import engine_binds

BUFFERED_BATCHES = 10_000


class Events:
    """The publisher of one rank, with vLLM's replay."""

    def __init__(self, endpoint: str, replay: str | None, topic: str, rank: int) -> None:
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.setsockopt(zmq.LINGER, 0)
        if engine_binds(EventSource(endpoint, None)):
            self._pub.bind(endpoint)
        else:
            self._pub.connect(endpoint)
        self._replay = None
        if replay is not None:
            self._replay = self._context.socket(zmq.ROUTER)
            self._replay.bind(replay)
        self.endpoint, self.replay, self.topic = endpoint, replay, topic
        self._rank = rank
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=BUFFERED_BATCHES)
        self._queue: deque[bytes] = deque()
        self._wake = threading.Condition()
        self.loss = 0.0
        """Part of the batches that only the replay has."""
        self._closing = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join()
        self._context.destroy(linger=0)

    def publish(self, events: list[dict[str, Any]]) -> None:
        if not events:
            return
        self.send(msgpack.packb([time.time(), events, self._rank]))

    def send(self, payload: bytes) -> None:
        """Publish a batch."""
        with self._wake:
            self._queue.append(payload)
            self._wake.notify()

    def _run(self) -> None:
        number = 0
        while not self._closing:
            if self._replay is not None and self._replay.poll(0):
                client, _, start = self._replay.recv_multipart()
                for seq, payload in self._buffer:
                    if seq >= int.from_bytes(start, "big"):
                        frames = (self.topic.encode(), seq.to_bytes(8, "big"), payload)
                        self._replay.send_multipart((client, b"", *frames))
                self._replay.send_multipart((client, b"", b"", (-1).to_bytes(8, "big", signed=True), b""))
            with self._wake:
                if not self._queue:
                    self._wake.wait(0.02)
                if not self._queue:
                    continue
                payload = self._queue.popleft()
            if random.random() >= self.loss:
                self._pub.send_multipart((self.topic.encode(), number.to_bytes(8, "big"), payload))
            self._buffer.append((number, payload))
            number += 1
