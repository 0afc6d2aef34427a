"""The decoders of replies, without a Redis."""

from __future__ import annotations

import pytest
from redis.exceptions import ResponseError

from cache.redis_index.schema import ReplyError, brief, decode_time_ms


def test_a_time_is_read_in_milliseconds() -> None:
    assert decode_time_ms([b"12", b"3999"]) == 12_003


@pytest.mark.parametrize(
    "reply",
    [None, 1, [], [b"1"], [b"1", b"2", b"3"], [1, 2], [b"x", b"1"], [b"1", b"x"], [b"1" * 13, b"1"], [b"1", b"1" * 7]],
)
def test_another_reply_is_no_time(reply: object) -> None:
    with pytest.raises(ReplyError):
        decode_time_ms(reply)


@pytest.mark.parametrize(
    ("reply", "text"),
    [
        (b"x" * 99, f"99 bytes: {b'x' * 60!r}"),
        ([[1], 2], "a list of 2"),
        (ResponseError("ERR no"), "the error 'ERR no'"),
        (7, "int 7"),
        (None, "NoneType None"),
    ],
)
def test_a_reply_is_described_in_a_few_words(reply: object, text: str) -> None:
    assert brief(reply) == text
