"""Compressed bodies: whole, broken, followed by more, and made to fill the memory."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import random
import tracemalloc
import weakref
import zlib
from collections import UserDict
from collections.abc import Callable, Sequence

import pytest
from backports import zstd
from starlette.types import Message, Receive, Scope, Send

from server.errors import BodyTooLargeError, InvalidRequestError, MediaTypeError
from server.http.middleware import body_limit

MAX_BYTES = 32 << 20
PACK: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.compress, "deflate": zlib.compress, "zstd": zstd.compress}


def bare(body: bytes) -> bytes:
    """Deflate without zlib's head and sum, as some clients send it."""
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(body) + packer.flush()


async def received(coding: str | Sequence[str], packed: bytes, *, piece: int = 1 << 16) -> bytes:
    """The bytes that the app reads of a body that comes in pieces of this size."""
    pieces = [packed[at : at + piece] for at in range(0, len(packed), piece)] or [b""]
    body, messages = bytearray(), list[weakref.ref[Message]]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (message := await receive())["more_body"]:
            body.extend(message["body"])
        body.extend(message["body"])
        message = await receive()
        assert message["type"] == "http.disconnect", "what follows is the connection's"
        assert not any(each() for each in messages), "the answer holds parts of the body"

    async def receive() -> Message:
        if not pieces:
            return {"type": "http.disconnect"}
        message = UserDict(type="http.request", body=pieces.pop(0), more_body=len(pieces) > 0)
        messages.append(weakref.ref(message))
        return message

    async def send(message: Message) -> None:
        raise AssertionError

    codings = [coding] if isinstance(coding, str) else coding
    headers = [(b"content-length", b"%d" % len(packed)), *((b"content-encoding", c.encode()) for c in codings)]
    await body_limit(app, MAX_BYTES)({"headers": headers}, receive, send)
    return bytes(body)


def random_body(rng: random.Random) -> bytes:
    size = min(1 << 20, int(rng.paretovariate(0.5) * 10) - 10)
    return b" ".join(rng.choice([b"river", b"stone", b"%d" % rng.randrange(1 << 60)]) for _ in range(size // 8))


@pytest.mark.parametrize("seed", range(4))
async def test_bodies_are_read_as_they_were_packed(seed: int) -> None:
    """500 of each seed, in pieces of any size."""
    rng = random.Random(seed)
    for _ in range(500):
        coding, body = rng.choice(list(PACK)), random_body(rng)
        packed = PACK[coding](body)
        piece = rng.choice([max(1, len(packed) // 9), len(packed) + 1, 1 << 16])
        assert await received(rng.choice([coding, coding.upper()]), packed, piece=piece) == body
        assert await received("deflate", bare(body), piece=piece) == body


@pytest.mark.parametrize("coding", PACK)
@pytest.mark.parametrize("size", [1 << 16, 2 << 16, (1 << 16) + 1, (1 << 16) - 1, 3_000_000])
async def test_sizes_next_to_those_of_the_parts(coding: str, size: int) -> None:
    body = random.Random(size).randbytes(size // 3) * 3
    assert await received(coding, PACK[coding](body)) == body


@pytest.mark.parametrize("coding", PACK)
async def test_a_broken_body_is_a_400(coding: str) -> None:
    packed = PACK[coding](b"a body of some words" * 10)
    for broken, problem in (
        (packed[:-3], "ends before"),
        (b"", "ends before"),
        (packed + b"more", "follow the end"),
        (packed + packed, "follow the end of the .* body: send one frame or member"),
        (b'{"model": "m"}', f"no {coding}|follow the end"),
    ):
        for piece in (1, 1 << 16):
            with pytest.raises(InvalidRequestError, match=problem):
                await received(coding, broken, piece=piece)


@pytest.mark.parametrize("flip", range(40))
async def test_a_changed_byte_is_an_error_or_other_text(flip: int) -> None:
    rng = random.Random(flip)
    coding = rng.choice(list(PACK))
    packed = bytearray(PACK[coding](random_body(rng) + b"."))
    packed[rng.randrange(len(packed))] ^= 1 << rng.randrange(8)
    with contextlib.suppress(InvalidRequestError, BodyTooLargeError):
        await received(coding, bytes(packed))


@pytest.mark.parametrize("coding", PACK)
async def test_a_bomb_is_refused_before_it_is_in_memory(coding: str) -> None:
    packed = PACK[coding](bytes(100 << 20))
    tracemalloc.start()
    with pytest.raises(BodyTooLargeError, match="200 times"):
        await received(coding, packed)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < 64 << 20


async def test_a_large_body_is_measured_unpacked() -> None:
    body = random.Random(1).randbytes(MAX_BYTES // 2).hex().encode() + b"."
    turn = asyncio.create_task(asyncio.sleep(0))
    with pytest.raises(BodyTooLargeError, match="must not be larger"):
        await received("gzip", gzip.compress(body, 1))
    assert turn.done(), "the event loop stood"


async def test_a_large_window_is_refused() -> None:
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.enable_long_distance_matching: 1}
    packed = zstd.compress(random.Random(1).randbytes(20 << 20), options=options)
    with pytest.raises(InvalidRequestError, match="no zstd"):
        await received("zstd", packed)


async def test_other_codings_are_named() -> None:
    assert await received("identity", b"x") == b"x"
    assert await received("", b"x") == b"x"
    assert await received("X-GZIP", gzip.compress(b"x")) == b"x"
    for coding in ("br", "compress", "gzip, zstd", "identity, gzip", ["gzip", "zstd"]):
        with pytest.raises(MediaTypeError, match="is not accepted: send one of gzip, deflate, zstd") as caught:
            await received(coding, b"x")
        assert (b"accept-encoding", b"gzip, deflate, zstd") in caught.value.headers()
