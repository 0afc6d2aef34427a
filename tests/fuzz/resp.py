"""RESP 2: packing and unpacking replies, random ones, and bytes that are none."""

from __future__ import annotations

import random
from typing import Any, Final

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
