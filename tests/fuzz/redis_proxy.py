"""A proxy before a real Redis that pairs each reply with its command, and injects faults into replies.

client --commands--> proxy --commands--> Redis           client <--replies, as `Fault`s have it-- proxy <-- Redis
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from tests.fuzz.resp import changed_value, pack, random_data, unpack

IDLE: Final = "IDLE"
"""Stands for a command: the fault acts at once, whatever goes on."""
ACTS: Final = (
    "replace",
    "change",
    "before",
    "after",
    "double",
    "drop",
    "swap",
    "cut",
    "half",
    "delay",
    "bytes",
    "flip",
)


@dataclass
class Fault:
    """Spoil the next `times` replies to `command`."""

    command: str
    """Or "*", any; or IDLE."""
    act: str
    data: bytes = b""
    times: int = 1
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.times} x {self.command}: {self.act} {self.data!r:.200}"


def random_fault(rng: random.Random) -> Fault:
    """Spoil the next reply, whatever it is."""
    return Fault("*", rng.choice(ACTS), random_data(rng), rng.choice([1, 1, 2, 20]), rng.randrange(2**32))


class Proxy:
    """Listens on a unix socket, or on a TCP port. The first of `faults` that fits a reply acts on it."""

    def __init__(self, server: Path, path: Path | None = None) -> None:
        """`server`: the socket of Redis. `path`: of the own one; None: a port of 127.0.0.1."""
        self.path = path
        self.port = 0
        self._server = server
        self.faults: list[Fault] = []
        self.hit: Counter[str] = Counter()
        """Commands whose reply a fault has touched."""
        self.connections: set[Connection] = set()

    @asynccontextmanager
    async def listening(self) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()

        def connection() -> Connection:
            return Connection(self, str(self._server))

        if self.path is not None:
            server = await loop.create_unix_server(connection, str(self.path))
        else:
            server = await loop.create_server(connection, "127.0.0.1", 0)
            self.port = server.sockets[0].getsockname()[1]
        try:
            yield
        finally:
            server.close()
            self.cut()
            await asyncio.sleep(0)
            if self.path is not None:
                self.path.unlink(missing_ok=True)

    def cut(self) -> None:
        for connection in list(self.connections):
            connection.close()

    def act_idle(self) -> None:
        """Apply the faults that wait for no command."""
        for fault in [fault for fault in self.faults if fault.command == IDLE]:
            self.faults.remove(fault)
            for connection in list(self.connections):
                self.hit[IDLE] += 1
                connection.suffer(fault, b"")

    def fault_of(self, command: str) -> Fault | None:
        for fault in self.faults:
            if fault.command in ("*", command):
                fault.times -= 1
                if fault.times <= 0:
                    self.faults.remove(fault)
                self.hit[command] += 1
                return fault
        return None


class Connection(asyncio.Protocol):
    """One client's connection, with its own to the server."""

    def __init__(self, proxy: Proxy, server: str) -> None:
        self._proxy = proxy
        self._server = server
        self._client: asyncio.Transport | None = None
        self._upstream: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._commands = b""
        self._replies = b""
        self._expected: deque[str] = deque()
        self._kept = b""
        """A reply that comes after the next one."""
        self._queue: list[bytes] | None = None
        """Send what waits behind a delayed reply."""
        self._opening: asyncio.Task[Any] | None = None
        self._silent = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._client = cast(asyncio.Transport, transport)
        self._proxy.connections.add(self)
        self._opening = asyncio.create_task(self._open())

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            transport, _ = await loop.create_unix_connection(lambda: _Upstream(self), self._server)
        except OSError:
            self.close()
            return
        if self._client is None:
            transport.close()
            return
        self._upstream = cast(asyncio.Transport, transport)
        self._upstream.write(b"".join(self._early))

    def data_received(self, data: bytes) -> None:
        self._commands += data
        at = 0
        while (part := unpack(self._commands, at)) is not None:
            words, at = part
            self._expected.append(words[0].decode().upper())
        self._commands = self._commands[at:]
        if self._upstream is None:
            self._early.append(data)
        else:
            self._upstream.write(data)

    def replied(self, data: bytes) -> None:
        self._replies += data
        at = 0
        while self._client is not None and (part := unpack(self._replies, at)) is not None:
            reply, at = self._replies[at : part[1]], part[1]
            command = self._expected.popleft()
            fault = self._proxy.fault_of(command)
            if fault is None:
                self._pass(reply)
            else:
                self.suffer(fault, reply)
        self._replies = self._replies[at:]

    def suffer(self, fault: Fault, reply: bytes) -> None:
        rng = random.Random(fault.seed)
        fault.seed += 1
        match fault.act:
            case "replace":
                self._pass(fault.data)
            case "change":
                self._pass(pack(changed_value(rng, unpack(reply)[0])) if reply else fault.data)  # type: ignore[index]
            case "before":
                self._pass(fault.data + reply)
            case "after":
                self._pass(reply + fault.data)
            case "double":
                self._pass(reply + reply)
            case "drop":
                pass
            case "swap":
                self._kept += reply
                return
            case "cut":
                self._pass(reply[: rng.randrange(len(reply) + 1)])
                self.close()
            case "half":
                self._pass(reply[: rng.randrange(len(reply) + 1)])
                self._silent = True
            case "delay":
                if self._queue is None:
                    self._queue = []
                    asyncio.get_running_loop().call_later(rng.choice([0.01, 0.05, 0.3]), self._release)
                self._pass(reply)
            case "bytes":
                for n in range(len(reply)):
                    self._pass(reply[n : n + 1])
            case "flip":
                changed = bytearray(reply or b"x")
                changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
                self._pass(bytes(changed))
            case act:
                raise AssertionError(act)

    def _pass(self, data: bytes) -> None:
        kept, self._kept = self._kept, b""
        if self._client is None or self._silent or not (data or kept):
            return
        if self._queue is not None:
            self._queue.append(data + kept)
        else:
            self._client.write(data + kept)

    def _release(self) -> None:
        queue, self._queue = self._queue, None
        self._pass(b"".join(queue or ()))

    def connection_lost(self, error: Exception | None) -> None:
        self._client = None
        self.close()

    def close(self) -> None:
        self._proxy.connections.discard(self)
        for transport in (self._client, self._upstream):
            if transport is not None:
                transport.close()
        self._client = self._upstream = None


class _Upstream(asyncio.Protocol):
    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def data_received(self, data: bytes) -> None:
        self._connection.replied(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._connection.close()
