"""Pipelines of requests, valid and broken, with what a strict server has to read in them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

HOST: Final = b"Host: h"
METHODS: Final = b"GET POST PUT DELETE OPTIONS PATCH TRACE PRI SOURCE PURGE M-SEARCH SETUP PLAY ANNOUNCE get".split()
PROTOCOLS: Final = (
    b"h2c",
    b"websocket",
    b"TLS/1.0",
    b"foo/3",
    b"HTTP/2.0, h2c",
    b"",
)
UPGRADES: Final = (b"Upgrade", b"upgrade", b"UPGRADE", b"uPgRaDe")
TOKENS: Final = (
    b"Upgrade",
    b"upgrade",
    b"Upgrade, HTTP2-Settings",
    b"keep-alive, Upgrade",
    b"keep-alive",
    b"TE",
    b"upgrade\t,\tkeep-alive",
    b"Content-Length, Upgrade",
    b"Transfer-Encoding",
    b"",
)
NOISE: Final = (
    b"HTTP2-Settings: AAMAAABkAAQBAAAAAAIAAAAA",
    b"Proxy-Connection: close",
    b"Proxy-Connection: Upgrade",
    b"Keep-Alive: timeout=5, max=1",
    b"TE: trailers, chunked",
    b"Trailer: Content-Length",
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
    b"Sec-WebSocket-Version: 13",
    b"X-HTTP-Method-Override: CONNECT",
    b"X-Content-Length: 0",
    b"Content-Type: application/json",
    b"Transport: RTP",
    b"Content-Encoding: chunked",
    b"Max-Forwards: 0",
    b"X-Obs: \xe9\xff",
    b"X-Empty:",
)
SMUGGLED: Final = (
    b"GET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n",
    b"POST /smuggled HTTP/1.1\r\nHost: h\r\nContent-Length: 3\r\n\r\nabc",
    b"0\r\n\r\nGET /smuggled HTTP/1.1\r\nHost: h\r\n\r\n",
    b"\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"CONNECT /smuggled HTTP/1.1\r\nHost: h\r\n\r\n",
    b"x",
    b"",
)
TRAILERS: Final = (
    b"X-Sum: 1\r\n",
    b"Content-Length: 40\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Upgrade: h2c\r\n",
    b"Connection: close\r\n",
    b"Host: other\r\n",
)
EXTENSIONS: Final = (b"", b"", b"", b";a", b";a=b", b' ;a="b"', b";a=b;c=d")

TARGETS_OF_CONNECT: Final = (b"h:80", b"/c", b"http://h/c", b"*", b"h", b"/v1/completions")
BROKEN_LINES: Final = (
    b"GET / HTTP/2.0",
    b"GET / HTTP/1.2",
    b"GET / HTTP/0.9",
    b"GET / HTTP/9.9",
    b"GET /",
    b"GET",
    b"PRI * HTTP/2.0",
    b"GET  / HTTP/1.1",
    b"GET / HTTP/1.1 ",
    b"GET /\t HTTP/1.1",
    b"GET / http/1.1",
    b"GET /a#b HTTP/1.1",
    b"GET a HTTP/1.1",
    b"GET ftp://h/ HTTP/1.1",
    b"GET http://u@h/ HTTP/1.1",
    b"G(T / HTTP/1.1",
    b"GET /\xe9 HTTP/1.1",
    b"GET / ICE/1.0",
    b"OPTIONS * RTSP/1.0",
    b" GET / HTTP/1.1",
)
BROKEN_FIELDS: Final = (
    b"Content-Length: 1\r\nContent-Length: 1",
    b"Content-Length: +1",
    b"Content-Length: -1",
    b"Content-Length: 1 1",
    b"Content-Length: 1, 1",
    b"Content-Length: 0x1",
    b"Content-Length:",
    b"Content-Length: " + b"9" * 30,
    b"Content-Length : 1",
    b"Content-Length: 1\r\n 1",
    b"Transfer-Encoding: chunked\r\nContent-Length: 5",
    b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    b"Transfer-Encoding: identity",
    b"Transfer-Encoding: chunked\t",
    b"Transfer-Encoding: chunked \t ",
    b"Content-Length: 5\t",
    b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: chunked, identity",
    b"Transfer-Encoding: xchunked",
    b"Transfer-Encoding:",
    b"Transfer-Encoding\t: chunked",
    b"Transfer-Encoding: \x0bchunked",
    b"Host: other",
    b"Upgrade: h2c\r\n websocket",
    b"Connection: Upgrade\r\n\tclose",
    b"X: a\0b",
    b"X: a\rb",
    b"X: a\nb",
    b"X: a\nContent-Length: 5",
    b"X: a\x7f",
    b"X y: z",
    b": z",
    b"no colon",
    b"\xe9: z",
    b"Expect: 100-continue\r\nExpect: 100-continue",
    b"\r\n".join([b"X: y"] * 101),
)
BROKEN_CHUNKS: Final = (
    b"zz\r\n",
    b"-1\r\n",
    b"+1\r\nx\r\n",
    b"0x1\r\nx\r\n",
    b"1 \r\nx\r\n",
    b"1\nx\r\n",
    b"1\r\nxx\r\n",
    b"1\r\nx\n0\r\n\r\n",
    b"1;a\nb\r\nx\r\n",
    b"1;a\rb\r\nx\r\n",
    b"f" * 17 + b"\r\n",
    b"0" * 40 + b"1\r\nx\r\n",
    b"\r\n1\r\n",
    b"0\r\nno colon\r\n\r\n",
    b"0\r\n a: b\r\n\r\n",
    b"0\r\na: b\n\r\n",
)


@dataclass(frozen=True)
class Read:
    """A request as an app sees it."""

    method: str
    target: str
    body: bytes


@dataclass(frozen=True)
class Pipeline:
    pieces: list[bytes]
    expected: list[Read]
    is_refused: bool
    """Behind the expected ones comes one answer that refuses."""
    is_closed: bool
    """The server closes the connection without being asked to by a fault."""


def pipeline(rng: random.Random) -> Pipeline:
    """Return a pipeline. Bytes behind a fault or a close are there, and must not be read."""
    data, expected, is_refused, is_closed = b"", [], False, False
    for number in range(rng.randint(1, 4)):
        data += b"\r\n" * rng.choice((0, 0, 0, 1, 3))
        kind = rng.random()
        if kind < 0.12:
            data += _broken(rng, number)
            is_refused = not is_closed
        else:
            raw, read, closes = _valid(rng, number)
            data += raw
            if not is_closed:
                expected.append(read)
            is_closed = is_closed or closes
        if is_refused or is_closed:
            data += rng.choice(SMUGGLED[:3])
            break
    return Pipeline(pieces(data, rng), expected, is_refused, is_closed)


def pieces(data: bytes, rng: random.Random) -> list[bytes]:
    """Cut at every place, or at some."""
    size = rng.choice((0, 0, 1, 2, 7, 40)) if len(data) < 10_000 else 0
    if not size:
        cuts = sorted({0, len(data), *(rng.randrange(len(data)) for _ in range(rng.randint(0, 4)))})
        return [data[start:end] for start, end in pairwise(cuts)]
    return [data[start : start + size] for start in range(0, len(data), size)]


def _valid(rng: random.Random, number: int) -> tuple[bytes, Read, bool]:
    method = rng.choice((b"POST", b"POST", b"GET", rng.choice(METHODS)))
    is_old = rng.random() < 0.1
    body = b"".join(rng.choice(SMUGGLED) for _ in range(rng.randint(0, 3)))
    path = target = b"/r%d?x=%%41" % number
    if rng.random() < 0.1:
        target = b"http://h:80" + path
    fields = [HOST, *rng.sample(NOISE, rng.randint(0, 4))]
    tokens = [rng.choice(TOKENS) for _ in range(rng.choice((0, 1, 1, 2)))]
    if closes := rng.random() < 0.1:
        tokens.append(rng.choice((b"close", b"Close , Upgrade", b"upgrade,close")))
    elif is_old:
        closes = not any(b"keep-alive" in token for token in tokens)
    fields += [b"Connection:" + _space(rng) + token + _space(rng) for token in tokens]
    fields += [
        rng.choice(UPGRADES) + b":" + _space(rng) + rng.choice(PROTOCOLS) for _ in range(rng.choice((0, 1, 1, 2)))
    ]
    if rng.random() < 0.15:
        fields.append(b"Expect: " + rng.choice((b"100-continue", b"100-Continue", b"200-ok")))
    wire = body
    if not is_old and rng.random() < 0.5:
        fields.append(b"Transfer-Encoding:" + _space(rng) + rng.choice((b"chunked", b"Chunked")))
        wire = chunked(body, rng)
    elif body or rng.random() < 0.5:
        fields.append(rng.choice((b"Content-Length", b"content-length")) + b":" + _space(rng) + b"%d" % len(body))
    rng.shuffle(fields)
    version = b"1.0" if is_old else b"1.1"
    head = b"%b %b HTTP/%b\r\n%b\r\n\r\n" % (method, target, version, b"\r\n".join(fields))
    return head + wire, Read(method.decode(), path.decode(), body), closes


def chunked(body: bytes, rng: random.Random) -> bytes:
    data = b""
    while body:
        size = rng.randint(1, len(body))
        data += b"%b%b\r\n%b\r\n" % (rng.choice((b"%x", b"0%X")) % size, rng.choice(EXTENSIONS), body[:size])
        body = body[size:]
    trailers = b"".join(rng.choice(TRAILERS) for _ in range(rng.choice((0, 0, 1, 2))))
    return data + b"0%b\r\n%b\r\n" % (rng.choice(EXTENSIONS), trailers)


def _broken(rng: random.Random, number: int) -> bytes:
    body = rng.choice(SMUGGLED[:3])
    fields = b"Host: h\r\nContent-Length: %d" % len(body)
    if rng.random() < 0.5:
        fields += b"\r\nConnection: Upgrade\r\nUpgrade: " + rng.choice(PROTOCOLS)
    kind = rng.randrange(5)
    if kind == 0:
        return b"CONNECT %b HTTP/1.1\r\n%b\r\n\r\n%b" % (rng.choice(TARGETS_OF_CONNECT), fields, body)
    if kind == 1:
        return b"%b\r\n%b\r\n\r\n%b" % (rng.choice(BROKEN_LINES), fields, body)
    if kind == 2:
        return b"POST /b%d HTTP/1.1\r\nHost: h\r\n%b\r\n\r\n%b" % (number, rng.choice(BROKEN_FIELDS), body)
    if kind == 3:
        head = b"POST /b%d HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n" % number
        return head + b"1\r\nx\r\n" * rng.randint(0, 1) + rng.choice(BROKEN_CHUNKS) + body
    return rng.choice(
        (
            b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n" + body,
            b"POST / HTTP/1.1\r\nHost: a@b\r\nContent-Length: 5\r\n\r\n" + body,
            b"POST / HTTP/1.1\r\nHost: x/health/live?a=\r\nContent-Length: 5\r\n\r\n" + body,
            b"POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + body,
            b"POST / HTTP/1.1\nHost: h\n\n" + body,
            b"GET / HTTP/1.1\r\nHost: h\r\nX: " + b"x" * 70_000 + b"\r\n\r\n" + body,
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n" + body,
            b"\n" + body,
        )
    )


def _space(rng: random.Random) -> bytes:
    return rng.choice((b" ", b" ", b"", b"\t", b"  \t"))


def mutated(data: bytes, rng: random.Random) -> bytes:
    """Change some bytes."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 3)):
        place = rng.randrange(len(changed))
        change = rng.choice((b"", b"\r", b"\n", b"\r\n", b" ", b":", b"\0", b"0", b"1", b",", b"\t", b";", b"\x0b"))
        changed[place : place + rng.randint(0, 2)] = change
    return bytes(changed) or b"\r\n"
