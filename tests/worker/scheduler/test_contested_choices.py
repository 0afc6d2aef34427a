"""A request with most of the running choices yields to another tenant, and continues later with the same tokens."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.worker.device_streams import LateStream
from tests.worker.scheduler.arithmetic_runner import answer, step_tokens
from tests.worker.scheduler.engine import HandEngine, generate
from worker.scheduler.request import Request
from worker.wire import End

PROMPT = list(range(21))
BLOCK_SIZE = 4


def make_engine(*, async_scheduling: bool = False, num_blocks: int = 2000, **options: Any) -> HandEngine:
    stream = LateStream() if async_scheduling else None
    return HandEngine(num_blocks, BLOCK_SIZE, stream=stream, async_scheduling=async_scheduling, **options)


def num_held(engine: HandEngine, request: Request) -> int:
    """Return the running choices of the request."""
    return sum(len(sequence.choices) for sequence in engine.scheduler.running if sequence.request is request)


def check_tokens(engine: HandEngine, request: Request) -> None:
    got, wire = engine.answer(request), request.wire
    assert isinstance(got.last, End)
    assert got.tokens == {
        choice.index: answer(wire.prompt_ids, choice.seed, wire.sampling.max_tokens) for choice in wire.choices
    }


@pytest.mark.parametrize("async_scheduling", [False, True])
@pytest.mark.parametrize("n", [64, 128])
@pytest.mark.parametrize("num_tokens", [64, 2048])
def test_a_small_request_starts_within_two_steps(async_scheduling: bool, n: int, num_tokens: int) -> None:
    engine = make_engine(async_scheduling=async_scheduling, max_num_seqs=64, max_num_batched_tokens=num_tokens)
    large = engine.submit(generate(PROMPT, 30, n, tenant="a"))
    for _ in range(12):
        engine.step()
    small = engine.submit(generate([7] * 10, 10, tenant="b"))
    for _ in range(2):
        engine.step()
    assert small.started_s is not None
    while engine.answer(small).last is None:
        engine.step()
    assert engine.answer(large).last is None
    engine.finish()
    check_tokens(engine, small)
    check_tokens(engine, large)
    assert engine.num_yielded == 1


def test_preempted_choices_stay_cached() -> None:
    alone, contested = make_engine(max_num_seqs=64), make_engine(max_num_seqs=64)
    wire = generate(PROMPT, 60, 64, tenant="a")
    alone.submit(wire)
    alone.finish()
    large = contested.submit(wire)
    for _ in range(40):
        contested.step()
    small = [contested.submit(generate([i], 4, tenant="b")) for i in range(40)]
    contested.finish()
    check_tokens(contested, large)
    assert 30 <= contested.num_yielded <= 40
    num_alone, num_contested = (sum(map(step_tokens, engine.runner.steps)) for engine in (alone, contested))
    num_recomputed = num_contested - num_alone - sum(len(request.prompt_ids) + 3 for request in small)
    assert 0 <= num_recomputed <= contested.num_yielded * BLOCK_SIZE


def test_a_prefilling_request_yields_without_losing_a_token() -> None:
    engine = make_engine(max_num_seqs=8, max_num_batched_tokens=16, num_blocks=4000)
    large = engine.submit(generate([i % 50 for i in range(200)], 5, 8, tenant="a"))
    for _ in range(3):
        engine.step()
    small = engine.submit(generate([7], 4, tenant="b"))
    engine.step()
    assert small.started_s is not None
    engine.finish()
    check_tokens(engine, large)
    check_tokens(engine, small)
    assert sum(len(sequence.token_ids) for sequence in engine.runner.steps[3].sequences) == 16


def test_two_large_requests_share_the_choices() -> None:
    engine = make_engine(max_num_seqs=16)
    one = engine.submit(generate(PROMPT, 40, 16, tenant="a"))
    for _ in range(5):
        engine.step()
    other = engine.submit(generate([9, *PROMPT], 40, 16, tenant="b"))
    for _ in range(2):
        engine.step()
    assert num_held(engine, one) == num_held(engine, other) == 8
    for _ in range(20):
        engine.step()
        assert num_held(engine, one) == num_held(engine, other) == 8
    engine.finish()
    check_tokens(engine, one)
    check_tokens(engine, other)
    assert engine.num_yielded == 8


@pytest.mark.parametrize("num_tokens", [24, 2048])
def test_a_flood_of_small_requests_leaves_half_of_the_choices(num_tokens: int) -> None:
    engine = make_engine(max_num_seqs=16, max_num_batched_tokens=num_tokens)
    large = engine.submit(generate(PROMPT, 40, 16, tenant="a"))
    flood: list[Request] = []
    engine.step()
    for step in range(400):
        flood += [engine.submit(generate([step % 50, i], 3, tenant="bcd"[i % 3])) for i in range(6)]
        engine.step()
        if engine.answer(large).last is not None:
            break
        if all(choice.finished is None for choice in large.choices):
            assert num_held(engine, large) >= 8
    assert engine.answer(large).last is not None, "the large request starves"
    assert step < 250  # 640 tokens: half of the choices need 80 steps, the quarter that is fair among four tenants 160
    assert engine.num_yielded <= 16
    engine.finish()
    check_tokens(engine, large)


def test_short_requests_do_not_starve_the_yielding_choice() -> None:
    """The same choice yields each time, and progresses whenever it runs."""
    engine = make_engine(max_num_seqs=4)
    large = engine.submit(generate(PROMPT, 60, 4, tenant="a"))
    for _ in range(300):
        engine.step()
        if engine.answer(large).last is not None:
            break
        if not any(request.wire.tenant == "b" for request in engine.scheduler.requests.values()):
            engine.submit(generate([1], 1, tenant="b"))
    assert engine.answer(large).last is not None
    check_tokens(engine, large)


@pytest.mark.parametrize(("num_choices", "tenant"), [(8, "a"), (1, "b")])
def test_one_tenant_alone_and_a_single_choice_do_not_yield(num_choices: int, tenant: str) -> None:
    engine = make_engine(max_num_seqs=num_choices)
    large = engine.submit(generate(PROMPT, 10, num_choices, tenant="a"))
    engine.step()
    small = engine.submit(generate([1], 4, tenant=tenant))
    for _ in range(4):
        engine.step()
    assert small.started_s is None
    engine.finish()
    assert engine.num_yielded == 0
    check_tokens(engine, large)
    check_tokens(engine, small)


@pytest.mark.parametrize(("num_prompt", "num_yielded"), [(4, 1), (48, 1), (72, 2), (73, 3), (120, 4), (121, 4)])
def test_as_many_choices_yield_as_the_candidate_needs_blocks(num_prompt: int, num_yielded: int) -> None:
    """Half of the choices at most, also if the candidate does not fit even then."""
    engine = make_engine(max_num_seqs=8, num_blocks=60, watermark=0.0, max_num_batched_tokens=256)
    large = engine.submit(generate(PROMPT, 26, 8, tenant="a"))
    for _ in range(20):
        engine.step()
    # In the next step each choice has 41 tokens in 11 blocks, 5 of which all share: 6 of 59 blocks are free.
    small = engine.submit(generate([49, *([1, 2] * 60)][:num_prompt], 2, tenant="b"))
    engine.step()
    assert engine.num_yielded == num_yielded
    assert (small.started_s is not None) == (num_prompt <= 120)
    engine.finish()
    check_tokens(engine, large)
    check_tokens(engine, small)


arrivals = st.lists(
    st.tuples(
        st.integers(0, 20),  # the step at which it arrives
        st.sampled_from("abc"),
        st.integers(1, 9),  # choices
        st.integers(1, 10),  # tokens each
        st.integers(1, 9),  # of the prompt
    ),
    min_size=2,
    max_size=10,
)


@settings(max_examples=60, deadline=None)
@given(
    arrivals=arrivals,
    max_num_seqs=st.integers(1, 8),
    num_blocks=st.sampled_from([16, 24, 400]),
    prefix_cache=st.sampled_from(["hash", "radix", "off"]),
    async_scheduling=st.booleans(),
)
@example(  # tenant a's next request must not keep tenant c from the choices that tenant a holds
    arrivals=[(0, "a", 1, 1, 1), (6, "a", 2, 10, 1), (12, "a", 1, 1, 1), (12, "c", 2, 3, 1), (13, "c", 1, 1, 1)],
    max_num_seqs=3,
    num_blocks=400,
    prefix_cache="hash",
    async_scheduling=True,
)
def test_no_request_holds_more_than_half_while_others_wait(
    arrivals, max_num_seqs: int, num_blocks: int, prefix_cache, async_scheduling: bool
) -> None:
    engine = make_engine(
        max_num_seqs=max_num_seqs, num_blocks=num_blocks, prefix_cache=prefix_cache, async_scheduling=async_scheduling
    )
    half = max(1, max_num_seqs // 2)
    left, requests, step, since = sorted(arrivals), [], 0, 0
    while left or engine.scheduler.has_work or engine.in_flight:
        while left and left[0][0] <= step:
            _, tenant, n, max_tokens, num_prompt = left.pop(0)
            prompt = [len(requests), *range(num_prompt)]
            requests.append(engine.submit(generate(prompt, max_tokens, n, tenant=tenant)))
        engine.step()
        step += 1
        assert step < 1500
        held = Counter({request: num_held(engine, request) for request in engine.scheduler.requests.values()})
        assert held.total() <= max_num_seqs
        ((holder, most),) = held.most_common(1) or [(None, 0)]
        others_wait = any(
            sequence.request.wire.tenant != holder.wire.tenant and held[sequence.request] < half
            for sequence in engine.scheduler.waiting
        )  # two halves of an odd number leave one to its holder
        since = since + 1 if most > half and others_wait else 0
        if num_blocks == 400 and held.total() == max_num_seqs:
            assert since <= 2, "a request keeps more than half of the choices"
    engine.finish()
    for request in requests:
        check_tokens(engine, request)


def test_what_a_yielding_prefill_was_to_compute_goes_to_others() -> None:
    engine = make_engine(max_num_seqs=4, max_num_batched_tokens=64, prefix_cache="off")
    outputs = {index: [index] * (100 if index < 3 else 1) for index in range(4)}  # the one that yields is the shortest
    large = engine.submit(generate([9] * 60, 110, 4, tenant="a", resumed=outputs))
    while num_held(engine, large) < 4:
        engine.step()
    small = engine.submit(generate([7] * 40, 10, tenant="b"))
    plan = engine.step()
    assert (plan.num_yielded, plan.num_prefill_tokens) == (1, 64)
    assert small.started_s is not None
    engine.finish()
    assert isinstance(engine.answer(large).last, End)
