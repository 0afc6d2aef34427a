"""A gateway under attack: watch its health and memory, and send hand-written bytes."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final

import psutil

from tests.stopwatch import Stopwatch
from tests.waiting import HANG_S

HEALTH: Final = b"GET /health/live HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n"
WATCH_INTERVAL_S: Final = 0.05


@dataclass
class Watched:
    """Observations during a siege."""

    latencies_s: list[float] = field(default_factory=list)
    most_bytes: int = 0
    before_bytes: int = 0
    statuses: set[int | str] = field(default_factory=set)

    @property
    def grown_bytes(self) -> int:
        return self.most_bytes - self.before_bytes


@contextlib.contextmanager
def watched(port: int, process: psutil.Process) -> Iterator[Watched]:
    """Poll health 20 times a second on separate connections, and measure memory, while the body runs.

    A thread does it: delays of the attackers' event loop are not the gateway's fault. Nor is a busy machine.
    """
    seen = Watched(before_bytes=process.memory_info().rss)
    stopwatch = Stopwatch(lambda: [process.pid])
    stop = threading.Event()

    def watch() -> None:
        stopped = False
        while not stopped:  # once after the body, too
            stopped = stop.wait(WATCH_INTERVAL_S)
            began_s = stopwatch.own_s()
            try:
                seen.statuses.add(health(port))
            except OSError as error:
                seen.statuses.add(str(error))
            seen.latencies_s.append(stopwatch.own_s() - began_s)
            seen.most_bytes = max(seen.most_bytes, process.memory_info().rss)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()


def health(port: int) -> int:
    """The status of GET /health/live. Raises OSError."""
    with socket.create_connection(("127.0.0.1", port), HANG_S) as client:
        client.sendall(HEALTH)
        return int(client.recv(4096).split(b" ", 2)[1])


async def ask_raw(port: int, request: bytes, timeout_s: float = HANG_S) -> tuple[int, bytes]:
    """Status (0: cut off) and all bytes of the answer; what cannot be sent any more is not."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    data = b""
    try:
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(ConnectionError):
                writer.write(request)
                await writer.drain()
            with contextlib.suppress(ConnectionError):
                data = await reader.read()
    finally:
        writer.close()
    return (int(data.split(b" ", 2)[1]) if data.startswith(b"HTTP/") else 0), data


async def trickle(port: int, start: bytes, interval_s: float, timeout_s: float = HANG_S) -> None:
    """One byte at a time until the other side ends it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        async with asyncio.timeout(timeout_s):
            with contextlib.suppress(ConnectionError):
                writer.write(start)
                while not reader.at_eof():
                    writer.write(b"x")
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(reader.read(4096), interval_s)
    finally:
        writer.close()
