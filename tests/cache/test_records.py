"""Loads of older and newer workers."""

from __future__ import annotations

import msgspec

from cache.records import WorkerLoad


def test_a_load_of_another_version_is_read() -> None:
    """An older worker has fewer values; a newer one has more."""
    load = WorkerLoad({}, 3.0, 1000.0, is_slow=True, bounded_prefill_tokens_per_s=300.0)
    values = msgspec.msgpack.decode(msgspec.msgpack.encode(load))
    older = msgspec.msgpack.encode(values[: values.index(True) + 1])
    assert msgspec.msgpack.decode(older, type=WorkerLoad) == WorkerLoad({}, 3.0, 1000.0, is_slow=True)
    newer = msgspec.msgpack.encode([*values, 7, "red"])
    assert msgspec.msgpack.decode(newer, type=WorkerLoad) == load
