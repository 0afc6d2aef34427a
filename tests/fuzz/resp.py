"""A proxy before a real Redis that knows which command each reply is for, and what it can do to it.

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

IDLE: Final = "IDLE"
"""In place of a command: at once, whatever goes on."""

ERRORS: Final = [
    b"ERR server closing",
    b"ERR",
    b"",
    b"ERR unknown command 'EVALSHA_RO'",
    b"ERR max number of clients reached",
    b"ERR invalid password",
    b"ERR Client sent AUTH, but no password is set",
    b"ERR wrong number of arguments for 'auth' command",
    b"ERR Protocol error: invalid bulk length",
    b"ERR DISABLED You can't write against a non-volatile slave.",
    b"NOAUTH Authentication required.",
    b"WRONGPASS invalid username-password pair or user is disabled.",
    b"NOPERM this user has no permissions to run the 'evalsha_ro' command",
    b"NOSCRIPT No matching script. Please use EVAL.",
    b"LOADING Redis is loading the dataset in memory",
    b"BUSY Redis is busy running a script.",
    b"READONLY You can't write against a read only replica.",
    b"MASTERDOWN Link with MASTER is down",
    b"MISCONF Redis is configured to save RDB snapshots",
    b"OOM command not allowed when used memory > 'maxmemory'.",
    b"EXECABORT Transaction discarded because of previous errors.",
    b"WRONGTYPE Operation against a key holding the wrong kind of value",
    b"CLUSTERDOWN The cluster is down",
    b"CROSSSLOT Keys in request don't hash to the same slot",
    b"TRYAGAIN Multiple keys request during rehashing of slot",
    b"MOVED 3999 127.0.0.1:1",
    b"MOVED 3999 :1",
    b"MOVED 3999 [::1]:99999",
    b"MOVED 3999 a..b:1",
    b"MOVED x",
    b"MOVED",
    b"MOVED 1 2 3",
    b"MOVED 1 host:port",
    b"ASK 3999 127.0.0.1:1",
    b"ASK",
    b"UNBLOCKED \xff\xfe",
    b"\xff\xfe\xfd",
    b"x" * 70_000,
]

BROKEN: Final = [
    b"$-2\r\n",
    b"$-99999999999999999999\r\n",
    b"$abc\r\n",
    b"$\r\n",
    b"$99999999999\r\n",
    b"$2147483647\r\nx",
    b"$9223372036854775807\r\n",
    b"$9223372036854775808\r\n",
    b"$3\r\nabcdef\r\n",
    b"*-2\r\n",
    b"*abc\r\n",
    b"*\r\n",
    b"*100000\r\n",
    b"*4294967296\r\n:1\r\n",
    b"*9223372036854775807\r\n",
    b"*2\r\n:1\r\n",
    b"*1\r\n" * 9,
    b"*1\r\n" * 9 + b":1\r\n",
    b"*1\r\n" * 1000 + b":1\r\n",
    b"*1\r\n" * 50_000,
    b"*1\r\n" * 20_000 + b":1\r\n",
    b":abc\r\n",
    b":\r\n",
    b":99999999999999999999999\r\n",
    b":9223372036854775807\r\n",
    b":-9223372036854775808\r\n",
    b":1.5\r\n",
    b"?\r\n",
    b"\r\n",
    b"\n",
    b"\x00",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"OK",
    b"+OK",
    b"+",
]

RESP3: Final = [
    b">2\r\n+message\r\n+x\r\n",
    b">2\r\n$10\r\ninvalidate\r\n*1\r\n$1\r\nx\r\n",
    b">2\r\n$10\r\ninvalidate\r\n_\r\n",
    b">3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n",
    b">0\r\n",
    b">-1\r\n",
    b">4\r\n+MOVING\r\n:1\r\n:2\r\n+a:b\r\n",
    b">1\r\n+MIGRATING\r\n",
    b"%1\r\n+a\r\n:1\r\n",
    b"%1\r\n*0\r\n:1\r\n",
    b"%2\r\n+a\r\n",
    b"~2\r\n:1\r\n:1\r\n",
    b"~1\r\n*1\r\n:1\r\n",
    b"_\r\n",
    b"#t\r\n",
    b"#x\r\n",
    b",inf\r\n",
    b",nan\r\n",
    b",x\r\n",
    b"(" + b"9" * 400 + b"\r\n",
    b"(x\r\n",
    b"=15\r\ntxt:Some string\r\n",
    b"=2\r\nab\r\n",
    b"!5\r\nERR x\r\n",
    b"|1\r\n+a\r\n+b\r\n:1\r\n",
    b"$?\r\n;4\r\nabcd\r\n;0\r\n",
    b"*?\r\n:1\r\n.\r\n",
]


def pack(value: Any) -> bytes:
    """A reply: int, bytes, None, list, str (a status), or an Exception with an error's text."""
    if value is None:
        return b"$-1\r\n"
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, str):
        return b"+%b\r\n" % value.encode()
    if isinstance(value, list):
        return b"*%d\r\n" % len(value) + b"".join(pack(item) for item in value)
    return b"-%b\r\n" % value.args[0]


def unpack(data: bytes, start: int = 0) -> tuple[Any, int] | None:
    """The reply that begins there and where it ends; None while it is not complete."""
    line_end = data.find(b"\r\n", start)
    if line_end < 0:
        return None
    kind, line, at = data[start : start + 1], data[start + 1 : line_end], line_end + 2
    match kind:
        case b"+":
            return line.decode("latin-1"), at
        case b"-":
            return RuntimeError(line), at
        case b":":
            return int(line), at
        case b"$":
            size = int(line)
            if size < 0:
                return None, at
            return None if len(data) < at + size + 2 else (data[at : at + size], at + size + 2)
        case b"*":
            if int(line) < 0:
                return None, at
            items = []
            for _ in range(int(line)):
                if (part := unpack(data, at)) is None:
                    return None
                items.append(part[0])
                at = part[1]
            return items, at
    raise AssertionError(f"not RESP 2: {data[start : start + 40]!r}")


def random_value(rng: random.Random, depth: int = 0) -> Any:
    kind = rng.randrange(7 if depth < 3 else 5)
    match kind:
        case 0:
            return None
        case 1:
            return rng.choice([0, 1, -1, 2, 255, 2**31, 2**63 - 1, -(2**63), rng.randrange(10**13)])
        case 2:
            return rng.choice([b"", b"0", b"1", b"x", b"\xff\xfe", rng.randbytes(rng.randrange(40)), b"x" * 100_000])
        case 3:
            return rng.choice(["OK", "QUEUED", "PONG", ""])
        case 4:
            return RuntimeError(rng.choice(ERRORS))
        case _:
            return [random_value(rng, depth + 1) for _ in range(rng.choice([0, 1, 2, 2, 3, 4, 4, 5, 9]))]


def changed_value(rng: random.Random, value: Any) -> Any:
    """One node of it is another, gone, or there twice."""
    if isinstance(value, list) and value and rng.random() < 0.8:
        at = rng.randrange(len(value))
        roll = rng.random()
        if roll < 0.15:
            return value[:at] + value[at + 1 :]
        if roll < 0.3:
            return [*value[:at], value[at], *value[at:]]
        if roll < 0.35:
            return value[::-1]
        return [*value[:at], changed_value(rng, value[at]), *value[at + 1 :]]
    if isinstance(value, bytes) and value and rng.random() < 0.5:
        at = rng.randrange(len(value))
        return value[:at] + bytes([value[at] ^ 1 << rng.randrange(8)]) + value[at + 1 :]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-1, 1, 1000, 2**40])
    return random_value(rng)


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


def random_data(rng: random.Random) -> bytes:
    """Send it instead of a reply, or in addition."""
    roll = rng.random()
    if roll < 0.35:
        return pack(random_value(rng))
    if roll < 0.6:
        return b"-%b\r\n" % rng.choice(ERRORS)
    if roll < 0.75:
        return rng.choice(BROKEN)
    if roll < 0.9:
        return rng.choice(RESP3)
    return rng.choice([b"+OK\r\n", b"+OK\r\n", b"-ERR server closing\r\n", b"+OK\r\n" * 100])


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
        """Let the faults act that wait for nothing."""
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
