"""A TCP proxy that misbehaves on command: delays, stalls, black-holes, cuts and resets connections, or answers itself.

It runs in a thread with its own event loop, so that a busy test does not slow the connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

from tests.garbage import changed_bytes
from tests.waiting import HANG_S

CHUNK_BYTES: Final = 64 * 1024
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Fault:
    """Faults of bytes on their way. Directions: up is to the server, down is to the client."""

    delay_s: float = 0.0
    """Delay of each chunk, in both directions."""
    hole_up: bool = False
    hole_down: bool = False
    """Bytes vanish and the connection stays open."""
    refuse: bool = False
    """New connections are reset."""
    reset_after_bytes: int | None = None
    """Reset each connection after this number of bytes down."""
    spoil: float = 0.0
    """The share of chunks down that are changed: flipped, cut, repeated, or with others put in."""
    reply: bytes | None = None
    """The server is never asked: every chunk up gets this answer."""


NO_FAULT: Final = Fault()


class FaultProxy:
    """Listens on a port of its own and passes everything on to `target`, a port or a unix socket."""

    def __init__(self, target: int | Path, *, seed: int = 0) -> None:
        self.target = target
        self.fault = NO_FAULT
        self.num_connections = 0
        """Ever accepted."""
        self.num_spoiled = 0
        """Chunks that were changed."""
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
        self.port: int = listener.getsockname()[1]
        self._thread = threading.Thread(target=self._run, args=(listener,), name=f"proxy-{self.port}", daemon=True)
        self._thread.start()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def set(self, **fault: Any) -> None:
        """Set the fault to `Fault(**fault)`, for open connections too."""
        self.fault = replace(NO_FAULT, **fault)

    def heal(self) -> None:
        """No fault any more. Bytes that vanished stay so: open connections that lost some are reset."""
        was, self.fault = self.fault, NO_FAULT
        if was.hole_up or was.hole_down or was.spoil or was.reply is not None:
            self.reset_all()

    def reset_all(self) -> int:
        """RST on every open connection, both ways; how many there were."""
        return self._on_loop(self._reset_all)

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(HANG_S)

    def _on_loop(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(HANG_S)

    def _run(self, listener: socket.socket) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, sock=listener))
        try:
            self._loop.run_forever()
        finally:
            server.close()
            tasks, writers = asyncio.all_tasks(self._loop), list(self._writers)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            for writer in writers:
                writer.transport.abort()
            self._loop.run_until_complete(asyncio.sleep(0))
            self._loop.close()

    def _reset_all(self) -> int:
        for writer in self._writers:
            _reset(writer)
        return len(self._writers)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        if self.fault.refuse:
            _reset(writer)
            return
        try:
            if isinstance(self.target, Path):
                server_reader, server_writer = await asyncio.open_unix_connection(self.target)
            else:
                server_reader, server_writer = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            _reset(writer)
            return
        self._writers |= {writer, server_writer}
        up = asyncio.create_task(self._carry(reader, server_writer, writer))
        down = asyncio.create_task(self._carry(server_reader, writer, None))
        try:
            await asyncio.wait((up, down), return_when=asyncio.FIRST_COMPLETED)
            broken = any(task.done() and task.exception() is not None for task in (up, down))
            for each in (writer, server_writer):
                if broken:
                    _reset(each)
                else:
                    each.close()
        finally:
            for task in (up, down):
                task.cancel()
            await asyncio.gather(up, down, return_exceptions=True)
            self._writers -= {writer, server_writer}

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: asyncio.StreamWriter | None
    ) -> None:
        """Until the sender ends. `client`, on the way up only: where the proxy's own answers go."""
        num_bytes = 0
        while data := await reader.read(CHUNK_BYTES):
            fault = self.fault
            if fault.delay_s:
                await asyncio.sleep(fault.delay_s)
                fault = self.fault
            if client is not None and fault.reply is not None:
                client.write(fault.reply)
                continue
            if fault.hole_up if client is not None else fault.hole_down:
                continue
            num_bytes += len(data)
            if client is None and fault.reset_after_bytes is not None and num_bytes > fault.reset_after_bytes:
                raise ConnectionResetError("cut by the fault")
            if client is None and self._random.random() < fault.spoil:
                data = changed_bytes(self._random, data)
                self.num_spoiled += 1
            writer.write(data)
            await writer.drain()


def _reset(writer: asyncio.StreamWriter) -> None:
    """RST, not FIN."""
    sock = writer.get_extra_info("socket")
    if sock is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
