"""Which worker the router chooses, and what it counts."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from cache.records import WorkerLoad
from cache.types import BlockHash, GatewayId, WorkerId
from server.router.types import NoWorkerError
from tests.server.router.fleets import BLOCK, RATE, Fleets, chain, incarnations, make_request, member


async def test_a_match_never_covers_the_whole_prompt(three: Fleets) -> None:
    hashes = chain(4)
    three.index.memory.publish(WorkerId("b"), hashes)
    placement = await three.place(hashes, num_prompt_tokens=4 * BLOCK)
    assert placement.promised_tokens == 4 * BLOCK - 1


async def test_a_prefix_is_left_when_the_queue_costs_more(three: Fleets) -> None:
    three.run_fifo()
    hashes = chain(40)
    three.index.memory.publish(
        WorkerId("b"), hashes[:30], load=WorkerLoad({GatewayId("other"): 9.0}, prefill_tokens_per_s=RATE)
    )
    assert await three.worker(hashes) != "b"


async def row(fleets: Fleets, name: str, hashes: Sequence[BlockHash], **changes: object) -> dict[str, Any]:
    """Return the explanation for one worker."""
    explained = await fleets.explain(make_request(hashes, **changes))
    (found,) = (worker for worker in explained["workers"] if worker["worker"] == name)
    return found


async def test_requests_at_a_worker_include_those_of_other_gateways(three: Fleets) -> None:
    three.index.memory.publish(WorkerId("b"), load=WorkerLoad(num_running=3, num_waiting=2))
    for num_own, expected in ((0, (5, 2)), (4, (5, 4)), (6, (6, 6))):  # what is reported may hold the own among it
        while three.router.scorer.loads.num_outstanding() < num_own:
            await three.place(chain(1), excluded=incarnations("a", "c"))
        b = await row(three, "b", chain(1))
        assert (b["outstanding"], b["waiting"]) == expected


async def test_the_load_of_the_fleet_includes_guarded_workers(three: Fleets) -> None:
    """The work of a draining worker would have gone to the others, and soon will."""
    await three.place(
        [], num_prompt_tokens=90_000, excluded=incarnations("b", "c")
    )  # half of what three do in a minute
    three.index.memory.publish(WorkerId("a"), load=WorkerLoad(prefill_tokens_per_s=RATE, draining=True))
    b = await row(three, "b", [], num_prompt_tokens=1000)
    assert b["cost"] == pytest.approx(2 * b["prefill_s"], rel=0.01)


async def test_a_worker_without_a_measured_rate_has_the_median(three: Fleets) -> None:
    for name, rate in (("a", 100.0), ("b", 500.0), ("c", 10_000.0), ("d", 0.0)):
        three.index.register(member(name), load=WorkerLoad(prefill_tokens_per_s=rate))
    d = await row(three, "d", [], num_prompt_tokens=10_000)
    assert d["prefill_s"] == pytest.approx(20.0, rel=0.01)


async def test_the_hit_rate_of_a_worker_decays(three: Fleets) -> None:
    placement = await three.place(chain(40), num_prompt_tokens=800)
    worker_id = placement.worker.worker_id
    assert three.router.scorer.loads.hit_rate(worker_id) is None
    for _ in range(2):  # counted once
        three.router.started(placement, 200)
    assert three.router.scorer.loads.hit_rate(worker_id) == pytest.approx(0.25)
    three.router.closed(placement)
    assert three.index_state()["recall"] == 0.0, "nothing was predicted"
    three.clock.now_s += 3600.0
    assert three.router.scorer.loads.hit_rate(worker_id) is None


async def test_a_mostly_cached_prompt_passes_a_long_prefill(three: Fleets) -> None:
    """At a FIFO worker it would wait for nine seconds."""
    hashes = chain(40)
    three.index.memory.publish(
        WorkerId("b"), hashes[:30], load=WorkerLoad({GatewayId("other"): 9.0}, prefill_tokens_per_s=RATE)
    )
    assert await three.worker(hashes) == "b"
    crowd = [await three.place(chain(1), excluded=incarnations("a", "c")) for _ in range(40)]
    assert await three.worker(hashes) != "b", "forty short ones would all pass"
    for placement in crowd:
        three.router.closed(placement)
    assert await three.worker(hashes) == "b"


async def test_a_burst_spreads_over_workers_that_share_their_steps(three: Fleets) -> None:
    placements = [await three.place(chain(20)) for _ in range(30)]
    chosen = [placement.worker.worker_id for placement in placements]
    assert {chosen.count(name) for name in "abc"} == {10}
    for placement in placements:
        three.router.started(placement, 0)
        three.clock.now_s += 0.1
        three.router.first_token(placement)
        three.router.closed(placement)
    assert three.router.scorer.loads.num_outstanding() == 0
    explained = await three.explain(make_request(chain(20)))
    assert [(worker["wait_s"], worker["num_displaced"]) for worker in explained["workers"]] == [(0.0, 0.0)] * 3


async def serve(fleets: Fleets, seconds: float, num_blocks: int = 40) -> str:
    """One request from beginning to end; who had it."""
    placement = await fleets.place(chain(num_blocks))
    fleets.router.started(placement, 0)
    fleets.clock.now_s += seconds
    fleets.router.first_token(placement)
    fleets.router.closed(placement)
    return placement.worker.worker_id


async def test_a_holder_with_a_full_pool_is_avoided(three: Fleets) -> None:
    """Nothing is queued there, but the request would wait until another has ended."""
    hashes = chain(40)
    await serve(three, 4.0)

    def hold(num_free_blocks: int) -> None:
        for name in "abc":
            free = num_free_blocks if name == "b" else 100
            load = WorkerLoad(prefill_tokens_per_s=RATE, num_free_blocks=free, num_blocks=100)
            three.index.memory.publish(WorkerId(name), hashes[:35] if name == "b" else (), load=load)
        three.clock.now_s += 0.01

    hold(90)
    assert await three.worker(hashes) == "b"
    hold(2)
    assert await three.worker(hashes) != "b"
    b = await row(three, "b", hashes)
    assert b["wait_s"] == 0.0
    assert b["kv_wait_s"] > 0.0


async def test_blocks_are_counted_whole_and_held_until_the_first_close(three: Fleets) -> None:
    """A prompt that fills its pool to the last, begun block waits for as long as blocks are held."""
    placement = await three.place(chain(40))
    three.router.started(placement, 0)
    three.clock.now_s += 4.0
    three.router.closed(placement)
    three.clock.now_s += 30.0
    three.router.closed(placement)
    for name in "abc":
        load = WorkerLoad(prefill_tokens_per_s=RATE, num_free_blocks=0, num_blocks=41)
        three.index.memory.publish(WorkerId(name), load=load)
    assert (await row(three, "b", chain(40)))["kv_wait_s"] == pytest.approx(4.0)


async def test_a_worker_measured_as_slow_is_tried_again(three: Fleets) -> None:
    three.index.memory.publish(WorkerId("a"), load=WorkerLoad(prefill_tokens_per_s=RATE / 20))

    async def who(num_requests: int) -> list[str]:
        served = []
        for _ in range(num_requests):
            for name in "abc":
                three.index.memory.publish(WorkerId(name))
            served.append(await serve(three, 2.0))
        return served

    assert "a" not in await who(10), "the others are idle, and twenty times as fast"
    assert "a" in await who(300)


@pytest.mark.parametrize("percent", [0, 3, 8])
@pytest.mark.parametrize("num_workers", [2, 3])
async def test_rates_some_percent_apart_share_cold_prompts(num_workers: int, percent: int) -> None:
    """Two equal engines measure as far apart. The one that looked faster got each prompt of an idle fleet."""
    fleets, rng, served = Fleets(), random.Random(percent), Counter[str]()
    names = "abc"[:num_workers]
    for name in names:
        fleets.index.register(member(name))
    for _ in range(100 * num_workers):
        for at, name in enumerate(names):
            rate = RATE * (1.0 - 0.01 * percent * at - 0.001 * rng.random())
            report = WorkerLoad(prefill_tokens_per_s=rate, prefill_fixed_s=0.05)
            fleets.index.memory.publish(WorkerId(name), load=report)
        served[await serve(fleets, 60.0, num_blocks=rng.randrange(30, 300))] += 1
    assert min(served[name] for name in names) >= 80, served
    assert max(served.values()) <= 120, served


@pytest.mark.parametrize("rate", [5e-324, 1e-306, 1e12])
async def test_an_impossible_rate_stops_no_request(rate: float) -> None:
    """Anybody who writes to Redis could report it."""
    fleets = Fleets()
    fleets.index.register(member("a"))
    fleets.index.memory.publish(WorkerId("a"), load=WorkerLoad(prefill_tokens_per_s=rate))
    for _ in range(4):
        fleets.clock.now_s += 1.0
        placement = await fleets.place(chain(20), affinity_key="k")
        fleets.router.started(placement, 0)


async def test_a_burst_spreads_over_fifo_workers(three: Fleets) -> None:
    three.run_fifo()
    chosen = [(await three.place(chain(20))).worker.worker_id for _ in range(30)]
    assert {chosen.count(name) for name in "abc"} == {10}


async def test_a_shared_system_prompt_does_not_herd(three: Fleets) -> None:
    """Requests share 10 blocks that only one worker holds: the others still get their part."""
    system = chain(10)
    three.index.memory.publish(WorkerId("a"), system)
    chosen = [(await three.place(system + chain(30))).worker.worker_id for _ in range(60)]
    assert max(chosen.count(name) for name in "abc") <= 24


async def test_pending_prefixes_count_as_cached(three: Fleets) -> None:
    hashes = chain(40)
    first = await three.place(hashes)
    three.router.started(first, 0)
    three.router.first_token(first)
    again = await three.place(hashes + chain(1))
    assert again.worker.worker_id == first.worker.worker_id
    assert again.promised_tokens == 40 * BLOCK
    three.router.closed(first)
    three.router.closed(again)
    three.clock.now_s += 1.0
    for name in "abc":
        three.index.memory.publish(WorkerId(name))
    assert (await three.place(hashes)).promised_tokens == 0, "the index knows better"


async def test_the_blocks_of_a_failed_request_do_not_count(three: Fleets) -> None:
    hashes = chain(40)
    three.router.closed(await three.place(hashes))
    assert (await three.place(hashes)).promised_tokens == 0


async def test_equal_costs_are_drawn_at_random(three: Fleets) -> None:
    assert {await three.worker([], num_prompt_tokens=0) for _ in range(50)} == set("abc")


async def test_guards_are_per_candidate(three: Fleets) -> None:
    hashes = chain(40)
    three.index.memory.publish(WorkerId("b"), hashes, load=WorkerLoad(draining=True))
    assert {await three.worker(hashes) for _ in range(20)} <= {"a", "c"}
    explained = await three.explain(make_request(hashes))
    assert {w["worker"]: w["guard"] for w in explained["workers"]} == {"a": None, "b": "draining", "c": None}


@pytest.mark.parametrize("num_waiting", [1024, 5000, 10**6])
async def test_a_worker_alone_says_when_its_queue_is_full(three: Fleets, num_waiting: int) -> None:
    """It counts requests and shares its limit between tenants; a load counts sequences of everybody."""
    for name in "abc":
        three.index.memory.publish(WorkerId(name), load=WorkerLoad(num_waiting=num_waiting))
    assert await three.worker(chain(3)) in "abc"


async def test_excluded_workers_and_other_numerics_are_not_chosen(three: Fleets) -> None:
    three.index.register(member("c", numerics="cuda"))
    assert await three.worker(chain(3), numerics="cuda") == "c"
    assert await three.worker(chain(3), excluded=incarnations("a", "c")) == "b"
    with pytest.raises(NoWorkerError):
        await three.place(chain(3), numerics="cuda", excluded=incarnations("c"))


async def test_a_context_too_short_for_the_prompt_is_not_chosen(three: Fleets) -> None:
    three.index.register(member("c", max_model_len=48))
    assert {await three.worker(chain(3)) for _ in range(20)} == {"a", "b"}, "49 tokens"
    assert await three.worker(chain(2), excluded=incarnations("a", "b")) == "c"


async def test_no_worker_error_says_what_each_worker_lacks(three: Fleets) -> None:
    with pytest.raises(NoWorkerError, match="no worker of model 'x' is known"):
        await three.place(chain(1), model="x")
    for name in "abc":
        three.index.memory.publish(WorkerId(name), load=WorkerLoad(draining=True))
    with pytest.raises(NoWorkerError, match="none of 3 workers can take the request: draining"):
        await three.place(chain(1))


async def test_a_failed_worker_is_avoided_unless_it_is_the_only_one(three: Fleets) -> None:
    hashes = chain(40)
    three.index.memory.publish(WorkerId("b"), hashes)
    three.fleet.report_failure(WorkerId("b"))  # unknown as yet: no effect
    await three.fleet.poll()
    three.fleet.report_failure(WorkerId("b"))
    assert await three.worker(hashes) != "b"
    assert {await three.worker(chain(40), excluded=incarnations("a", "c")) for _ in range(10)} == {"b"}
    three.clock.now_s += 1.1
    assert await three.worker(hashes) == "b"
    three.fleet.report_failure(WorkerId("b"))
    assert await three.worker(hashes) != "b"
    three.router.first_token(await three.place(hashes, excluded=incarnations("a", "c")))
    assert await three.worker(hashes) == "b", "a first token closes its breaker"


async def test_explain_changes_nothing(three: Fleets) -> None:
    hashes = chain(40)
    three.index.memory.publish(WorkerId("b"), hashes[:30])
    first = await three.explain(make_request(hashes))
    assert first == await three.explain(make_request(hashes))
    assert first["choice"] == ["b"]
    costs = {w["worker"]: w["cost"] for w in first["workers"]}
    assert costs["b"] < costs["a"] == costs["c"]
    placement = await three.place(hashes)
    assert (placement.worker.worker_id, placement.promised_tokens) == ("b", 30 * BLOCK)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown routing policy 'best'"):
        Fleets(policy="best")


@pytest.mark.parametrize(("held_s", "room_s"), [(60.0, 0.0), (3.0, 0.0), (1.0, 0.2 * 0.5 * 2.0)])
async def test_room_in_a_pool_has_a_price_after_short_turns(three: Fleets, held_s: float, room_s: float) -> None:
    """An eviction costs a prefill, however long requests hold their blocks."""
    hashes = chain(40)
    three.index.memory.publish(WorkerId("b"), hashes[:30])

    async def price() -> float:
        load = WorkerLoad(prefill_tokens_per_s=RATE, num_free_blocks=50, num_blocks=100)
        three.index.memory.publish(WorkerId("a"), load=load)
        three.clock.now_s += 0.01
        return float((await row(three, "a", chain(40)))["eviction_s"])

    placement = await three.place(hashes)
    before = await price()
    three.router.started(placement, 30 * BLOCK)
    three.clock.now_s += held_s
    three.router.closed(placement)
    assert before > 0.0
    assert await price() == pytest.approx(before + room_s)


async def test_a_new_conversation_leaves_a_filling_pool(three: Fleets) -> None:
    """All stayed with the system prompt, and computed long prompts again when the pool was full."""
    system = chain(8)
    for name, num_free, held in (("a", 100, []), ("b", 20, system), ("c", 100, [])):
        load = WorkerLoad(prefill_tokens_per_s=RATE, num_free_blocks=num_free, num_blocks=100)
        three.index.memory.publish(WorkerId(name), held, load=load)
    for _ in range(3):
        done = await three.place(system)
        three.router.started(done, 7 * BLOCK)
        three.clock.now_s += 1.0
        three.router.closed(done)
    assert (await three.place([*system, *chain(1)])).worker.worker_id != "b"


async def test_a_holder_needs_room_for_its_free_blocks_too(three: Fleets) -> None:
    """Blocks that no running request holds are free in a report. Only what all workers hold is in use anyway."""
    hashes = chain(40)
    done = await three.place(chain(40))
    three.router.started(done, 0)
    three.clock.now_s += 4.0
    three.router.closed(done)
    for name, held in (("a", 10), ("b", 38), ("c", 10)):
        load = WorkerLoad(prefill_tokens_per_s=RATE, num_free_blocks=25, num_blocks=100, num_running=4)
        three.index.memory.publish(WorkerId(name), hashes[:held], load=load)
    three.clock.now_s += 2.0
    holder, other = await row(three, "b", hashes), await row(three, "a", hashes)
    assert holder["kv_wait_s"] == other["kv_wait_s"] > 0.0, "75 are held, and 30 more do not fit"
    assert holder["eviction_s"] == other["eviction_s"] == holder["kv_wait_s"], "nothing has come back"
    three.router.closed(await three.place(hashes))
    holder, other = await row(three, "b", hashes), await row(three, "a", hashes)
    refill_s = (other["eviction_s"] - holder["eviction_s"]) / (28 * BLOCK) * (2 * BLOCK + 1)
    turns = 1.0 + refill_s * RATE / (2 * BLOCK + 1)
    assert holder["eviction_s"] == pytest.approx(refill_s + turns * holder["kv_wait_s"]), "each time it comes back"


async def test_a_holder_evicts_only_for_new_blocks(three: Fleets) -> None:
    hashes = chain(40)
    for name, held in (("a", 10), ("b", 35), ("c", 10)):
        load = WorkerLoad(prefill_tokens_per_s=RATE, num_free_blocks=50, num_blocks=100)
        three.index.memory.publish(WorkerId(name), hashes[:held], load=load)
    three.clock.now_s += 0.01
    three.router.closed(await three.place(hashes))  # shows that prompts come back
    holder_s, other_s = [float((await row(three, name, hashes))["eviction_s"]) for name in "ba"]
    num_tokens = 40 * BLOCK + 1
    assert other_s > 0.0
    assert holder_s / other_s == pytest.approx((num_tokens - 35 * BLOCK) / (num_tokens - 10 * BLOCK))


async def test_pending_blocks_do_not_count_at_a_worker_with_ends() -> None:
    """The positions at which hits in them may stop are not known yet; explain names the kind of its ends."""
    fleets = Fleets()
    fleets.index.register(member("a", ends="inexact"))
    hashes = chain(40)
    placement = await fleets.place(hashes)
    assert placement.worker.worker_id == "a"
    found = await row(fleets, "a", hashes)
    assert (found["ends"], found["pending_tokens"], found["matched_tokens"]) == ("inexact", 0, 0)
    fleets.router.first_token(placement)
    fleets.index.away = True
    assert (await row(fleets, "a", hashes))["matched_tokens"] == 0


async def test_the_workers_needed_follow_requests_and_reports(three: Fleets) -> None:
    """The workers' counters rise by four seconds in a second; each request computes half a second."""
    num_prompt_tokens = int(RATE / 2)
    for step in range(60):
        three.clock.now_s += 5.0
        for name in "abc":
            load = WorkerLoad(assigned_prefill_s=4.0 * 5.0 * step / 3, prefill_tokens_per_s=RATE)
            three.index.memory.publish(WorkerId(name), load=load)
        placement = await three.place([], num_prompt_tokens=num_prompt_tokens)
        three.router.started(placement, 0)
        three.clock.now_s += 0.5
        three.router.first_token(placement)
        three.router.closed(placement)
        await three.fleet.poll()
        following = asyncio.create_task(three.workers_needed.follow(three.router))
        await asyncio.sleep(0)
        following.cancel()
    needed = three.workers_needed.needed("m")
    assert needed is not None
    assert 5 <= needed <= 7
