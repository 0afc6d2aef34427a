"""A budget for the time to the first token: a constraint on the workers, never a new cost."""

from __future__ import annotations

import pytest

from cache.records import WorkerLoad
from cache.types import GatewayId, WorkerId
from server.router.types import NoWorkerError, TtftBudgetError
from tests.server.router.fleets import RATE, Fleets, chain, member


async def test_the_best_worker_within_the_budget_is_chosen(three: Fleets) -> None:
    """The holder costs least, but two seconds of prefills wait there."""
    hashes = chain(200)
    load = WorkerLoad({GatewayId("other"): 2.0}, prefill_tokens_per_s=RATE)
    three.index.memory.publish(WorkerId("b"), hashes[:180], load=load)
    assert await three.worker(hashes) == "b"
    assert await three.worker(hashes, ttft_budget_s=3.0) == "b"
    two = Fleets()
    for name in "ab":
        two.index.register(member(name, prefill_order="fifo"))
    two.index.memory.publish(WorkerId("b"), hashes[:180], load=load)
    assert await two.worker(hashes) == "b"
    with pytest.raises(TtftBudgetError) as caught:
        await two.worker(hashes, ttft_budget_s=2.0)
    assert dict(caught.value.headers())[b"x-headstart-predicted-ttft"].startswith(b"2.3")
    two.index.memory.publish(WorkerId("a"), hashes[:150])
    assert await two.worker(hashes, ttft_budget_s=1.0) == "a"


async def test_a_missed_budget_places_nothing(three: Fleets) -> None:
    """The error names the earliest prediction."""
    with pytest.raises(TtftBudgetError, match=r"predicted after 1\.61 s, and the budget is 0\.5 s"):
        await three.place(chain(100), ttft_budget_s=0.5)
    assert three.router.scorer.loads.num_outstanding() == 0


async def test_without_a_worker_the_budget_is_not_blamed(three: Fleets) -> None:
    for name in "abc":
        three.index.memory.publish(WorkerId(name), load=WorkerLoad(draining=True))
    with pytest.raises(NoWorkerError, match="draining") as caught:
        await three.place(chain(100), ttft_budget_s=0.5)
    assert not isinstance(caught.value, TtftBudgetError)


async def test_the_prediction_of_an_idle_worker_is_the_prefill(three: Fleets) -> None:
    placement = await three.place(chain(100))
    assert placement.predicted_ttft_s == pytest.approx(1.611)
    three.router.started(placement, 0)
    three.clock.now_s += 2 * placement.predicted_ttft_s
    three.router.first_token(placement)
    assert three.metrics.predicted_over_actual_ttft.sum() == pytest.approx(0.5)


async def test_an_answer_as_a_whole_has_no_time_to_first_token(three: Fleets) -> None:
    placement = await three.place(chain(100), is_whole=True)
    three.router.started(placement, 0)
    three.clock.now_s += 60.0
    three.router.first_token(placement)
    assert three.metrics.predicted_over_actual_ttft.cumulative()[-1] == 0


async def test_a_guessed_prediction_refuses_nothing(three: Fleets) -> None:
    """A worker that has measured no rate may be fast."""
    for name in "abc":
        three.index.memory.publish(WorkerId(name), load=WorkerLoad())
    assert await three.worker(chain(5000), ttft_budget_s=0.5) in "abc"


async def test_one_long_answer_does_not_predict_the_next(three: Fleets) -> None:
    """How long blocks are held is unknown until some requests have ended."""
    placement = await three.place(chain(10))
    three.router.started(placement, 0)
    three.router.first_token(placement)
    three.clock.now_s += 600.0
    three.router.closed(placement)
    full = WorkerLoad(prefill_tokens_per_s=RATE, num_blocks=100, num_free_blocks=0, num_running=1)
    for name in "abc":
        three.index.memory.publish(WorkerId(name), load=full)
    assert await three.worker(chain(20), ttft_budget_s=5.0) in "abc"
