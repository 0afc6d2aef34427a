"""The publishing side of an engine, as vLLM and SGLang have it: numbered batches, and a replay of the latest."""

from __future__ import annotations

import threading
from collections import deque
from types import TracebackType
from typing import Any, Final, Self

import msgpack
import zmq

from worker.adapter.api import EventSource
from worker.adapter.subscriber import engine_binds

END: Final = (-1).to_bytes(8, "big", signed=True)


class FakePublisher:
    """Publishes from the caller's thread, and answers replays from its own. Owns its sockets."""

    def __init__(
        self,
        endpoint: str,
        replay_endpoint: str | None = None,
        topic: str = "kv",
        *,
        num_buffered: int = 10_000,
        replays_topic: bool = True,
        answers: bool = True,
        begin_ts: float = 1000.0,
        drops_every: int = 0,
    ) -> None:
        """`replays_topic`: vLLM since 0.26 has the topic in its answers, others do not. Each batch's ts is 1 more.

        `drops_every`: of each long answer, every n-th batch is lost, as vLLM does when it is read late.
        """
        self.answers = answers
        self._drops_every = drops_every
        self.num_questions = 0
        self.ts = begin_ts
        self._topic = topic.encode()
        self._replays_topic = replays_topic
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=num_buffered)
        self._number = 0
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.XPUB)
        self._subscribed = False
        if engine_binds(EventSource(endpoint, None)):
            self._pub.bind(endpoint)
        else:
            self._pub.connect(endpoint)
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        if replay_endpoint is not None:
            router = self._context.socket(zmq.ROUTER)
            router.bind(replay_endpoint)
            self._thread = threading.Thread(target=self._serve_replays, args=(router,))
            self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        self._closing.set()
        if self._thread is not None:
            self._thread.join()  # which closes its socket
        self._context.destroy(linger=0)

    def is_subscribed(self) -> bool:
        """Return whether the reader's subscription has arrived. After that no batch is lost by itself."""
        while self._pub.poll(0):
            self._subscribed = self._pub.recv()[:1] == b"\x01"
        return self._subscribed

    def publish(self, *events: Any, lost: bool = False, payload: bytes | None = None) -> int:
        """Send a batch, and return its number. `lost`: only a replay has it."""
        number, self._number = self._number, self._number + 1
        self.ts += 1
        packed = msgpack.packb([self.ts, list(events), 0]) if payload is None else payload
        self._buffer.append((number, packed))
        if not lost:
            self.send(self._topic, number.to_bytes(8, "big"), packed)
        return number

    def send(self, *frames: bytes) -> None:
        self._pub.send_multipart(frames)

    def _serve_replays(self, router: zmq.Socket[bytes]) -> None:
        topic = [self._topic] if self._replays_topic else []
        with router:
            while not self._closing.is_set():
                if not router.poll(5):
                    continue
                identity, _, first = router.recv_multipart()
                self.num_questions += 1
                if not self.answers:
                    continue
                asked = [entry for entry in list(self._buffer) if entry[0] >= int.from_bytes(first, "big")]
                for place, (number, payload) in enumerate(asked):
                    if not self._drops_every or (place + 1) % self._drops_every:
                        router.send_multipart([identity, b"", *topic, number.to_bytes(8, "big"), payload])
                router.send_multipart([identity, b"", *([b""] if topic else []), END, b""])
