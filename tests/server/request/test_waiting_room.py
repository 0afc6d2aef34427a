"""What a gateway holds back: too many waiting tokens, and requests that break workers."""

from __future__ import annotations

import pytest

from cache.types import BlockHash
from server.errors import OverloadedError
from server.request.waiting_room import WaitingRoom
from server.workers.quarantine import MAX_ENTRIES, Quarantine
from worker.wire import SamplingParams


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def test_each_tenant_fills_its_own_share() -> None:
    clock = Clock()
    room = WaitingRoom(1000, clock=clock)
    places = [room.enter("heavy", 100) for _ in range(10)]
    with pytest.raises(OverloadedError) as refused:
        room.enter("heavy", 1)
    assert refused.value.retry_after_s == 1.0, "nothing is known of the pace"
    for _ in range(5):
        places.append(room.enter("weak", 100))
    with pytest.raises(OverloadedError):
        room.enter("weak", 1)
    clock.now_s += 1
    for place in (*places, *places):
        place.leave()
    assert room.num_tokens == 0
    room.enter("heavy", 5000).leave()
    room.enter("heavy", 900)
    with pytest.raises(OverloadedError) as refused:
        room.enter("heavy", 200)
    assert refused.value.retry_after_s == pytest.approx(900 / 650)


def test_a_quarantined_request_is_known_by_all_that_is_computed() -> None:
    clock = Clock()
    quarantine = Quarantine(ttl_s=60, clock=clock)
    root, params = BlockHash(b"r" * 16), SamplingParams(max_tokens=5)
    assert not quarantine.holds(root, [1, 2], params)
    quarantine.add(root, [1, 2], params)
    assert quarantine.holds(root, [1, 2], SamplingParams(max_tokens=5))
    assert not quarantine.holds(root, [1, 2, 3], params)
    assert not quarantine.holds(root, [1, 2], SamplingParams(max_tokens=6))
    assert not quarantine.holds(BlockHash(b"s" * 16), [1, 2], params)
    for number in range(MAX_ENTRIES):
        quarantine.add(root, [number], params)
    assert len(quarantine) == MAX_ENTRIES
    assert not quarantine.holds(root, [1, 2], params), "the oldest made room"
    assert quarantine.holds(root, [1], params)
    clock.now_s += 61
    assert not any(quarantine.holds(root, [number], params) for number in range(MAX_ENTRIES))
    assert not quarantine.holds(root, [1, 2], params)
    assert len(quarantine) == 0
