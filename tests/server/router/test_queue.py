"""Requests wait at the gateway while their wait at workers would be long, and are then placed by the index."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.records import WorkerLoad
from cache.types import Epoch, GatewayId, WorkerId, WorkerIncarnation
from server.router.placement import Decision, Placement
from server.router.queue import FULL_S, WAIT_SHARE, RequestQueue
from server.router.types import NoWorkerError, QueueFullError, RouteRequest
from server.workers.connection import WorkerRefused
from tests.server.router.fleets import RATE, Clock, Fleets, chain, incarnations, make_request, member
from tests.waiting import HANG_S, until
from worker.wire import Failed

OTHER = GatewayId("other")


def request(tenant: str = "", priority: int = 0, num_prompt_tokens: int = 100) -> RouteRequest:
    return make_request([], tenant=tenant, priority=priority, num_prompt_tokens=num_prompt_tokens)


@pytest.fixture
def fleets() -> Iterator[Fleets]:
    """Two workers that run prefills one by one, each with ten seconds of another gateway's."""
    fleets = Fleets(hold_s=3.0)
    for name in "ab":
        fleets.index.register(member(name, prefill_order="fifo"))
        queue(fleets, name, 10.0)
    return fleets


def queue(fleets: Fleets, name: str, seconds: float) -> None:
    load = WorkerLoad({OTHER: seconds}, prefill_tokens_per_s=RATE)
    fleets.index.memory.publish(WorkerId(name), load=load)


async def held(fleets: Fleets, num: int) -> None:
    await until(lambda: len(fleets.router.queue) == num)


def pass_time(fleets: Fleets, seconds: float, left_s: float = 0.0) -> None:
    """Advance the clock, and leave `left_s` of prefill at each worker."""
    fleets.clock.now_s += seconds
    for name in "ab":
        queue(fleets, name, left_s)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(-1, 1), st.integers(1, 1000)), min_size=1, max_size=40))
def test_priorities_come_first_and_then_tenants_in_turn(arrivals: list[tuple[str, int, int]]) -> None:
    queue = RequestQueue[int](1.0)
    for number, (tenant, priority, num_tokens) in enumerate(arrivals):
        queue.hold(number, request(tenant, priority, num_tokens), 9.0, 0.0)
    order = [each.item for each in queue.due(100.0)]
    assert sorted(order) == list(range(len(arrivals)))
    assert [arrivals[i][1] for i in order] == sorted(priority for _, priority, _ in arrivals)
    for tenant in "abc":
        own = [i for i in order if arrivals[i][0] == tenant]
        assert own == sorted(own, key=lambda i: (arrivals[i][1], i)), "a tenant's own requests keep their order"
    if len({priority for _, priority, _ in arrivals}) == 1:
        # While two tenants have requests, what they got differs by no more than one request of each.
        got, left = Counter[str](), Counter(tenant for tenant, _, _ in arrivals)
        largest = max(num_tokens for *_, num_tokens in arrivals)
        for i in order:
            tenant, _, num_tokens = arrivals[i]
            assert all(got[tenant] - got[other] <= largest for other in left if left[other])
            got[tenant] += num_tokens
            left[tenant] -= 1


@given(st.floats(0.0, 1000.0), st.floats(0.0, 1000.0))
def test_a_request_stays_while_its_wait_would_be_long(wait_s: float, at_s: float) -> None:
    """Long, that is, compared with its wait so far."""
    queue = RequestQueue[str](3.0)
    held = queue.hold("x", request(), 50.0, 0.0)
    stays = queue.stays(held, wait_s, at_s)
    assert stays == (wait_s > max(3.0, WAIT_SHARE * at_s))
    if stays:
        # A worker computes a second in a second, so until then the answer cannot change; then it may.
        sooner_s = at_s + 0.99 * (held.due_s - at_s)
        if held.due_s - at_s > 0.06:
            assert queue.stays(held, wait_s - (sooner_s - at_s), sooner_s)
    queue.remove(held)
    assert not len(queue)


def test_weights_divide_the_turns() -> None:
    """A light tenant with a heavy one of weight 1:4 gets a fifth of the prompt tokens, within 5 %."""
    queue = RequestQueue[str](1.0)
    for number in range(400):
        for tenant, weight in (("light", 1.0), ("heavy", 4.0)):
            waiting = make_request([], tenant=tenant, num_prompt_tokens=50 + number % 100, weight=weight)
            queue.hold(tenant, waiting, 9.0, 0.0)
    first = [each.item for each in queue.due(100.0)[:400]]
    assert first.count("light") == pytest.approx(80, rel=0.05)


@pytest.mark.parametrize("first", [{}, {"is_retry": True}, {"priority": -1}, {"model": "other"}])
def test_one_that_leaves_early_takes_no_turns(first: dict[str, object]) -> None:
    """An abort, a retry, a priority or another model's: the tenant's requests before it still wait."""
    queue = RequestQueue[str](1.0)
    for _ in range(100):
        queue.hold("flood", request("flood"), 9.0, 0.0)
    queue.remove(queue.hold("first", make_request([], tenant="flood", **first), 9.0, 0.0))
    queue.hold("other", request("other"), 9.0, 0.0)
    assert [each.item for each in queue.due(100.0)].index("other") <= 1


def test_a_tenant_whose_clients_leave_pays_nothing_for_them() -> None:
    """A client that gives up and asks again would go further back each time, and be served last."""
    queue = RequestQueue[str](1.0)
    for _ in range(100):
        queue.hold("flood", request("flood"), 9.0, 0.0)
    gone = [queue.hold("gone", request("other"), 9.0, 0.0) for _ in range(20)]
    queue.hold("last", request("other"), 9.0, 0.0)
    for each in gone:
        queue.remove(each)
    queue.hold("again", request("other"), 9.0, 0.0)
    order = [each.item for each in queue.due(100.0)]
    assert (order.index("last"), order.index("again")) == (1, 3)


def test_a_tenant_that_comes_late_is_given_no_past_turns() -> None:
    """Although a request of low priority, or of another model, has waited from the start."""
    queue = RequestQueue[str](1.0)
    queue.hold("low", request("low", priority=1), 9.0, 0.0)
    queue.hold("other model", make_request([], tenant="low", model="other"), 9.0, 0.0)
    flood = [queue.hold("flood", request("flood"), 9.0, 0.0) for _ in range(20)]
    for held in flood[:10]:
        assert not queue.stays(held, 0.0, 0.0)
        queue.remove(held)
    for _ in range(10):
        queue.hold("late", request("late"), 9.0, 0.0)
    order = [each.item for each in queue.due(100.0) if each.item in ("flood", "late")]
    assert order == ["late", *["flood", "late"] * 9, "flood"], "its first turn is the latest that was served"


def test_priorities_that_have_left_are_forgotten() -> None:
    """A client chooses them, and others may wait on."""
    queue = RequestQueue[str](1.0)
    queue.hold("waits", request(), 9.0, 0.0)
    for priority in range(1, 100):
        held = queue.hold("leaves", request(priority=priority), 9.0, 0.0)
        assert not queue.stays(held, 0.0, 0.0)
        queue.remove(held)
    assert {*queue._turns} == {(request().model, 0)}


def test_a_short_wait_or_none_allowed_holds_nothing() -> None:
    assert RequestQueue[str](3.0).holds(request(), 3.1)
    assert not RequestQueue[str](3.0).holds(request(), 3.0)
    assert not RequestQueue[str](0.0).holds(request(), 1e9)


def test_retries_go_before_new_requests_of_any_tenant() -> None:
    queue = RequestQueue[str](1.0)
    for number in range(3):
        queue.hold(f"new {number}", request("a", priority=-1), 2.0, 0.0)
    queue.hold("retry", make_request([], tenant="b", is_retry=True), 50.0, 0.0)
    assert [each.item for each in queue.due(0.06)] == ["retry"]
    assert [each.item for each in queue.due(1.01)] == ["retry", "new 0", "new 1", "new 2"]


def test_the_first_of_each_model_is_decided_at_every_turn() -> None:
    queue = RequestQueue[str](1.0)
    for item in ("m", "n", "m later", "n later"):
        queue.hold(item, make_request([], model=item[0]), 50.0, 0.0)
    assert [each.item for each in queue.due(0.06)] == ["m", "n"]


A, B = (WorkerId("a"), Epoch("1")), (WorkerId("b"), Epoch("1"))


def refusal(retry_after_s: float | None) -> WorkerRefused:
    return WorkerRefused(429, Failed("queue_full", "full", retryable=True, retry_after_s=retry_after_s))


def test_only_the_refused_tenant_stays_away_and_only_for_a_while() -> None:
    clock = Clock()
    queue = RequestQueue[None](clock=clock)
    first, second = refusal(2.0), refusal(0.01)
    queue.refused(A, "flood", first)
    queue.refused(B, "flood", second)
    assert queue.full("flood") == {A: first, B: second}
    assert queue.full("weak") == {}
    clock.now_s += 0.02
    assert queue.full("flood") == {A: first}, "B has room sooner"
    clock.now_s += FULL_S
    assert queue.full("flood") == {}
    assert not queue._full, "nothing is kept of a tenant that may never come again"


def test_full_workers_of_tenants_that_never_come_again_go() -> None:
    now_s = [0.0]
    queue: RequestQueue[int] = RequestQueue(clock=lambda: now_s[0])
    for number in range(1000):
        queue.refused(A, f"tenant-{number}", refusal(1.0))
        now_s[0] += FULL_S / 10
    assert len(queue._full) <= 12


def test_each_tenant_fills_its_own_share() -> None:
    clock = Clock()
    queue = RequestQueue[None](max_tokens=1000, clock=clock)
    for _ in range(10):
        queue.enter("heavy", 100)
    with pytest.raises(QueueFullError) as refused:
        queue.enter("heavy", 1)
    assert refused.value.retry_after_s == 1.0, "nothing is known of the pace"
    for _ in range(5):
        queue.enter("weak", 100)
    with pytest.raises(QueueFullError):
        queue.enter("weak", 1)
    clock.now_s += 1
    for tenant in ["heavy"] * 10 + ["weak"] * 5:
        queue.leave(tenant, 100)
    assert queue.num_tokens == 0
    queue.enter("heavy", 5000)
    queue.leave("heavy", 5000)
    queue.enter("heavy", 900)
    with pytest.raises(QueueFullError) as refused:
        queue.enter("heavy", 200)
    assert refused.value.retry_after_s == pytest.approx(900 / 650)


def test_a_long_prompt_that_waits_on_stops_no_turns() -> None:
    """A tenant whose requests pass it pays nothing for what no other tenant wanted."""
    queue: RequestQueue[str] = RequestQueue(hold_s=1.0, clock=lambda: 0.0)
    queue.hold("long", make_request([], tenant="long", num_prompt_tokens=100_000), 60.0, 0.0)
    for _ in range(50):
        passing = queue.hold("early", make_request([], tenant="early", num_prompt_tokens=1000), 2.0, 0.0)
        assert not queue.stays(passing, 0.0, 0.0)
        queue.remove(passing)
    queue.hold("next", make_request([], tenant="early", num_prompt_tokens=1000), 2.0, 0.0)
    for _ in range(60):
        queue.hold("flood", make_request([], tenant="late", num_prompt_tokens=1000), 2.0, 0.0)
    assert [held.item for held in queue.due(1e9)].index("next") <= 2


async def test_a_held_request_goes_where_the_index_says_by_then(fleets: Fleets) -> None:
    hashes = chain(40)
    waiting = asyncio.create_task(fleets.place(hashes))
    await held(fleets, 1)
    assert fleets.router.scorer.loads.num_outstanding() == 0
    assert fleets.router.queue.prefills_s("m") == [pytest.approx(0.65, abs=0.02)]
    fleets.index.memory.publish(WorkerId("b"), hashes[:30])
    pass_time(fleets, 8.0, left_s=1.0)
    placement = await asyncio.wait_for(waiting, HANG_S)
    assert placement.worker.worker_id == "b"
    assert placement.promised_tokens == 480
    assert len(fleets.router.queue) == 0


async def test_a_held_request_may_go_to_a_worker_that_was_full(fleets: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not while it is still full, nor to one that has failed it."""
    fleets.index.register(member("c", prefill_order="fifo"))
    full, excluded, decided = incarnations("a"), incarnations("a", "c"), list[frozenset[WorkerIncarnation]]()
    refusal = WorkerRefused(429, Failed("queue_full", "", retryable=True, retry_after_s=60.0))
    fleets.router.queue.refused(*full, "", refusal)
    decide = fleets.router.decide

    async def recorded(request: RouteRequest) -> Decision:
        decided.append(request.excluded)
        return await decide(request)

    monkeypatch.setattr(fleets.router, "decide", recorded)
    waiting = asyncio.create_task(fleets.place(chain(40), excluded=excluded, full=full))
    await until(lambda: len(decided) == 3)
    fleets.clock.now_s += 8.0
    queue(fleets, "a", 0.0)
    queue(fleets, "b", 60.0)
    assert (await asyncio.wait_for(waiting, HANG_S)).worker.worker_id == "a"
    assert (decided[2], decided[-1]) == (excluded, incarnations("c"))


async def test_a_short_queue_an_affinity_and_a_budget_hold_nothing(fleets: Fleets) -> None:
    hard = {"affinity_key": "s", "hard_affinity": True}
    for changes in ({"ttft_budget_s": 60.0}, hard, {"numerics": member("a").numerics}):
        assert (await fleets.place(chain(4), **changes)).worker.worker_id in "ab"
    queue(fleets, "a", 2.0)
    fleets.clock.now_s += 0.01
    queue(fleets, "a", 2.0)
    assert (await asyncio.wait_for(fleets.place(chain(8)), HANG_S)).worker.worker_id == "a"


async def test_a_worker_that_joins_gets_what_is_held_at_once(fleets: Fleets) -> None:
    """Although the wait at the others is still long."""
    waiting = asyncio.create_task(fleets.place(chain(4)))
    await held(fleets, 1)
    fleets.clock.now_s += 0.1
    fleets.index.register(member("c", prefill_order="fifo"))
    assert (await asyncio.wait_for(waiting, HANG_S)).worker.worker_id == "c"


async def test_tenants_take_turns_when_places_come_free(fleets: Fleets) -> None:
    placed: list[str] = []

    async def place(tenant: str) -> None:
        placement = await fleets.place([], num_prompt_tokens=4000, tenant=tenant)
        placed.append(tenant)
        fleets.router.closed(placement)

    tasks = [asyncio.create_task(place(tenant)) for tenant in "hhhhh"]
    await held(fleets, 5)
    tasks.append(asyncio.create_task(place("light")))
    await held(fleets, 6)
    for num_placed in range(1, 7):
        fleets.clock.now_s += 10.0
        queue(fleets, "a", 0.0)
        queue(fleets, "b", 60.0)
        await until(lambda num=num_placed: len(placed) >= num)
    await asyncio.gather(*tasks)
    assert placed.index("light") <= 2


async def test_a_client_that_leaves_leaves_nothing_behind(fleets: Fleets) -> None:
    waiting = asyncio.create_task(fleets.place(chain(40)))
    await held(fleets, 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert len(fleets.router.queue) == 0
    assert fleets.router.scorer.loads.num_outstanding() == 0


async def test_a_placement_that_comes_as_its_client_leaves_is_closed(fleets: Fleets) -> None:
    waiting = asyncio.create_task(fleets.place(chain(40)))
    await held(fleets, 1)
    (waiting_for,) = fleets.router.queue._held
    decided: asyncio.Future[Placement] = waiting_for.item

    def place_and_leave(placement: Placement) -> None:
        decided.set_result(placement)
        waiting.cancel()

    waiting_for.item = SimpleNamespace(done=decided.done, set_result=place_and_leave)
    pass_time(fleets, 10.0)
    await asyncio.gather(waiting, return_exceptions=True)
    assert waiting.cancelled()
    assert decided.result().worker.worker_id in "ab"
    assert fleets.router.scorer.loads.num_outstanding() == 0


async def test_a_decision_that_fails_ends_no_other_wait(fleets: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = (asyncio.create_task(fleets.place(chain(40))) for _ in range(2))
    await held(fleets, 2)
    decide = fleets.router.decide

    async def fail_once(*arguments: Any) -> Decision:
        monkeypatch.setattr(fleets.router, "decide", decide)
        raise RuntimeError("a defect")

    monkeypatch.setattr(fleets.router, "decide", fail_once)
    pass_time(fleets, 10.0)
    ended = await asyncio.wait_for(asyncio.gather(first, second, return_exceptions=True), HANG_S)
    assert [type(each) for each in ended].count(RuntimeError) == 1
    assert len(fleets.router.queue) == 0


async def test_the_last_worker_goes_while_a_request_is_held(fleets: Fleets) -> None:
    waiting = asyncio.create_task(fleets.place(chain(40)))
    await held(fleets, 1)
    fleets.clock.now_s += 10.0
    for name in "ab":
        fleets.index.memory.publish(WorkerId(name), load=WorkerLoad(draining=True))
    with pytest.raises(NoWorkerError, match="draining"):
        await asyncio.wait_for(waiting, HANG_S)
    assert len(fleets.router.queue) == 0
