"""Admission: sequences wait for their turn, for blocks, or for a prefix that is being computed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.allocators import PrefixCache
from tests.worker.scheduler.arithmetic_runner import answer, step_tokens
from tests.worker.scheduler.engine import HandEngine, generate


class EndedFetch:
    ended = True

    def num_fetched_blocks(self, num_cached: int) -> dict[str, int]:
        return {"peer": 1}


def test_priority_orders_the_queue_until_aging_outweighs_it() -> None:
    engine = HandEngine(max_num_seqs=1, aging_s=10.0)
    running = engine.submit(generate([1], 3))
    engine.step()
    low = engine.submit(generate([2], 1, priority=1))
    high = engine.submit(generate([3], 1, priority=0))
    engine.now_s += 9
    late = engine.submit(generate([4], 1, priority=-1))
    much_later = generate([5], 1, priority=0)
    engine.now_s += 20
    last = engine.submit(much_later)
    finished = []
    while engine.scheduler.has_work:
        engine.step()
        for request in (running, low, high, late, last):
            if engine.answer(request).last is not None and request not in finished:
                finished.append(request)
    assert finished == [running, late, high, low, last]


def test_admission_leaves_the_watermark_free() -> None:
    engine = HandEngine(num_blocks=21, block_size=4, watermark=0.5)
    engine.submit(generate([1] * 30, 8))
    engine.step()
    second = engine.submit(generate([2] * 12, 8))
    engine.step()
    assert second.started_s is None  # 12 blocks are free, 3 are wanted, 10 must stay
    engine.finish()
    assert engine.answer(second).tokens[0] == answer([2] * 12, 100, 8)
    alone = engine.submit(generate([3] * 60, 8))
    engine.step()
    assert alone.started_s is not None, "no other sequence needs the watermark to grow"
    engine.finish()


def test_admission_reserves_the_blocks_of_running_prefills() -> None:
    engine = HandEngine(num_blocks=21, block_size=4, watermark=0.0, max_num_batched_tokens=16, max_num_seqs=4)
    engine.submit(generate([1] * 64, 4))
    engine.step()
    second = engine.submit(generate([2] * 24, 4))
    assert engine.allocator.num_free_blocks > 6
    engine.step()
    assert second.started_s is None
    engine.finish()
    assert engine.num_preempted == 0


@pytest.mark.parametrize("prefix_cache", ["hash", "radix"])
@pytest.mark.parametrize("is_held", [False, True])
def test_a_cached_prefix_takes_free_blocks_unless_held(prefix_cache: PrefixCache, is_held: bool) -> None:
    engine = HandEngine(31, watermark=0.0, max_num_seqs=4, max_num_batched_tokens=8, prefix_cache=prefix_cache)
    holder = engine.submit(generate([1] * 48, 30 if is_held else 1))
    while holder.first_token_s is None:
        engine.step()
    other = engine.submit(generate([2] * (20 if is_held else 56), 16))
    while other.first_token_s is None:
        engine.step()
    later = engine.submit(generate([1] * 66, 2))
    engine.step()  # 12 of its 17 blocks are cached, so it takes 5 of the free blocks, or 17
    assert (later.started_s is not None) is is_held
    engine.finish()
    assert engine.num_preempted == 0
    assert engine.answer(later).tokens[0] == answer([1] * 66, 100, 2)


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=64, max_num_seqs=16)
    shared = [i % 50 for i in range(200)]
    requests = [engine.submit(generate([*shared, i, i, i], 4)) for i in range(8)]
    assert [request.num_uncached_tokens for request in requests] == [203] + 7 * [3]
    bystander = engine.submit(generate([49] * 12, 4))
    engine.step()
    assert bystander.started_s is not None  # it passes those that wait for the prefix
    engine.finish()
    for i, request in enumerate(requests):
        assert engine.answer(request).tokens[0] == answer([*shared, i, i, i], 100, 4)
    prefilled = sum(map(step_tokens, engine.runner.steps)) - 9 * 3
    assert prefilled == 203 + 7 * 3 + 12


def test_no_sequence_waits_for_a_stalled_prefix() -> None:
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=64, max_num_seqs=16)
    first = engine.submit(generate([1] * 200, 4))
    engine.step()
    engine.submit(generate([1] * 201, 4))
    second = next(iter(engine.scheduler.waiting))
    second.waiting_for_prefix_of = (next(iter(engine.scheduler.running)), first.sequences[0].num_computed)
    engine.step()
    assert second.allocation is not None
    engine.finish()


def test_no_sequence_waits_for_what_is_cached() -> None:
    """Another one computes the cached prefix again, for its logprobs."""
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=64, max_num_seqs=16)
    engine.submit(generate([1] * 200, 1))
    engine.finish()
    engine.submit(generate([1] * 200, 1, prompt_logprobs=0))
    engine.step()
    later = engine.submit(generate([1] * 201, 1))
    engine.step()
    assert later.started_s is not None
    assert later.num_cached_tokens == 200
    engine.finish()


def test_a_started_sequence_forgets_whom_it_waited_for() -> None:
    """Else a chain of requests, each with the prompt of the last one, would live as long as the newest."""
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=64, max_num_seqs=16)
    engine.submit(generate([1] * 200, 1))
    engine.step()
    second = engine.submit(generate([1] * 201, 50))
    engine.step()
    (sequence,) = second.sequences
    assert sequence.waiting_for_prefix_of is not None
    while second.started_s is None:
        engine.step()
    assert sequence.waiting_for_prefix_of is None


def test_a_sequence_that_starts_later_drops_its_fetch() -> None:
    """Like the first of its request: the links of a long prefix would live as long as its answer."""
    engine = HandEngine(max_num_seqs=1)
    request = engine.submit(generate([1] * 20, 4, n=2))
    engine.step()
    (later,) = engine.scheduler.waiting
    later.fetch = EndedFetch()
    while later.allocation is None:
        engine.step()
    assert later.fetch is None
    assert request.fetched_tokens is None, "the first has brought nothing"


def test_an_aborted_prefix_is_computed_by_the_next() -> None:
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=64, max_num_seqs=16)
    first, second = engine.submit(generate([1] * 200, 4)), engine.submit(generate([1] * 201, 4))
    engine.step()
    assert second.started_s is None
    engine.abort(first)
    engine.step()
    assert second.num_cached_tokens == 64
    engine.finish()
    assert engine.answer(second).tokens[0] == answer([1] * 201, 100, 4)


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 60), st.integers(1, 12)), min_size=2, max_size=10),
    num_blocks=st.integers(20, 30),
    num_tokens=st.sampled_from([8, 16, 64]),
)
def test_the_head_of_the_queue_is_admitted_as_soon_as_it_fits(
    prompts: list[tuple[int, int, int]], num_blocks: int, num_tokens: int
) -> None:
    engine = HandEngine(
        num_blocks=num_blocks, watermark=0.0, max_num_batched_tokens=num_tokens, max_num_seqs=4, prefix_cache="off"
    )
    admission, allocator = engine.scheduler._admission, engine.allocator
    admit, num_fitting = admission.admit, 0

    def checked(waiting, plan, budget):
        nonlocal num_fitting
        waiting, running = list(waiting), engine.scheduler.running
        num_growing = sum(
            max(0, -(-len(s.token_ids) // 4) - len(s.allocation.block_table)) for s in running if s.allocation
        )
        wanted = -(-len(waiting[0].token_ids) // 4)
        fits = budget.left > 0 and len(running) < 4 and wanted <= allocator.num_free_blocks - num_growing
        num_fitting += fits
        admitted = admit(waiting, plan, budget)
        assert admitted or not fits
        return admitted

    admission.admit = checked
    left = sorted(prompts)
    while left or engine.scheduler.has_work:
        while left and left[0][0] <= engine.now_s:
            _, num_prompt, max_tokens = left.pop(0)
            engine.submit(generate([len(left)] * num_prompt, max_tokens))
        engine.step()
    assert num_fitting > 0
