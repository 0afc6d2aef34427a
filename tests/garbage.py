"""Bytes that no worker writes: of no form at all, or what one has written with a change."""

from __future__ import annotations

import json
import math
import random
from typing import Any, Final

import msgpack

ODD: Final[tuple[Any, ...]] = (
    *(0, -1, 2**31, 2**53 + 1, 2**63, 2**64 - 1, -(2**63), -1e-9, 5e-324, 1e308),
    *(math.nan, math.inf, -math.inf, None, True, [], {}, [[]] * 300, {"g": math.nan}, {"g": -1}),
    *("", "\x00", "x" * 129, "x" * 70_000, "{", "}:b:", "*", "\u202e", "w0"),
    *("http://a..b:80", "http://127.0.0.1:99999", "http://[:::]:80", "http://xn--a:80", "ftp://127.0.0.1:1"),
)
"""Values where others belong, of msgpack and JSON alike."""


def changed_tree(rng: random.Random, value: Any) -> Any:
    """Return `value` with one node of its tree replaced, removed or added."""
    if rng.random() < 0.15 or not isinstance(value, (dict, list)) or not value:
        return rng.choice(ODD)
    at = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    change = rng.random()
    if change < 0.2:
        return {n: v for n, v in value.items() if n != at} if isinstance(value, dict) else value[:at] + value[at + 1 :]
    if change < 0.3:
        odd = rng.choice(ODD)
        return {**value, "other": odd} if isinstance(value, dict) else [*value[:at], odd, *value[at:]]
    copy = value.copy()
    copy[at] = changed_tree(rng, value[at])
    return copy


def changed_bytes(rng: random.Random, genuine: bytes) -> bytes:
    """Return the bytes with some flipped, cut, repeated or put in."""
    data = bytearray(genuine)
    for _ in range(rng.choice([1, 1, 2, 5])):
        at = rng.randrange(len(data) + 1)
        match rng.randrange(5):
            case 0 | 1 if data:
                data[at % len(data)] ^= 1 << rng.randrange(8)
            case 2:
                del data[at : at + rng.randrange(1, 9)]
            case 3:
                data[at:at] = rng.randbytes(rng.randrange(1, 9))
            case _:
                data[at:at] = data[: rng.randrange(len(data) + 1)]
    return bytes(data)


def changed(rng: random.Random, genuine: bytes) -> bytes:
    """Return a value that may stand in a registry instead of `genuine`: JSON, msgpack, or neither."""
    roll = rng.random()
    if roll < 0.2:
        depth = rng.choice([8, 500, 5000])
        forms = [b"", b"\xff", b"null", b"[]", b"\x90"]
        forms += [unit * depth for unit in (b"\x91", b"\x81", b"[", b'{"a":')]
        return rng.choice([*forms, rng.randbytes(rng.choice([8, 100, 20_000]))])
    if roll < 0.5:
        return changed_bytes(rng, genuine)
    try:
        if genuine[:1] == b"{":
            return json.dumps(changed_tree(rng, json.loads(genuine))).encode()
        tree: bytes = msgpack.packb(changed_tree(rng, msgpack.unpackb(genuine, strict_map_key=False)))
        return tree
    except (ValueError, TypeError, OverflowError, msgpack.UnpackException):
        return changed_bytes(rng, genuine)
