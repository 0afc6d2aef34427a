"""Compressed bodies of requests, unpacked part by part: the memory has what the app has taken, and a part.

A body has one coding: gzip, deflate (zlib, or bare as .NET writes it) or zstd. What follows its end, and an end that
does not come, is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, Final

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from server.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError
from server.event_loop import TimeSlice

CODINGS: Final = ("gzip", "deflate", "zstd")
PART_BYTES: Final = 1 << 16
MAX_RATIO: Final = 200
"""Unpacked bytes to packed ones, after the first MiB. Prompts that repeat one sentence have 100."""
_FREE_BYTES: Final = 1 << 20
_MAX_WINDOW_LOG: Final = 23  # RFC 9659: a larger window needs more memory than a decoder of HTTP has to have


def checked_coding(value: bytes, before: str = "") -> str:
    """Return the coding of a Content-Encoding header; empty for none. Raises MediaTypeError.

    `before`: the coding of an earlier such header.
    """
    name = value.decode("latin-1").strip().lower()
    coding = {"identity": "", "x-gzip": "gzip"}.get(name, name)
    if coding and (coding not in CODINGS or before):
        message = f"Content-Encoding {name!r:.80} is not accepted: send one of {', '.join(CODINGS)}, or a plain body."
        raise MediaTypeError(message, headers=((b"accept-encoding", ", ".join(CODINGS).encode()),))
    return coding or before


async def unpacked(coding: str, receive: Receive) -> AsyncIterator[Message]:
    """Yield the parts of a compressed body, as they come. Raises InvalidRequestError and BodyTooLargeError."""
    decoder, time_slice, num_packed, num_unpacked, has_more = None, TimeSlice(), 0, 0, True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        packed, has_more = message.get("body", b""), message.get("more_body", False)
        num_packed += len(packed)
        if packed and decoder is None:
            decoder = _decoder(coding, packed[0])
        for part in _parts(decoder, packed, coding):
            num_unpacked += len(part)
            if num_unpacked > max(_FREE_BYTES, MAX_RATIO * num_packed):
                raise BodyTooLargeError(f"The body unpacks to more than {MAX_RATIO} times its size: send it plain.")
            yield {"type": "http.request", "body": part, "more_body": True}
            await time_slice.rest()
    if decoder is None or not decoder.eof:
        raise InvalidRequestError(f"The {coding} body ends before its last byte.")


def _decoder(coding: str, first: int) -> Any:
    """Return an object with `decompress(data, max_length)`, `eof` and `unused_data`, by the first byte of a body."""
    if coding != "zstd":
        return zlib.decompressobj(31 if coding == "gzip" else 15 if first & 15 == 8 else -15)
    from backports.zstd import DecompressionParameter, ZstdDecompressor  # few clients send it

    return ZstdDecompressor(options={DecompressionParameter.window_log_max: _MAX_WINDOW_LOG})


def _parts(decoder: Any, packed: bytes, coding: str) -> Iterator[bytes]:
    """Unpack input of any size to parts of at most PART_BYTES."""
    for start in range(0, len(packed), PART_BYTES):
        data, is_full = packed[start : start + PART_BYTES], True
        while data or is_full:
            if decoder.eof:
                raise InvalidRequestError(f"Bytes follow the end of the {coding} body: send one frame or member.")
            try:
                part = decoder.decompress(data, PART_BYTES)
            except Exception as error:  # the two libraries' own
                raise InvalidRequestError(f"The body is no {coding}: {error}.") from None
            if part:
                yield part
            data = decoder.unused_data or getattr(decoder, "unconsumed_tail", b"")
            is_full = len(part) == PART_BYTES and not decoder.eof
