"""Copies on purpose: when a chain gets another home, where, and what happens if it does not."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from cache.records import WorkerLoad, WorkerMember
from cache.types import BlockHash, WorkerId
from server.router import copies as planner
from server.router.copies import REST_S
from server.workers.connection import WorkerLost
from tests.server.router.fleets import BLOCK, RATE, Fleets, chain, make_request, member

FETCH_RATE = 20 * RATE
NUM_SHARED = 1800
NUM_OWN = 9
"""A request takes 0.15 s at a holder, and the shared blocks come in 1.4 s."""
ROOT = BlockHash(b"r" * 16)
EVERY_S = 0.2
"""Requests at this interval take most of a holder."""


class Copies:
    """A sender whose copies end when the test sets `may_end`."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, WorkerMember, BlockHash, Sequence[BlockHash]]] = []
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self, url: str, source: WorkerMember, root: BlockHash, hashes: Sequence[BlockHash]) -> int:
        self.sent.append((url, source, root, hashes))
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return len(hashes)


@pytest.fixture
def copies() -> Copies:
    return Copies()


def fleet(copies: Copies, *, max_copies: int = 4, layout: str = "l", load: WorkerLoad | None = None) -> Fleets:
    """Return three workers, which begin with `load`."""
    fleets = Fleets(send_copy=copies, max_copies=max_copies)
    load = load or WorkerLoad(prefill_tokens_per_s=RATE, fetch_tokens_per_s=FETCH_RATE)
    for name in "abc":
        fleets.index.register(member(name, layout=layout), load=load)
    return fleets


def hold(fleets: Fleets, name: str) -> list[BlockHash]:
    shared = chain(NUM_SHARED)
    fleets.index.memory.publish(WorkerId(name), shared)
    return shared


async def ask(
    fleets: Fleets,
    *prefixes: Sequence[BlockHash],
    num_requests: int = 40,
    every_s: float = EVERY_S,
    num_own: int = NUM_OWN,
) -> None:
    """Ask for prompts that begin with the prefixes in turn. Each is answered before the next one."""
    for number in range(num_requests):
        for name in "abc":
            fleets.index.memory.publish(WorkerId(name))  # renews its lease
        hashes = [*prefixes[number % len(prefixes)], *chain(num_own)]
        placement = await fleets.place(hashes, root=ROOT)
        fleets.router.started(placement, placement.promised_tokens)
        fleets.clock.now_s += every_s
        fleets.router.first_token(placement)
        fleets.router.closed(placement)
        await asyncio.sleep(0)


async def finish(fleets: Fleets, copies: Copies) -> None:
    copies.may_end.set()
    for _ in range(10):
        await asyncio.sleep(0)


async def test_a_hot_chain_gets_another_home(copies: Copies) -> None:
    fleets = fleet(copies)
    shared = hold(fleets, "a")
    await ask(fleets, shared)
    ((url, source, root, hashes),) = copies.sent
    assert (source.worker_id, root, list(hashes)) == ("a", ROOT, shared)
    assert url in ("http://b:8000", "http://c:8000")
    await finish(fleets, copies)
    assert (fleets.metrics.copies.sum("made"), fleets.metrics.copies.sum("failed")) == (1, 0)


async def test_two_holders_share_the_demand(copies: Copies) -> None:
    fleets = fleet(copies)
    shared = hold(fleets, "a")
    fleets.index.memory.publish(WorkerId("b"), shared)
    await ask(fleets, shared)
    assert copies.sent == []


@pytest.mark.parametrize(("max_copies", "num_chains", "num_copies"), [(1, 2, 1), (4, 2, 2), (4, 3, 2)])
async def test_copies_in_flight_are_bounded(copies: Copies, max_copies: int, num_chains: int, num_copies: int) -> None:
    """By the option, and by one for each worker."""
    fleets = fleet(copies, max_copies=max_copies)
    await ask(fleets, *(hold(fleets, "a") for _ in range(num_chains)), num_requests=60, every_s=EVERY_S / num_chains)
    assert len(copies.sent) == num_copies
    assert len({url for url, *_ in copies.sent}) == num_copies


async def test_the_demand_of_so_many_chains_is_remembered(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planner, "MAX_CHAINS", 10)
    fleets = fleet(copies)
    prefixes = [chain(20) for _ in range(30)]
    for prefix in prefixes:
        fleets.index.memory.publish(WorkerId("a"), prefix)
    await ask(fleets, *prefixes, num_requests=60)
    assert list(fleets.copies.planner._demands) == [prefix[-1] for prefix in prefixes[-10:]]


NO_DEMAND: dict[str, tuple[int, dict[str, Any]]] = {
    "a request in half a second": (1, {"every_s": 0.5}),
    "a request in five seconds": (1, {"every_s": 5.0}),
    "two chains, or two tenants with one prompt": (2, {}),
    "long requests, of which each takes a second": (1, {"every_s": 1.2, "num_own": 60}),
    "new prompts": (0, {}),
}
"""How many held chains are asked for in turn, and how."""


@pytest.mark.parametrize("name", NO_DEMAND)
async def test_what_leaves_its_holder_time_is_not_copied(copies: Copies, name: str) -> None:
    num_chains, options = NO_DEMAND[name]
    fleets = fleet(copies)
    held = [hold(fleets, "a") for _ in range(num_chains)]
    await ask(fleets, *(held or [chain(5) for _ in range(40)]), **options)
    assert copies.sent == []


@pytest.mark.parametrize(
    "options",
    [
        {"max_copies": 0},
        {"layout": ""},
        {"load": WorkerLoad(prefill_tokens_per_s=RATE)},
        # A pool whose blocks are all in use: their return costs more than the wait.
        {"load": WorkerLoad(prefill_tokens_per_s=RATE, fetch_tokens_per_s=FETCH_RATE, num_blocks=2000)},
    ],
    ids=["none_allowed", "other_engine", "no_fetches", "full_pools"],
)
async def test_no_copy_is_made(copies: Copies, options: dict[str, Any]) -> None:
    fleets = fleet(copies, **options)
    await ask(fleets, hold(fleets, "a"))
    assert copies.sent == []


async def test_a_failed_copy_changes_nothing(copies: Copies) -> None:
    """Requests go on at the holder. After a rest another copy is tried."""
    fleets = fleet(copies)
    shared = hold(fleets, "a")
    copies.error = WorkerLost("gone")
    await ask(fleets, shared)
    await finish(fleets, copies)
    assert fleets.metrics.copies.sum("failed") == 1
    await ask(fleets, shared, num_requests=int(REST_S / EVERY_S) - 1)
    assert len(copies.sent) == 1
    await ask(fleets, shared, num_requests=4)
    assert len(copies.sent) == 2
    assert await fleets.worker([*shared, *chain(NUM_OWN)]) == "a"


async def test_explain_shows_the_copy_with_its_seconds(copies: Copies) -> None:
    fleets = fleet(copies)
    request = make_request([*hold(fleets, "a"), *chain(NUM_OWN)], root=ROOT)
    assert (await fleets.explain(request))["copy"] is None
    await ask(fleets, request.hashes[:NUM_SHARED])
    plan = (await fleets.explain(request))["copy"]
    assert (plan["from"], plan["tokens"]) == ("a", NUM_SHARED * BLOCK)
    assert plan["demand"] > 0.5
    assert plan["wait_s"] > plan["copy_s"] > 1.4
    assert plan["in_flight"]
    assert len(copies.sent) == 1
