"""Hard affinity: one worker for a session, at every gateway, and never a reason to refuse."""

from __future__ import annotations

import pytest

from cache.records import WorkerLoad
from cache.types import WorkerId
from server.router.types import TtftBudgetError
from tests.server.router.fleets import RATE, Fleets, chain, member


def fleet_of(names: str) -> Fleets:
    fleets = Fleets()
    for name in names:
        fleets.index.register(member(name))
    return fleets


async def test_a_session_stays_whatever_the_cost() -> None:
    """Neither a longer match elsewhere nor a queue moves it; another session of the fleet has another worker."""
    one, other = fleet_of("abcd"), fleet_of("dcba")
    homes = {}
    for session in map(str, range(32)):
        home = await one.worker(chain(10), affinity_key=session, hard_affinity=True)
        elsewhere = next(name for name in "abcd" if name != home)
        hashes = chain(200)
        other.index.memory.publish(WorkerId(elsewhere), hashes[:180])
        assert await other.worker(hashes, affinity_key=session, hard_affinity=True) == home
        assert await other.worker(hashes, affinity_key=session) == elsewhere
        homes[session] = home
    assert set(homes.values()) == set("abcd")


async def test_a_session_leaves_a_draining_worker_and_returns(three: Fleets) -> None:
    home = await three.worker(chain(10), affinity_key="s", hard_affinity=True)
    three.index.memory.publish(WorkerId(home), load=WorkerLoad(draining=True))
    following = {await three.worker(chain(10), affinity_key="s", hard_affinity=True) for n in range(8)}
    assert len(following) == 1
    assert following != {home}
    three.index.memory.publish(WorkerId(home), load=WorkerLoad(prefill_tokens_per_s=RATE))
    assert await three.worker(chain(10), affinity_key="s", hard_affinity=True) == home


async def test_hard_affinity_without_a_session_changes_nothing(three: Fleets) -> None:
    hashes = chain(100)
    three.index.memory.publish(WorkerId("b"), hashes[:90])
    assert await three.worker(hashes, hard_affinity=True) == "b"


async def test_a_budget_comes_before_affinity(three: Fleets) -> None:
    home = await three.worker(chain(10), affinity_key="s", hard_affinity=True)
    warm = next(name for name in "abc" if name != home)
    hashes = chain(200)
    three.index.memory.publish(WorkerId(warm), hashes[:199])
    kept = await three.worker(hashes, affinity_key="s", hard_affinity=True, ttft_budget_s=0.5)
    assert kept == warm
    with pytest.raises(TtftBudgetError):
        await three.place(chain(201), affinity_key="s", hard_affinity=True, ttft_budget_s=0.5)
