"""Requests that a reader of HTTP meets: what it reads, and what it refuses."""

from __future__ import annotations

import time
from contextlib import suppress

import pytest

from worker.common.http_reader import MAX_CHUNKS, MessageError, RequestHead, RequestReader, read_head


class Taken:
    """Keeps what a reader gives."""

    def __init__(self) -> None:
        self.heads: list[RequestHead] = []
        self.bodies: list[bytes] = []
        self.num_complete = 0

    def on_head(self, head: RequestHead) -> None:
        self.heads.append(head)
        self.bodies.append(b"")

    def on_body(self, body: bytes) -> None:
        self.bodies[-1] += body

    def on_message_complete(self) -> None:
        self.num_complete += 1


def read(data: bytes, size: int = 1 << 20) -> Taken:
    """Read all of `data`, in pieces of `size` bytes."""
    reader, taken = RequestReader(65536), Taken()
    for start in range(0, len(data), size):
        piece, position = data[start : start + size], 0
        while position < len(piece):
            position = reader.read(piece, position, taken)
    return taken


def head(*fields: bytes, line: bytes = b"POST / HTTP/1.1") -> bytes:
    return b"".join(part + b"\r\n" for part in (line, b"Host: h", *fields, b""))


@pytest.mark.parametrize("size", [1, 2, 3, 1000])
@pytest.mark.parametrize(
    "framing",
    [
        (b"Content-Length: 20000", b"x" * 20_000),
        (b"Transfer-Encoding: chunked", b"4e20\r\n" + b"x" * 20_000 + b"\r\n0\r\n\r\n"),
    ],
    ids=["length", "chunks"],
)
def test_pieces_of_a_body_may_be_small(framing: tuple[bytes, bytes], size: int) -> None:
    field, body = framing
    taken = read((b"\r\n" + head(field, b"Connection: Upgrade", b"Upgrade: h2c") + body) * 2, size)
    assert taken.bodies == [b"x" * 20_000] * 2
    assert taken.num_complete == 2


def test_trailers_are_dropped() -> None:
    data = head(b"Transfer-Encoding: chunked") + b"1;a=b\r\nx\r\n0\r\nContent-Length: 9\r\nAuthorization: k\r\n\r\n"
    taken = read(data + head())
    assert [dict(one.headers).get(b"authorization") for one in taken.heads] == [None, None]
    assert taken.num_complete == 2


@pytest.mark.parametrize(
    ("fields", "keeps"),
    [
        ((), True),
        ((b"Connection: close",), False),
        ((b"Connection: upgrade , Close",), False),
        ((b"Connection: keep-alive", b"CONNECTION:\tclose\t"), False),
        ((b"Connection: closed",), True),
        ((b"Proxy-Connection: close",), True),
    ],
)
def test_the_connection_ends_where_a_token_says_close(fields: tuple[bytes, ...], keeps: bool) -> None:
    assert read_head(head(*fields)).keep_alive == keeps
    old = read_head(head(*fields, line=b"GET / HTTP/1.0"))
    assert old.keep_alive == (keeps and b"keep-alive" in b"".join(fields).lower())


def test_the_host_of_an_absolute_target_replaces_the_field() -> None:
    read = read_head(head(line=b"GET HTTP://other:1?a=b HTTP/1.1"))
    assert (read.target, read.headers) == (b"/?a=b", [(b"host", b"other:1")])


@pytest.mark.parametrize("target", [b"h:80", b"/v1/completions", b"http://h/", b"*"])
def test_connect_is_refused(target: bytes) -> None:
    with pytest.raises(MessageError):
        read(head(b"Content-Length: 5", line=b"CONNECT %b HTTP/1.1" % target) + b"hello")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"\x16\x03\x01", 400),
        (b"GET / HTTP/1.1\n", 400),
        (b"GET / HTTP/1.1\r\nX: a\n b", 400),
        (b"GET / HTTP/1.1\r\nX: a\0", 400),
        (b"GET / HTTP/1.1\rX", 400),
        (b"GET /" + b"a" * 70_000, 431),
        (head(*[b"X: y"] * 101), 431),
        (head(b"Transfer-Encoding: chunked") + b"1" + b";a" * 600, 400),
        (head(b"Transfer-Encoding: chunked") + b"0\r\n" + b"X: y\r\n" * 20_000, 431),
        (head(b"Transfer-Encoding: chunked") + b"1\r\nx\r\n" * (MAX_CHUNKS + 1), 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 505),
    ],
)
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_what_cannot_become_a_request_is_refused(data: bytes, status: int, size: int) -> None:
    with pytest.raises(MessageError) as refusal:
        read(data, size)
    assert refusal.value.status == status


@pytest.mark.parametrize(
    "unit", [b"a", b":", b" ", b"a ", b"a: ", b";", b"[", b"/?", b"\r", b"a\r\n", b"a:\r\n", b"http://"]
)
@pytest.mark.parametrize(
    "start",
    [
        b"",
        b"GET ",
        b"GET /",
        b"GET http://",
        b"GET / HTTP/1.1\r\n",
        b"GET / HTTP/1.1\r\nHost:",
        b"GET / HTTP/1.1\r\nHost: h\r\nConnection:",
        b"GET / HTTP/1.1\r\nHost: h\r\nContent-Length:",
        b"GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n1",
        b"GET / HTTP/1.1\r\nHost: h\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
    ],
)
def test_no_input_takes_more_than_linear_time(start: bytes, unit: bytes) -> None:
    """A quadratic search takes minutes here."""
    before_s = time.process_time()
    with suppress(MessageError):
        read(start + unit * (60_000 // len(unit)) + b"\r\n\r\n")
    assert time.process_time() - before_s < 5
