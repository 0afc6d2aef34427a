"""The one reader of HTTP/1.1 requests: it decides where a message ends, on every port.

It acts on the fields that it names, and refuses a message that two readers may read in two ways. It ignores Upgrade, as
a server may: no other protocol follows a head, only the body of the length that the head declares.

Source: RFC 9112, 2 to 7; RFC 9110, 7.8.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final, Literal, NamedTuple, Protocol

MAX_FIELDS: Final = 100  # a browser sends 20
MAX_CHUNKS: Final = 4096  # a body may have this many small ones
MIN_CHUNK_BYTES: Final = 16
"""Beyond MAX_CHUNKS, the chunks of a body have to be this large on average: a chunk costs more than its byte."""
_MAX_LINE_BYTES: Final = 1024
"""A line with the size of a chunk."""
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_TEXT: Final = rb"[\t -~\x80-\xff]"
_EMPTY_LINES: Final = re.compile(rb"(?:\r\n)*")
_LINE: Final = re.compile(rb"(%b{1,32}) ([!-~]++)(?: HTTP/([0-9]\.[0-9]))?\r\n" % _TOKEN)
_FIELD: Final = re.compile(rb"(%b++):[ \t]*+(%b*+)\r\n|(?s:.+)" % (_TOKEN, _TEXT))
"""A field. A line that is none matches with all that follows: searching on for the next field is quadratic."""
_SIZE: Final = rb"([0-9A-Fa-f]{1,15})(?:[ \t]{0,9};%b{0,990})?\r\n" % _TEXT
_CHUNK: Final = re.compile(_SIZE)
_NEXT_CHUNK: Final = re.compile(rb"\r\n" + _SIZE)
_BROKEN: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r[^\n]|(?<!\r)\n")
"""Bytes that no head, line or trailer has."""
_ONCE: Final = (b"host", b"content-length", b"transfer-encoding", b"expect")
_HOST: Final = re.compile(rb"[A-Za-z0-9._-]{1,255}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE)
_MAX_LENGTH_DIGITS: Final = 18  # below 2^63


class MessageError(Exception):
    """Raised where a message has to be refused with `status`; what follows it cannot be read."""

    def __init__(self, status: int = 400) -> None:
        super().__init__(status)
        self.status = status


class RequestHead(NamedTuple):
    """The checked parts of a head."""

    method: str
    target: bytes
    """In origin form, or `*`."""
    version: str
    headers: list[tuple[bytes, bytes]]
    """With names in lower case. The host of a target in absolute form replaces the field's (RFC 9112, 3.2.2)."""
    length: int | None
    """The body's length; None: it is chunked."""
    keep_alive: bool
    expects_continue: bool


class Receiver(Protocol):
    """Takes the parts of each request in order."""

    def on_head(self, head: RequestHead) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_message_complete(self) -> None: ...


def read_head(data: bytes) -> RequestHead:
    """Return the parts of a whole head. Raises MessageError."""
    line = _LINE.match(data)
    if line is None:
        raise MessageError
    method, target, version = line.groups()
    is_http11 = version == b"1.1"
    if not (is_http11 or version == b"1.0"):
        raise MessageError(505)
    # A tab stays at the end of a value: llhttp takes `chunked` and a tab for another coding.
    headers = [(name.lower(), value.rstrip(b" ")) for name, value in _FIELD.findall(data, line.end(), len(data) - 2)]
    fields = dict(headers)
    connection = fields.get(b"connection")
    if b"" in fields:
        raise MessageError
    if len(headers) > MAX_FIELDS:
        raise MessageError(431)
    if len(fields) < len(headers):
        names = [name for name, _ in headers]
        if any(names.count(name) > 1 for name in _ONCE):
            raise MessageError
        connection = b",".join(value for name, value in headers if name == b"connection")
    host = fields.get(b"host")
    # HTTP/1.1 requires a host. No port is a proxy, so CONNECT has no meaning, and no target has a fragment.
    if (is_http11 if host is None else _HOST.fullmatch(host) is None) or method == b"CONNECT" or b"#" in target:
        raise MessageError
    if absolute := not target.startswith(b"/") and _ABSOLUTE.fullmatch(target):
        authority, rest = absolute.groups()
        if _HOST.fullmatch(authority) is None:
            raise MessageError
        target = rest if rest.startswith(b"/") else b"/" + rest
        headers = [*(header for header in headers if header[0] != b"host"), (b"host", authority)]
    elif not target.startswith(b"/") and target != b"*":
        raise MessageError
    tokens = [token.strip() for token in connection.lower().split(b",")] if connection else ()
    keep_alive = b"close" not in tokens and (is_http11 or b"keep-alive" in tokens)
    expects_continue = is_http11 and fields.get(b"expect", b"").lower() == b"100-continue"
    length = _body_length(fields, is_http11)
    return RequestHead(method.decode(), target, version.decode(), headers, length, keep_alive, expects_continue)


def _body_length(fields: Mapping[bytes, bytes], is_http11: bool) -> int | None:
    length, coding = fields.get(b"content-length"), fields.get(b"transfer-encoding")
    if coding is not None:
        if length is not None or not is_http11 or coding.lower() != b"chunked":
            raise MessageError
        return None
    if length is None:
        return 0
    if not length.isdigit() or len(length) > _MAX_LENGTH_DIGITS:
        raise MessageError
    return int(length)


class RequestReader:
    """Cuts the bytes of a connection into requests. Owned by the connection.

    It keeps an incomplete head or line, and nothing of a body.
    """

    __slots__ = ("_held", "_left", "_line", "_max_head_bytes", "_num_bytes", "_num_chunks", "phase")

    def __init__(self, max_head_bytes: int) -> None:
        self.phase: Literal["idle", "head", "body"] = "idle"
        self._max_head_bytes = max_head_bytes
        """The most bytes of a head, and of the trailers."""
        self._held = bytearray()
        self._left = 0
        """Bytes up to the end of the body, or of its chunk."""
        self._line: Literal["", "size", "end", "trailer"] = ""
        """The next line of a chunked body; "": the body is not chunked."""
        self._num_bytes = self._num_chunks = 0
        """Bytes in the chunks so far; after the last chunk, bytes of the trailers."""

    def read(self, data: bytes | bytearray, start: int, receiver: Receiver) -> int:
        """Read on from `start`, at most to the end of one request. Return where it stopped. Raises MessageError."""
        if self.phase != "body":
            start = self._read_head(data, start, receiver)
        if self.phase != "body":
            return start
        parts: list[bytes] = []
        while (self._left or self._line) and start < len(data):
            if self._left:
                part = bytes(data[start : start + self._left])
                parts.append(part)
                self._left -= len(part)
                start += len(part)
            else:
                start = self._read_line(data, start)
        if parts:
            receiver.on_body(parts[0] if len(parts) == 1 else b"".join(parts))
        if not (self._left or self._line):
            self.phase = "idle"
            receiver.on_message_complete()
        return start

    def _read_head(self, data: bytes | bytearray, start: int, receiver: Receiver) -> int:
        self.phase = "head"
        # Empty lines before a head are skipped (RFC 9112, 2.2). The first `if`: one was cut between two reads.
        if self._held == b"\r" and data.startswith(b"\n", start):
            self._held.clear()
            start += 1
        if not self._held and data.startswith(b"\r\n", start):
            start = _EMPTY_LINES.match(data, start).end()  # type: ignore[union-attr]
        head, end = self._take(data, start, b"\r\n\r\n", 431, self._max_head_bytes)
        if head is not None:
            parts = read_head(head)
            self.phase = "body"
            self._num_bytes = self._num_chunks = 0
            self._left, self._line = parts.length or 0, "size" if parts.length is None else ""
            receiver.on_head(parts)
        return end

    def _read_line(self, data: bytes | bytearray, start: int) -> int:
        """Read a line of a chunked body: most often the end of a chunk together with the size of the next one."""
        if self._line == "end" and not self._held and (size := _NEXT_CHUNK.match(data, start)):
            self._open_chunk(int(size[1], 16))
            return size.end()
        is_trailer = self._line == "trailer"
        max_bytes = self._max_head_bytes - self._num_bytes if is_trailer else _MAX_LINE_BYTES
        line, end = self._take(data, start, b"\r\n", 431 if is_trailer else 400, max_bytes)
        if line is None:
            return end
        if self._line == "size" and (size := _CHUNK.fullmatch(line)):
            self._open_chunk(int(size[1], 16))
        elif self._line != "size" and line == b"\r\n":
            self._line = "" if is_trailer else "size"
        elif is_trailer and _FIELD.findall(line)[0][0]:
            self._num_bytes += len(line)
        else:
            raise MessageError
        return end

    def _open_chunk(self, size: int) -> None:
        self._left, self._line = size, "end" if size else "trailer"
        self._num_chunks += 1
        self._num_bytes = self._num_bytes + size if size else 0
        if size and self._num_chunks > MAX_CHUNKS and self._num_bytes < MIN_CHUNK_BYTES * self._num_chunks:
            raise MessageError

    def _take(
        self, data: bytes | bytearray, start: int, mark: bytes, status: int, max_bytes: int
    ) -> tuple[bytes | None, int]:
        """Return the held bytes with `data` up to the end of `mark`, and that end. None: no mark, so `data` is held."""
        held, num_held = self._held, len(self._held)
        if not held and (found := data.find(mark, start)) >= 0:
            taken = bytes(data[start : found + len(mark)])
        else:
            held += data[start:]
            found = held.find(mark, max(0, num_held - len(mark) + 1))
            taken = bytes(held[: found + len(mark)]) if found >= 0 else b""
        if len(taken or held) > max_bytes:
            raise MessageError(status)
        if taken:
            held.clear()
            return taken, start + len(taken) - num_held
        if _BROKEN.search(held, max(0, num_held - 1)):
            raise MessageError
        return None, len(data)
