"""The cheapest plan for a prompt's blocks: from tiers, from peers that can give, or computed."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.records import Candidate, WorkerLoad, WorkerMember
from cache.types import WorkerId
from server.router.cost import CostModel, WorkerView
from server.router.fetch_plan import FetchPlan, cheapest_plan, find_peers
from server.router.placement import Decision
from tests.server.router.fleets import BLOCK, RATE, Fleets, chain, incarnations, make_request, member

RATES = st.sampled_from([0.0, 1.0, 3.0, 10.0, 1e6])


def brute_force_s(
    num_tokens: int,
    start: int,
    rate: float,
    tiers: list[tuple[int, float]],
    peer_end: int,
    fetch_rate: float,
) -> float:
    """Return the least seconds over every token at which each place could stop."""
    if peer_end <= max([start, *(end for end, _ in tiers)]):
        fetch_rate = 0.0
    least_s = float("inf")
    for stops in itertools.product(range(num_tokens), repeat=len(tiers)):
        seconds, end = 0.0, start
        for stop, (tier_end, tier_rate), before in zip(stops, tiers, [(start, 0.0), *tiers], strict=False):
            moved = max(0, min(stop, tier_end) - end)
            if moved and (not tier_rate or end < before[0]):
                break  # its blocks come after the end of the place before
            seconds += moved / tier_rate if moved else 0.0
            end += moved
        else:
            for fetched in range(max(0, peer_end - end) + 1 if fetch_rate else 1):
                moved_s = fetched / fetch_rate if fetched else 0.0
                least_s = min(least_s, seconds + moved_s + (num_tokens - end - fetched) / rate)
    return least_s


@given(st.data())
def test_the_plan_is_the_cheapest_of_all(data: st.DataObject) -> None:
    num_tokens = data.draw(st.integers(1, 9))
    most = num_tokens - 1
    ends = sorted(data.draw(st.lists(st.integers(0, most), min_size=1, max_size=3)))
    start, tier_ends = ends[0], ends[1:]
    tiers = [(end, data.draw(RATES.filter(bool))) for end in tier_ends]
    peer_end, fetch_rate = data.draw(st.integers(0, most)), data.draw(RATES)
    rate = data.draw(RATES.filter(bool))
    plan = cheapest_plan(num_tokens, start, rate, tiers, peer_end, fetch_rate) or FetchPlan(start)
    total_s = plan.fetch_s + (num_tokens - plan.end_tokens) / rate
    assert total_s == pytest.approx(brute_force_s(num_tokens, start, rate, tiers, peer_end, fetch_rate))
    assert plan.end_tokens == start + sum(plan.tier_tokens) + plan.peer_tokens < num_tokens
    moved_s = [n / tier_rate for n, (_, tier_rate) in zip(plan.tier_tokens, tiers, strict=False)]
    moved_s += [plan.peer_tokens / fetch_rate] if plan.peer_tokens else []
    assert plan.fetch_s == pytest.approx(sum(moved_s))


def test_a_tier_without_a_rate_gives_nothing() -> None:
    """Tiers after it cannot be reached across its blocks."""
    assert cheapest_plan(100, 10, 1.0, [(50, 0.0), (80, 100.0)]) is None
    assert cheapest_plan(100, 50, 1.0, [(50, 0.0), (80, 100.0)]) == FetchPlan(80, (0, 30), 0, 0.3), "none needed of it"
    assert cheapest_plan(100, 10, 1.0, [(50, 0.0)], 90, 100.0) == FetchPlan(90, (), 80, 0.8)


LAYOUT = "records-1"


def mover(name: str, **changes: object) -> WorkerMember:
    return member(name, **{"layout": LAYOUT, **changes})


def report(**changes: object) -> WorkerLoad:
    fields: dict[str, object] = {"prefill_tokens_per_s": RATE, "fetch_tokens_per_s": 20 * RATE}
    return WorkerLoad(**{**fields, **changes})  # type: ignore[arg-type]


def decided(*candidates: Candidate, broken: tuple[str, ...] = (), num_blocks: int = 50, **changes: object) -> Decision:
    scorer = Fleets().router.scorer
    request = make_request(chain(num_blocks), **changes)
    return scorer.decide(request, candidates, {WorkerId(name) for name in broken})


def fetched(decision: Decision, name: str) -> int:
    """Return how many blocks the worker would fetch."""
    worker = next(worker for worker in decision.workers if worker.member.worker_id == name)
    assert (worker.peers is None) == (worker.plan is None or not worker.plan.peer_tokens)
    return 0 if worker.plan is None else worker.plan.peer_tokens // BLOCK


def test_a_worker_fetches_what_a_peer_holds() -> None:
    decision = decided(Candidate(mover("full"), report(), 40), Candidate(mover("empty"), report(), 10))
    assert fetched(decision, "empty") == 30
    assert fetched(decision, "full") == 0, "there is more nowhere"


@pytest.mark.parametrize(
    ("peer", "load"),
    [
        (mover("peer", layout="another"), report()),
        (mover("peer", layout=""), report()),
        (mover("peer", model="another"), report()),
        (mover("broken"), report()),
        (mover("failed"), report()),
        (mover("peer"), report(tier_tokens_per_s=(0.0,))),
    ],
)
def test_no_other_worker_is_a_peer(peer: WorkerMember, load: WorkerLoad) -> None:
    matched = 0 if load.tier_tokens_per_s else 40
    decision = decided(
        Candidate(replace(peer, tiers=("disk",)), load, matched, tier_blocks=(40,) if not matched else ()),
        Candidate(mover("empty"), report(), 0),
        broken=("broken",),
        excluded=incarnations("failed"),
    )
    assert fetched(decision, "empty") == 0


def test_a_worker_that_cannot_fetch_gets_no_source() -> None:
    """It has no fetch rate, no layout, or computes faster."""
    full = Candidate(mover("full"), report(), 40)
    decision = decided(
        full,
        Candidate(mover("idle"), report(fetch_tokens_per_s=0.0), 0),
        Candidate(mover("old", layout=""), report(), 0),
        Candidate(mover("slow"), report(fetch_tokens_per_s=RATE / 2), 0),
    )
    assert [fetched(decision, name) for name in ("idle", "old", "slow")] == [0, 0, 0]


def test_a_draining_worker_still_gives_also_from_its_tiers() -> None:
    leaving = Candidate(
        mover("leaving", tiers=("host", "disk")),
        report(draining=True, tier_tokens_per_s=(50 * RATE, 30 * RATE)),
        5,
        tier_blocks=(20, 40),
    )
    decision = decided(leaving, Candidate(mover("empty"), report(), 0))
    assert fetched(decision, "empty") == 40
    assert [worker.member.worker_id for worker in decision.best] == ["empty"]


def test_pending_blocks_are_not_there_to_be_fetched() -> None:
    fleets, hashes = Fleets(), chain(50)
    for name in "ab":
        fleets.index.register(mover(name), load=report())

    async def scenario() -> None:
        first = await fleets.place(hashes)
        assert first.source is None
        explained = await fleets.explain(make_request(hashes))
        assert [worker["fetched_tokens"] for worker in explained["workers"]] == [{}, {}]

    asyncio.run(scenario())


def test_the_least_loaded_of_equal_peers_gives() -> None:
    busy, idle = (Candidate(mover(n), report(num_running=r), 40) for n, r in (("busy", 5), ("idle", 1)))
    peers = find_peers([busy, idle], (), make_request(chain(50)))[("m", LAYOUT)]
    assert peers.num_blocks == 40
    assert Fleets().router.scorer.choose_peer(peers.holders).worker_id == "idle"
    scorer, twin = Fleets().router.scorer, Candidate(mover("twin"), report(num_running=1), 40)
    assert {scorer.choose_peer([idle, twin]).worker_id for _ in range(50)} == {"idle", "twin"}
    assert {scorer.choose_peer([idle, twin], dry_run=True).worker_id for _ in range(50)} == {"idle"}


def test_a_placement_promises_fetched_tokens() -> None:
    """The load estimate counts only the computed ones."""
    scorer = Fleets().router.scorer
    full = Candidate(mover("full"), report(draining=True), 40)
    disk = Candidate(
        mover("disk", tiers=("disk",), epoch="now"),
        report(tier_tokens_per_s=(10 * RATE,), num_blocks=1000, num_free_blocks=500),
        10,
        tier_blocks=(30,),
    )
    request = make_request(chain(50))
    placement = scorer.place(scorer.decide(request, [full, disk]))
    assert placement.worker.worker_id == "disk"
    assert placement.source is not None
    assert (placement.source.url, placement.source.epoch, placement.source.num_blocks) == ("http://full:8000", "e", 40)
    assert placement.promised_tokens == 40 * BLOCK
    estimate = scorer.loads.of(placement.worker)
    assert estimate.queued_s == pytest.approx(0.01 + (10 * BLOCK + 1) / RATE), "its engine loads nothing"
    assert estimate.num_used_blocks(WorkerLoad()) == 51, "no live request holds any of them"


def test_without_layouts_and_tiers_nothing_is_planned() -> None:
    new = [Candidate(member(name), WorkerLoad(), 0) for name in "bc"]
    decision = decided(Candidate(member("a"), report(), 40), *new)
    assert [worker.plan for worker in decision.workers] == [None] * 3
    assert [worker.fetch_cost_s for worker in decision.workers] == [0.0] * 3
    assert [worker.prefill_tokens_per_s for worker in decision.workers] == [RATE] * 3, "the measured one's"


def test_a_fetch_beats_a_queue_and_a_match_beats_a_fetch() -> None:
    full, empty = Candidate(mover("full"), report(), 40), Candidate(mover("empty"), report(), 0)
    assert [worker.member.worker_id for worker in decided(full, empty).best] == ["full"]
    waiting = report(queued_prefill_s={"other": 5.0})
    decision = decided(Candidate(mover("full"), waiting, 40), empty)
    assert [worker.member.worker_id for worker in decision.best] == ["empty"]


def test_explain_shows_the_way_of_every_worker() -> None:
    fleets, hashes = Fleets(), chain(50)
    fleets.index.register(mover("a"), hashes[:40], report())
    fleets.index.register(mover("b"), load=report())
    explained = asyncio.run(fleets.explain(make_request(hashes)))
    rows = {row["worker"]: row for row in explained["workers"]}
    assert rows["a"]["fetch_from"] is None
    assert (rows["b"]["fetch_from"], rows["b"]["fetched_tokens"]) == ("a", {"peer": 40 * BLOCK})
    assert rows["b"]["fetch_s"] == pytest.approx(40 * BLOCK / (20 * RATE))
    others = asyncio.run(fleets.explain(make_request(chain(50))))
    assert {row["fetch_from"] for row in others["workers"]} == {None}, "another tenant's prompt finds nothing of it"


def test_the_decision_log_tells_what_is_moved() -> None:
    fleets, hashes = Fleets(), chain(50)
    fleets.index.register(mover("a"), hashes[:40], report(draining=True))
    fleets.index.register(mover("b"), load=report())
    fleets.decisions.has_viewers = True

    async def scenario() -> None:
        placement = await fleets.place(hashes)
        assert placement.source is not None

    asyncio.run(scenario())
    news = fleets.decisions.drain()
    assert news is not None
    chosen = news["decisions"][0]["candidates"][0]
    assert (chosen["worker"], chosen["matched_tokens"], chosen["moved_tokens"]) == ("b", 0, 40 * BLOCK)
    assert chosen["fetch_s"] > 0.0


async def test_a_retry_and_a_correction_replace_what_is_recorded() -> None:
    """However many decisions are made: results of one worker never stand with the name of another."""
    fleets = Fleets()
    fleets.index.register(mover("a"), load=report())
    fleets.decisions.has_viewers = True
    for number in range(9):  # the ninth is one too many at once
        fleets.router.closed(await fleets.place(chain(2), request_id=f"r{number}"))
    assert fleets.decisions.find("r8") == []
    fleets.index.register(mover("b"), load=report())
    placement = await fleets.place(chain(2), request_id="r0", excluded=incarnations("a"))
    fleets.router.started(placement, 16)
    [entry] = fleets.decisions.find("r0")
    assert (entry["worker"], entry["found_tokens"]) == ("b", 16)
    fleets.router.corrected(placement, 0)
    fleets.router.closed(placement)
    news = fleets.decisions.drain()
    assert news is not None
    assert (entry["found_tokens"], news["found"]) == (0, {"r0": 0})


@pytest.mark.parametrize(
    ("fetch_rate", "weight"), [(0.0, 1.0), (RATE / 2, 1.0), (2 * RATE, 0.5), (20 * RATE, 0.05), (1e9, 0.04)]
)
def test_an_eviction_costs_what_getting_the_block_back_costs(fetch_rate: float, weight: float) -> None:
    cost = CostModel()
    assert cost.refill_weight(RATE, fetch_rate) == weight


def test_a_copy_costs_a_share_of_computing_it() -> None:
    """However fast the link is."""
    cost = CostModel()
    assert cost.fetch_cost_s(FetchPlan(1000, (), 1000, 0.001), RATE) == pytest.approx(0.04 * 1000 / RATE)
    assert cost.fetch_cost_s(FetchPlan(1000, (1000,), 0, 0.001), RATE) == 0.001, "what is loaded is no copy of a peer's"


@pytest.mark.parametrize(("ends", "num_matched", "num_taken"), [("", 5, 4), ("", 49, 48), ("exact", 5, 5), ("", 1, 0)])
def test_a_match_is_rounded_down_to_blocks_of_the_engine(ends: str, num_matched: int, num_taken: int) -> None:
    member = mover("a", engine_block_size=2 * BLOCK, ends=ends)
    [view] = decided(Candidate(member, report(), num_matched), num_blocks=50).workers
    assert view.matched_tokens == num_taken * BLOCK


def views_of(*loads: tuple[float, float]) -> list[WorkerView]:
    """Return a view for each prefill rate and recent prefill seconds."""
    found = [
        Candidate(member=mover(f"w{at}"), matched_blocks=0, load=report(prefill_tokens_per_s=rate), load_age_s=0.0)
        for at, (rate, _) in enumerate(loads)
    ]
    views = sorted(decided(*found).workers, key=lambda view: view.member.worker_id)
    return [
        msgspec.structs.replace(view, assigned_s=assigned_s) for view, (_, assigned_s) in zip(views, loads, strict=True)
    ]


def test_beta_goes_by_the_load_of_the_workers_of_a_similar_rate() -> None:
    cost = CostModel()
    views = views_of((RATE, 10.0), (2 * RATE, 40.0), (2.5 * RATE, 56.0), (1.2 * RATE, 2.0))
    slow, fast = cost.beta(6.0), cost.beta(48.0)
    assert cost.betas(views, 27.0) == pytest.approx([slow, fast, fast, slow])
    assert cost.betas(views, 13.5) == pytest.approx([cost.beta(3.0), cost.beta(24.0), cost.beta(24.0), cost.beta(3.0)])
    alike = views_of((RATE, 10.0), (1.4 * RATE, 40.0))
    assert cost.betas(alike, 25.0) == [cost.beta(25.0)] * 2, "a fleet of one speed has one"
    assert cost.betas(views_of((RATE, 0.0), (3 * RATE, 0.0)), 0.0) == [0.0, 0.0]


def test_an_idle_slow_worker_beats_a_busy_fast_one() -> None:
    """... with a short queue."""
    cost = CostModel()
    slow, fast = views_of((RATE, 0.0), (2 * RATE, 55.0))
    fast = msgspec.structs.replace(fast, queue_s=0.01)
    at_slow, at_fast = cost.costs_s([slow, fast], cost.betas([slow, fast], 27.5))
    assert at_slow < at_fast
    alike = cost.costs_s([fast, fast], [3.0, 3.0])
    recent_s = cost.assigned_weight * fast.assigned_s
    assert alike[0] == pytest.approx(0.01 + fast.eviction_s + fast.decode_s + 4.0 * fast.prefill_s + recent_s)
