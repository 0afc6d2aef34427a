"""The one reader of HTTP/1.1 requests: it decides where a message ends, on every port.

It acts on the fields that it names, and refuses a message that two readers may read in two ways. It ignores Upgrade, as
a server may. So a body has the length that its head declares.

Source: RFC 9112, 2 to 7; RFC 9110, 7.8.
"""

from __future__ import annotations

import re
from typing import Final, Literal, NamedTuple, Protocol

MAX_FIELDS: Final = 100
MAX_CHUNKS: Final = 4096
MIN_CHUNK_BYTES: Final = 16
"""Beyond MAX_CHUNKS, the chunks of a body have to be this large on average: a chunk costs more than its byte."""
_MAX_LINE_BYTES: Final = 1024
"""A line with the size of a chunk."""
_TOKEN: Final = rb"[!#$%&'*+.^_`|~0-9A-Za-z-]"
_TEXT: Final = rb"[\t -~\x80-\xff]*"
_EMPTY_LINES: Final = re.compile(rb"(?:\r\n)*")
_LINE: Final = re.compile(rb"(%b{1,32}) ([!-~]+)(?: HTTP/([0-9]\.[0-9]))?\r\n" % _TOKEN)
_FIELD: Final = re.compile(rb"(%b+):(%b)\r\n" % (_TOKEN, _TEXT))
_SIZE: Final = rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;%b)?\r\n" % _TEXT
_CHUNK: Final = re.compile(_SIZE)
_NEXT_CHUNK: Final = re.compile(rb"\r\n" + _SIZE)
_BROKEN: Final = re.compile(rb"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]|\r[^\n]|(?<!\r)\n")
"""Bytes that no head, line or trailer has."""
_ONCE: Final = frozenset((b"host", b"content-length", b"transfer-encoding", b"expect"))
_LENGTH: Final = re.compile(rb"[0-9]{1,18}")
_HOST: Final = re.compile(rb"[A-Za-z0-9._-]{1,255}(:[0-9]{1,5})?|\[[0-9A-Fa-f:.]{2,45}\](:[0-9]{1,5})?")
_ABSOLUTE: Final = re.compile(rb"https?://([^/?]*)(.*)", re.IGNORECASE)


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
    if version not in (b"1.1", b"1.0"):
        raise MessageError(505)
    headers: list[tuple[bytes, bytes]] = []
    once: dict[bytes, bytes] = {}
    connection = b""
    num_bytes = line.end() + 2
    for name, value in _FIELD.findall(data, line.end()):
        num_bytes += len(name) + len(value) + 3
        name, value = name.lower(), value.strip(b" \t")
        headers.append((name, value))
        if name in _ONCE:
            if name in once:
                raise MessageError
            once[name] = value
        elif name == b"connection":
            connection += b"," + value.lower()
    if num_bytes != len(data):  # a line between two fields is none
        raise MessageError
    if len(headers) > MAX_FIELDS:
        raise MessageError(431)
    host, authority = once.get(b"host"), None
    if absolute := _ABSOLUTE.fullmatch(target):
        authority, rest = absolute.groups()
        target = rest if rest.startswith(b"/") else b"/" + rest
        headers = [*(header for header in headers if header[0] != b"host"), (b"host", authority)]
    is_new = version == b"1.1"
    if (
        method == b"CONNECT"
        or b"#" in target
        or (not target.startswith(b"/") and target != b"*")
        or (is_new if host is None else _HOST.fullmatch(host) is None)
        or (authority is not None and _HOST.fullmatch(authority) is None)
    ):
        raise MessageError
    tokens = {token.strip(b" \t") for token in connection.split(b",")} if connection else ()
    keep_alive = b"close" not in tokens and (is_new or b"keep-alive" in tokens)
    expects_continue = is_new and once.get(b"expect", b"").lower() == b"100-continue"
    length = _body_length(once, is_new)
    return RequestHead(method.decode(), target, version.decode(), headers, length, keep_alive, expects_continue)


def _body_length(once: dict[bytes, bytes], is_new: bool) -> int | None:
    length, coding = once.get(b"content-length"), once.get(b"transfer-encoding")
    if coding is not None:
        if length is not None or not is_new or coding.lower() != b"chunked":
            raise MessageError
        return None
    if length is None:
        return 0
    if _LENGTH.fullmatch(length) is None:
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
        """The size of the chunks; from the last one on, of the trailers."""

    def read(self, data: bytes | bytearray, start: int, receiver: Receiver) -> int:
        """Read on from `start`, at most to the end of one request. Return where it stopped. Raises MessageError."""
        if self.phase != "body":
            return self._read_head(data, start, receiver)
        parts: list[bytes] = []
        while start < len(data) and self.phase == "body":
            if self._left:
                parts.append(bytes(data[start : start + self._left]))
                self._left -= len(parts[-1])
                start += len(parts[-1])
            else:
                start = self._read_line(data, start)
            if not (self._left or self._line):
                self.phase = "idle"
        if parts:
            receiver.on_body(b"".join(parts))
        if self.phase == "idle":
            receiver.on_message_complete()
        return start

    def _read_head(self, data: bytes | bytearray, start: int, receiver: Receiver) -> int:
        self.phase = "head"
        if self._held == b"\r" and data[start : start + 1] == b"\n":
            self._held.clear()
            start += 1
        if not self._held:
            start = _EMPTY_LINES.match(data, start).end()  # type: ignore[union-attr]
        head, end = self._take(data, start, b"\r\n\r\n", 431, self._max_head_bytes)
        if head is not None:
            parts = read_head(head)
            self.phase = "body"
            self._num_bytes = self._num_chunks = 0
            self._left, self._line = parts.length or 0, "size" if parts.length is None else ""
            receiver.on_head(parts)
            if parts.length == 0:
                self.phase = "idle"
                receiver.on_message_complete()
        return end

    def _read_line(self, data: bytes | bytearray, start: int) -> int:
        """Read a line of a chunked body."""
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
        elif is_trailer and _FIELD.fullmatch(line):
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
        """Return what is held, with `data` up to the end of `mark`, and that end. Hold it instead without a mark."""
        held = self._held
        seam = bytes(held[1 - len(mark) :]) if held else b""
        found = (seam + data[start:]).find(mark) + start if held else data.find(mark, start)
        end = len(data) if found < start else found + len(mark) - len(seam)
        if len(held) + end - start > max_bytes:
            raise MessageError(status)
        if found >= start and not held:
            return bytes(data[start:end]), end
        held += data[start:end]
        if found >= start:
            taken = bytes(held)
            held.clear()
            return taken, end
        if _BROKEN.search(held, len(held) - (end - start) - 1):
            raise MessageError
        return None, end
