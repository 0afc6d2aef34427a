"""Streams that are read at once, and when their parts came."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.dev.gateway_load.client import Connection, post


class TimedConnection(Connection):
    """Notes when each part of an answer arrived."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived_s: list[float] = []

    def data_received(self, data: bytes) -> None:
        self.arrived_s.append(time.perf_counter())
        super().data_received(data)


@dataclass(frozen=True, slots=True)
class Streams:
    """Measurements of clients whose streams ran at once."""

    elapsed_s: float
    num_events: int
    gaps_s: list[float]
    """Between two parts of one stream, but the first and the last."""
    client_cpu_s: float


async def run_streams(url: str, bodies: Sequence[bytes]) -> Streams:
    """Send all requests at once, each over a connection of its own, and read the answers to their ends."""
    connections = [await TimedConnection.open(url) for _ in bodies]
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    try:
        requests = (post(url, body) for body in bodies)
        await asyncio.gather(*(each.ask(request) for each, request in zip(connections, requests, strict=True)))
    finally:
        for connection in connections:
            connection.transport.close()
    elapsed_s, cpu_s = time.perf_counter() - begun_s, time.process_time() - cpu_s
    gaps = [
        after - before
        for each in connections
        for before, after in zip(each.arrived_s[1:-2], each.arrived_s[2:-1], strict=True)
    ]
    return Streams(elapsed_s, sum(each.num_events for each in connections), gaps, cpu_s)


class HopClient(asyncio.Protocol):
    """Sends a frame whenever the one before is back, `count` times."""

    def __init__(self, frame: bytes, count: int) -> None:
        self._frame = frame
        self._left = count
        self._num_bytes = 0
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport
        transport.write(self._frame)  # type: ignore[attr-defined]

    def data_received(self, data: bytes) -> None:
        self._num_bytes += len(data)
        if self._num_bytes < len(self._frame):
            return
        self._num_bytes, self._left = 0, self._left - 1
        if self._left:
            self._transport.write(self._frame)  # type: ignore[attr-defined]
        elif not self.done.done():
            self.done.set_result(None)
            self._transport.close()


async def run_hops(port: int, num_streams: int, num_frames: int, frame: bytes) -> None:
    """Send `num_frames` frames through the hop over each of `num_streams` connections."""
    loop = asyncio.get_running_loop()
    clients = [
        (await loop.create_connection(lambda: HopClient(frame, num_frames), "127.0.0.1", port))[1]
        for _ in range(num_streams)
    ]
    await asyncio.gather(*(client.done for client in clients))
