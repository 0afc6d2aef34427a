"""Bytes that no Headstart worker writes: random ones, and valid ones with a change."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from typing import Any, Final, cast

import msgpack
import redis

from cache.redis_index.schema import Keys

UNDIALLABLE: Final = [
    "http://a..b:80",
    "http://.:80",
    "http://..",
    "http://-:1",
    "http://_:1",
    "http://" + "a" * 64 + ":80",
    "http://" + "a" * 253,
    "http://" + ".".join(["a" * 63] * 4),
    "http://127.0.0.1:65536",
    "http://127.0.0.1:99999",
    "http://127.0.0.1:0",
    "http://127.0.0.1:00000",
    "https://127.0.0.1:99999/",
    "http://127.0.0.1:",
    "http://127.0.0.1/",
    "http://127.1:80",
    "http://127.0.0.1.:80",
    "http://2130706433:80",
    "http://0x7f000001:80",
    "http://0177.0.0.1:80",
    "http://1.2.3.4.5:80",
    "http://256.256.256.256:80",
    "http://[::]:80",
    "http://[::1]:99999",
    "http://[:::]:80",
    "http://[::1::]:80",
    "http://[1:2:3]:80",
    "http://[::ffff:127.0.0.1]:1",
    "http://[....]:1",
    "http://[12345::1]:80",
    "http://[::1%25lo]:80",
    "http://[v1.a]:80",
    "http://xn--:80",
    "http://xn--a:80",
    "http://xn--" + "9" * 59 + ":80",
    "http://localhost:1",
    "http://user@127.0.0.1:80",
    "http://127.0.0.1:80\r\nx: y",
    "http://127.0.0.1:\u0661\u0662",
    "http://\u2488.0.0.1:80",
    "http://\ud7ff:80",
    "http://127.0.0.1:80/../x?y#z",
    "HTTP://127.0.0.1:80",
    "http:/127.0.0.1",
    "http://",
    "https://127.0.0.1:1",
    "ftp://127.0.0.1:1",
    "",
]

INTEGERS: Final = [0, -1, 1, 2, 127, 2**31, 2**32, 2**53, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)]
FLOATS: Final = [math.nan, math.inf, -math.inf, -0.0, 5e-324, 1e308, 1e12, 1.0000001e12, -1e-9, 0.5]
TEXTS: Final = [
    "",
    "\x00",
    "x" * 128,
    "x" * 129,
    "x" * 70_000,
    "{",
    "}:b:",
    "*",
    "\n",
    "\u202e",
    "\uffff",
    "\U0001f600",
    "w0",
    "é",
]
DEPTHS: Final = [8, 64, 500, 1000, 5000, 16_000]


ANSWERS: Final = [
    b"",
    b"\xff" * 100,
    b"HTTP/1.1 200 OK\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 99\r\n\r\nx",
    b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: 2\r\n\r\nab",
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    b"HTTP/1.1 200 OK\r\ncontent-length: 1000000\r\n\r\n" + b"\x91" * 1_000_000,
    b"HTTP/1.1 204 No\r\n\r\n",
    b"HTTP/1.1 99999 X\r\n\r\n",
    b"HTTP/9.9 200\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nlocation: http://a..b:80/\r\ncontent-length: 0\r\n\r\n",
]
"""Paths of a worker's HTTP side."""


def _odd(rng: random.Random) -> Any:
    """A value of any type, for msgpack and JSON alike."""
    kind = rng.randrange(9)
    if kind == 0:
        return rng.choice(INTEGERS)
    if kind == 1:
        return rng.choice(FLOATS)
    if kind == 2:
        return rng.choice(TEXTS)
    if kind == 3:
        return rng.choice([None, True, False])
    if kind == 4:
        return [rng.choice([0.5, -1, math.nan, "x", None, [], {}]) for _ in range(rng.choice([0, 1, 3, 300]))]
    if kind == 5:
        return {f"g{n}": rng.choice([0.5, -1, math.nan, "x", None]) for n in range(rng.choice([0, 1, 2, 500]))}
    if kind == 6:
        return rng.choice(UNDIALLABLE)
    if kind == 7:
        return rng.randrange(-(2**63), 2**64)
    return rng.random() * 10.0 ** rng.randrange(-300, 300)


def _changed(rng: random.Random, value: Any, replaced: Callable[[Any], Any]) -> Any:
    """`value` with one node of its tree replaced, removed, doubled, or added."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        name = rng.choice(list(value))
        roll = rng.random()
        if roll < 0.1:
            return {key: item for key, item in value.items() if key != name}
        if roll < 0.2:
            return {**value, rng.choice(TEXTS): replaced(None)}
        return {**value, name: _changed(rng, value[name], replaced)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        roll = rng.random()
        if roll < 0.1:
            return value[:at] + value[at + 1 :]
        if roll < 0.2:
            return [*value[:at], replaced(None), *value[at:]]
        return [*value[:at], _changed(rng, value[at], replaced), *value[at + 1 :]]
    return replaced(value)


_MARK: Final = "\u0001the place\u0001"


def changed_msgpack(rng: random.Random, genuine: bytes) -> bytes:
    """One node is another; now and then bytes that no encoder writes stand in its place."""
    try:
        tree = msgpack.unpackb(genuine, strict_map_key=False)
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException):
        return changed_bytes(rng, genuine)
    if rng.random() < 0.6:
        try:
            data: bytes = msgpack.packb(_changed(rng, tree, lambda old: _odd(rng)))
        except (ValueError, OverflowError):
            return changed_bytes(rng, genuine)
        return data
    raw = msgpack.packb(_changed(rng, tree, lambda old: _MARK))
    depth = rng.choice(DEPTHS)
    odd = rng.choice(
        [
            b"\xa4\xff\xfe\xfd\xfc",  # text that is no UTF-8
            b"\xa2\xed\xa0",
            b"\xd9\x03\xed\xa0\x80",  # a lone surrogate
            b"\xc4\x02ab",  # binary
            b"\xc1",
            b"\xd4\x01a",  # extension types
            b"\xd6\xff\x00\x00\x00\x00",
            b"\xc7\xff\x05",
            b"\xdb\xff\xff\xff\xffx",  # more than there is
            b"\xdd\xff\xff\xff\xff",
            b"\xdf\xff\xff\xff\xff\x01\x01",
            b"\x91" * depth,
            b"\x91" * depth + b"\x90",
            b"\x81\xa1a" * depth + b"\x01",
            b"\x81" * depth + b"\x90",
            b"\x82\xa1a\x01\xa1a\x02",  # the same key twice
            b"\x81\x01\x02",
            b"\x81\xa1\xff\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
            b"\xca\x7f\xc0\x00\x00",  # a NaN of 32 bits
            b"",
        ]
    )
    assert isinstance(raw, bytes)
    return raw.replace(msgpack.packb(_MARK), odd)


def changed_json(rng: random.Random, genuine: bytes) -> bytes:
    """As `changed_msgpack`. What is around the JSON text stays."""
    try:
        tree = json.loads(genuine)
    except (ValueError, RecursionError):
        return changed_bytes(rng, genuine)
    if rng.random() < 0.5:
        text = json.dumps(_changed(rng, tree, lambda old: _odd(rng)), ensure_ascii=rng.random() < 0.5)
        return text.encode("utf-8", "surrogatepass")
    text = json.dumps(_changed(rng, tree, lambda old: _MARK)).encode()
    depth = rng.choice(DEPTHS)
    odd = rng.choice(
        [
            b'"\xff\xfe"',
            b'"\\ud800"',
            b'"\\udfff\\ud800"',
            b'"\\u0000"',
            b'"\xed\xa0\x80"',
            b"1" + b"0" * rng.choice([20, 400, 5000]),
            b"-" + b"9" * 400,
            b"1e999",
            b"-0",
            b"0x10",
            b"NaN",
            b"-Infinity",
            b"[" * depth,
            b"[" * depth + b"]" * depth,
            b'{"a":' * depth + b"1" + b"}" * depth,
            b'{"a":1,"a":2}',
            b"nul",
            b"",
            b'"\x00"',
            b"'x'",
        ]
    )
    text = text.replace(json.dumps(_MARK).encode(), odd)
    return rng.choice(
        [text] * 6 + [b"\xef\xbb\xbf" + text, text + b"x", text.decode(errors="replace").encode("utf-16")]
    )


def changed_bytes(rng: random.Random, genuine: bytes) -> bytes:
    """Bits flipped, cut, repeated, or put in."""
    data = bytearray(genuine)
    for _ in range(rng.choice([1, 1, 1, 2, 5, 30])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(6):
            case 0 | 1 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 2:
                del data[at:]
            case 3:
                del data[at : at + rng.randrange(1, 9)]
            case 4:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                data[at:at] = data[: rng.randrange(len(data) + 1)]
    return bytes(data)


def anything(rng: random.Random) -> bytes:
    """Return bytes of no form at all."""
    depth = rng.choice(DEPTHS)
    return rng.choice(
        [
            b"",
            b"\x00",
            b"\xff",
            b" " * rng.choice([1, 8192, 20_000]),
            rng.randbytes(rng.choice([1, 2, 8, 100, 1000])),
            rng.randbytes(rng.choice([8 * 1024, 8 * 1024 + 1, 16 * 1024, 16 * 1024 + 1, 100_000])),
            b"\x91" * depth,
            b"\x81" * depth,
            b"[" * depth,
            b'{"a":' * depth,
            b"null",
            b"[]",
            b"{}",
            b"\x90",
            b"\x80",
            b"\xc0",
            b"-1",
            b"\x98" + rng.randbytes(7),
            b"\x98\x01\xa4\xff\xfe\xfd\xfc" + b"\x00" * 6,
            ("x" * 8193).encode(),
        ]
    )


def name(rng: random.Random) -> bytes:
    """Return a name for a field where a worker's id belongs."""
    return rng.choice(
        [b"", b"\xff\xfe", b"*", b"x" * 128, b"x" * 129, b"x" * 10_000, b"}", b"a b", b"\x00", "ü".encode()]
        + [b"ghost"] * 10
        + [rng.randbytes(rng.randrange(1, 20))]
    )


def attack(rng: random.Random, store: redis.Redis, keys: Keys, worker_ids: Sequence[str]) -> None:
    """Write something somewhere where gateways and workers read."""
    key = rng.choice([keys.members, keys.states])
    worker_id = rng.choice(worker_ids)
    roll = rng.random()
    if roll < 0.1:
        store.delete(rng.choice([keys.members, keys.states, keys.version]))
    elif roll < 0.2:
        store.delete(key)
        rng.choice([lambda: store.set(key, "x"), lambda: store.sadd(key, "x"), lambda: store.rpush(key, "x")])()
    elif roll < 0.3:
        store.set(keys.version, anything(rng)[:1000])
    elif store.type(key) in (b"hash", b"none"):
        genuine = cast(bytes | None, store.hget(key, worker_id)) or b""
        change = rng.choice([changed_bytes, changed_json if key == keys.members else changed_msgpack])
        value = anything(rng) if rng.random() < 0.3 else change(rng, genuine)
        store.hset(key, worker_id if rng.random() < 0.5 else name(rng), value)  # type: ignore[arg-type]
        store.set(keys.version, rng.randbytes(8))
