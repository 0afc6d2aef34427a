"""Workers with different features: the router skips those that cannot serve a request, and reports why none can."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cache.records import WorkerLoad
from cache.types import GatewayId, WorkerId
from server.router.load_tracker import FifoLoadEstimate, WorkerLoadEstimate
from server.router.types import NoWorkerError
from tests.server.router.fleets import RATE, Fleets, chain, member
from worker.common.capabilities import EMBEDDINGS, IMAGES, TOKENS, adapter_names, adapters_in, needs_of
from worker.wire import Embed, EngineCall


def fleet_of(**capabilities: tuple[str, ...]) -> Fleets:
    fleets = Fleets()
    for name, able in capabilities.items():
        fleets.index.register(member(name, capabilities=able))
    return fleets


NAMES = (TOKENS, EMBEDDINGS, IMAGES, "/v1/chat/completions", "adapter:pirate", "of a newer version")


@given(st.lists(st.sets(st.sampled_from(NAMES)), min_size=1, max_size=4), st.sets(st.sampled_from(NAMES), max_size=3))
async def test_a_request_goes_to_a_worker_that_has_all_it_needs(workers: list[set[str]], needs: set[str]) -> None:
    fleets = fleet_of(**{f"w{number}": tuple(able) for number, able in enumerate(workers)})
    able = {f"w{number}" for number, names in enumerate(workers) if needs <= names}
    if able:
        assert await fleets.worker(chain(3), needs=frozenset(needs)) in able
    else:
        with pytest.raises(NoWorkerError, match="does not serve"):
            await fleets.place(chain(3), needs=frozenset(needs))


async def test_a_held_prefix_does_not_outweigh_a_missing_capability() -> None:
    fleets = fleet_of(a=(TOKENS,), b=(TOKENS, IMAGES))
    hashes = chain(40)
    fleets.index.memory.publish(member("a").worker_id, hashes[:30])
    assert await fleets.worker(hashes) == "a"
    assert await fleets.worker(hashes, needs=frozenset({TOKENS, IMAGES})) == "b"


def test_the_needs_of_a_request_are_names() -> None:
    call = EngineCall("/v1/chat/completions", b"{}")
    assert needs_of(None, None, (), "") == {TOKENS}
    assert needs_of(None, Embed(), (), "") == {EMBEDDINGS}
    assert needs_of(call, None, ("a picture",), "pirate") == {call.path, IMAGES, "adapter:pirate"}
    assert adapters_in([TOKENS, *adapter_names(["pirate", "a:b"])]) == ["pirate", "a:b"]


async def test_a_request_goes_where_the_context_holds_what_it_demands() -> None:
    fleets = Fleets()
    fleets.index.register(member("a", max_model_len=100))
    fleets.index.register(member("b", max_model_len=200))
    assert {await fleets.worker(chain(3), num_context_tokens=150) for _ in range(5)} == {"b"}
    with pytest.raises(NoWorkerError, match="context too short") as caught:
        await fleets.place(chain(3), num_context_tokens=201)
    assert caught.value.longest_context == 200
    fleets.index.register(member("c", capabilities=()))
    with pytest.raises(NoWorkerError) as caught:
        await fleets.place(chain(3), num_context_tokens=201, needs=frozenset({TOKENS}))
    assert caught.value.longest_context == 200, "the other serves no such request"
    fleets.index.memory.publish(member("b").worker_id, load=WorkerLoad(draining=True))
    with pytest.raises(NoWorkerError) as caught:
        await fleets.place(chain(3), num_context_tokens=150)
    assert caught.value.longest_context is None, "another time it would fit"


async def test_a_lost_worker_may_bring_its_context_back() -> None:
    """A request that only a lost worker could take waits as any other. One above the longest known context does not."""
    fleets = Fleets()
    fleets.index.register(member("a", max_model_len=100))
    fleets.index.register(member("b", max_model_len=200))
    await fleets.fleet.poll()
    fleets.fleet.report_failure(WorkerId("b"))
    fleets.states["http://b:8000"] = ConnectionRefusedError()
    await fleets.fleet.poll()
    for num_tokens, longest in ((150, None), (201, 200)):
        with pytest.raises(NoWorkerError, match="context too short") as caught:
            await fleets.place(chain(3), num_context_tokens=num_tokens)
        assert caught.value.longest_context == longest


async def test_each_worker_has_its_own_order_of_prefills() -> None:
    """A short prompt passes a long one where prefills share each step, and waits for it where they do not."""
    fleets = Fleets()
    load = WorkerLoad({GatewayId("other"): 9.0}, prefill_tokens_per_s=RATE)
    fleets.index.register(member("shared"), load=load)
    fleets.index.register(member("fifo", prefill_order="fifo"), load=load)
    assert await fleets.worker(chain(5)) == "shared"
    estimates = fleets.router.scorer.loads._estimates
    assert type(estimates[member("shared").worker_id]) is WorkerLoadEstimate
    assert type(estimates[member("fifo").worker_id]) is FifoLoadEstimate


async def test_a_correction_counts_once() -> None:
    """In the hit rate, and in the accuracy of the index."""
    fleets = Fleets()
    fleets.index.register(member("a"))
    hashes = chain(40)
    fleets.index.memory.publish(member("a").worker_id, hashes[:25])
    placement = await fleets.place(hashes, num_prompt_tokens=800)
    fleets.router.started(placement, 400)
    worker_id = placement.worker.worker_id
    assert fleets.router.scorer.loads.hit_rate(worker_id) == pytest.approx(0.5)
    fleets.router.first_token(placement)
    fleets.clock.now_s += 120.0
    fleets.router.corrected(placement, 200)
    fleets.router.corrected(placement, 200)
    fleets.router.closed(placement)
    assert fleets.router.scorer.loads.hit_rate(worker_id) == pytest.approx(0.25)
    assert placement.num_cached_tokens == 200
    state = fleets.index_state()
    assert (state["num_requests"], state["precision"]) == (1, 0.5)


async def test_a_correction_before_the_start_is_none() -> None:
    fleets = Fleets()
    fleets.index.register(member("a"))
    placement = await fleets.place(chain(10))
    fleets.router.corrected(placement, 16)
    fleets.router.closed(placement)
    assert fleets.router.scorer.loads.hit_rate(placement.worker.worker_id) is None


async def test_a_slow_worker_is_passed_over_while_there_is_another() -> None:
    fleets = fleet_of(a=(TOKENS,), b=(TOKENS,))
    hashes = chain(40)
    fleets.index.memory.publish(member("a").worker_id, hashes[:30], load=WorkerLoad(is_slow=True))
    assert {await fleets.worker(hashes) for _ in range(5)} == {"b"}, "although it holds the prefix"
    fleets.index.memory.publish(member("b").worker_id, load=WorkerLoad(draining=True))
    assert await fleets.worker(hashes) == "a", "rather than none"
