"""What a gateway makes of the registry's entries, without a Redis."""

from __future__ import annotations

import logging

import pytest

from cache.index import WorkerLoad, WorkerMember
from cache.redis_index import schema
from cache.redis_index.registry import Registry
from cache.types import Epoch, WorkerId

MEMBER = WorkerMember(WorkerId("w0"), Epoch("e0"), "http://w0", "m", "n", "cpu", 16, 4096, protocol=1)


def state(generation: int, *, written_ms: int = 500) -> bytes:
    return schema.encode_state(
        MEMBER,
        WorkerLoad(num_running=generation),
        generation=generation,
        batch=1,
        deadline_ms=written_ms + 1500,
        written_ms=written_ms,
        num_entries=9,
    )


def registry() -> Registry:
    read = Registry(lambda event: None)
    read.refresh([b"w0", schema.encode_member(MEMBER)], [b"w0", state(1)])
    return read


def test_what_was_found_in_a_set_that_was_given_up_is_not_credited() -> None:
    read = registry()
    workers = read.workers(None)

    def seen(generation: int) -> tuple[int, int]:
        (candidate,) = read.candidates(workers, [5], [state(generation)], 1000)
        return candidate.matched_blocks, candidate.load.num_running

    layout = read.layout
    assert seen(1) == (5, 1)
    assert read.layout == layout
    assert seen(2) == (0, 2)
    assert read.layout != layout, "the next lookup asks for the new set"
    assert seen(2) == (5, 2)


def test_who_has_no_state_or_no_lease_is_no_candidate() -> None:
    read = registry()
    workers = read.workers(None)
    (candidate,) = read.candidates(workers, [5], [state(1)], 1999)
    assert candidate.load_age_s == pytest.approx(1.499)
    assert read.candidates(workers, [5], [state(1)], 2000) == []
    assert read.candidates(workers, [5], [], 1000) == []
    assert read.candidates(workers, [5], [None], 1000) == []
    assert len(read.candidates(workers, [5], [state(1, written_ms=3000)], 2500)) == 1, "it is there again"


def test_entries_tell_the_lapsed_too_in_seconds() -> None:
    read = registry()
    for now_ms, lease_left_s, age_s in ((1000, 1.0, 0.5), (4000, -2.0, 3.5)):
        read.at(now_ms)
        (entry,) = read.entries()
        assert (entry.lease_left_s, entry.age_s) == pytest.approx((lease_left_s, age_s))
        assert (entry.num_entries, entry.generation) == (9, 1)


def test_what_is_odd_is_counted_each_time_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    events: list[str] = []
    read = Registry(events.append)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            read.refresh([b"w0", b"junk"], [])
    assert events == ["invalid"] * 3
    assert len(caplog.records) == 1
