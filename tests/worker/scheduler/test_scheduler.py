"""What one step holds, in which order, and what becomes of a choice."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.worker.device_streams import LateStream
from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import ROOT, HandEngine, generate
from worker.scheduler.admission import refusal
from worker.scheduler.budget import BatchLimits
from worker.wire import ChoiceState, End, Failed

LONE = {"max_num_batched_tokens": 512, "max_lone_prefill_tokens": 2048}


def test_a_prompt_and_its_answer() -> None:
    engine = HandEngine()
    request = engine.submit(generate(range(10), max_tokens=5))
    engine.finish()
    got = engine.answer(request)
    assert got.tokens[0] == answer(range(10), 100, 5)
    assert got.finished[0].reason == "length"
    assert got.last == End(queue_s=1.0, prefill_s=0.0, decode_s=4.0)
    assert len(engine.runner.steps) == 5


def test_a_second_request_skips_the_cached_prefix() -> None:
    engine = HandEngine()
    engine.submit(generate(range(10)))
    engine.finish()
    second = engine.submit(generate([*range(8), 40, 41]))
    assert second.num_uncached_tokens == 2
    plan = engine.step()
    assert plan is not None
    assert plan.num_tokens == 2
    assert second.num_cached_tokens == 8
    engine.finish()
    assert engine.answer(second).tokens[0] == answer([*range(8), 40, 41], 100, 4)


def test_a_stop_token_ends_the_choice_and_is_named() -> None:
    tokens = answer(range(10), 100, 8)
    engine = HandEngine(eos=[tokens[3]])
    by_eos = engine.submit(generate(range(10), 8))
    by_stop = engine.submit(generate(range(10), 8, stop_token_ids=(tokens[2],)))
    ignored = engine.submit(generate(range(10), 8, ignore_eos=True))
    engine.finish()
    first = next(i for i, token in enumerate(tokens) if token == tokens[3])
    assert engine.answer(by_eos).tokens[0] == tokens[: first + 1]
    assert engine.answer(by_eos).finished[0].stop_token_id == tokens[3]
    assert engine.answer(by_stop).finished[0].stop_token_id in tokens[2:4]
    assert engine.answer(ignored).tokens[0] == tokens
    assert engine.answer(ignored).finished[0].reason == "length"


def test_min_tokens_outlives_a_stop_token() -> None:
    tokens = answer(range(10), 100, 8)
    engine = HandEngine()
    request = engine.submit(generate(range(10), 8, stop_token_ids=tuple(tokens), min_tokens=5))
    engine.finish()
    assert engine.answer(request).tokens[0] == tokens[:6]


def test_choices_share_the_prompt_until_they_differ() -> None:
    engine = HandEngine()
    request = engine.submit(generate(range(10), 6, n=4))
    engine.step()
    assert engine.allocator.num_blocks - 1 - engine.allocator.num_free_blocks == 3
    assert not engine.runner.steps[-1].copies
    engine.step()
    assert len(engine.runner.steps[-1].copies) == 3  # the last sharer writes in place
    engine.finish()
    for index in range(4):
        assert engine.answer(request).tokens[index] == answer(range(10), 100 + index, 6)
    assert sum(len(step.copies) for step in engine.runner.steps) == 3


def test_more_choices_than_a_batch_holds_run_in_groups() -> None:
    engine = HandEngine(max_num_seqs=3)
    request = engine.submit(generate(range(10), 6, n=8))
    engine.finish()
    assert all(len(step.sequences) <= 3 for step in engine.runner.steps)
    assert engine.answer(request).tokens == {i: answer(range(10), 100 + i, 6) for i in range(8)}
    assert sum(step.num_tokens for step in engine.runner.steps) == 10 + 2 + 2 + 8 * 5


def test_a_resumed_choice_goes_on_where_it_was() -> None:
    engine = HandEngine()
    expected = {i: answer(range(10), 100 + i, 7) for i in range(3)}
    resumed = {0: expected[0][:3], 2: expected[2][:6]}
    request = engine.submit(generate(range(10), 7, n=3, resumed=resumed))
    engine.finish()
    assert engine.answer(request).tokens == {0: expected[0][3:], 1: expected[1], 2: expected[2][6:]}


def test_a_choice_resumed_after_its_last_token_ends_at_once() -> None:
    tokens = answer(range(10), 100, 4)
    engine = HandEngine()
    request = engine.submit(generate(range(10), 4, resumed={0: tokens}))
    assert engine.answer(request).finished[0].reason == "length"
    assert isinstance(engine.answer(request).last, End)
    assert not engine.scheduler.has_work


def test_no_tokens_wanted_only_the_prompt_runs() -> None:
    engine = HandEngine()
    request = engine.submit(generate(range(10), 0, prompt_logprobs=0))
    engine.finish()
    got = engine.answer(request)
    assert got.tokens == {}
    assert got.finished[0].reason == "length"
    assert got.prompt_logprobs is not None
    assert [None if p is None else p.logprob for p in got.prompt_logprobs.positions] == [
        None,
        *(-float(i) for i in range(1, 10)),
    ]


def test_prompt_logprobs_read_nothing_from_the_cache_and_survive_chunks() -> None:
    engine = HandEngine(max_num_batched_tokens=4, max_num_seqs=4)
    engine.submit(generate(range(10)))
    engine.finish()
    request = engine.submit(generate(range(10), 2, prompt_logprobs=1))
    engine.finish()
    got = engine.answer(request)
    assert request.num_cached_tokens == 0
    assert got.prompt_logprobs is not None
    assert len(got.prompt_logprobs.positions) == 10
    assert got.tokens[0] == answer(range(10), 100, 2)


def test_a_short_request_overtakes_a_long_prefill() -> None:
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=64, max_num_seqs=8)
    engine.submit(generate([i % 50 for i in range(1000)]))
    engine.step()
    short = engine.submit(generate(range(12)))
    engine.step()
    assert 0 in engine.answer(short).tokens


@pytest.mark.parametrize("limits", [{"max_num_batched_tokens": 2048}, LONE])
def test_a_short_prompt_beside_8000_tokens_has_its_first_token_after_two_steps(limits: dict[str, int]) -> None:
    engine = HandEngine(num_blocks=2500, max_model_len=9000, **limits)
    engine.submit(generate([i % 50 for i in range(8000)]))
    engine.step()
    short = engine.submit(generate(range(20)))
    num_steps = 0
    while 0 not in engine.answer(short).tokens:
        engine.step()
        num_steps += 1
    assert num_steps <= 2
    assert engine.runner.steps[-1].num_tokens <= limits["max_num_batched_tokens"]


def test_a_prefill_takes_large_steps_while_it_is_alone() -> None:
    engine = HandEngine(num_blocks=2500, max_model_len=9000, **LONE)
    engine.submit(generate([i % 50 for i in range(7000)]))
    sizes = [engine.step().num_tokens, engine.step().num_tokens]
    short = engine.submit(generate(range(40, 20, -1), max_tokens=2))
    sizes += [engine.step().num_tokens for _ in range(4)]
    # alone, beside a newcomer, beside its decode, alone again
    assert sizes == [2048, 2048, 512, 512, 7000 + 20 + 1 - 2 * 2048 - 2 * 512, 1]
    engine.finish()
    assert engine.answer(short).tokens == {0: answer(range(40, 20, -1), 100, 2)}


def test_a_newcomer_gets_its_part_beside_many_long_prefills() -> None:
    engine = HandEngine(num_blocks=2000, max_num_batched_tokens=64, max_num_seqs=16)
    for seed in range(10):
        engine.submit(generate([(i + seed) % 50 for i in range(600)]))
        engine.step()
    newcomer = engine.submit(generate(range(12)))
    engine.step()
    assert 0 in engine.answer(newcomer).tokens


def test_every_running_choice_gets_a_token_in_every_step() -> None:
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=32, max_num_seqs=8)
    early = [engine.submit(generate([i, i + 1], 30)) for i in range(4)]
    engine.step()
    engine.submit(generate([i % 50 for i in range(900)]))
    for num_tokens in range(2, 20):
        engine.step()
        assert all(len(engine.answer(request).tokens[0]) == num_tokens for request in early)


def test_priority_comes_first_and_aging_ends_it() -> None:
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


def test_the_last_in_order_is_preempted_and_gives_the_same_tokens() -> None:
    engine = HandEngine(num_blocks=8, block_size=4)
    requests = [engine.submit(generate([10 * i, 1, 2, 3], 20)) for i in range(3)]
    engine.finish()
    assert engine.num_preempted > 0
    for i, request in enumerate(requests):
        assert engine.answer(request).tokens[0] == answer([10 * i, 1, 2, 3], 100, 20)
    ends = [engine.answer(request).last for request in requests]
    assert all(isinstance(end, End) for end in ends)


def test_admission_leaves_the_watermark_free() -> None:
    engine = HandEngine(num_blocks=21, block_size=4, watermark=0.5)
    engine.submit(generate([1] * 30, 8))
    engine.step()
    second = engine.submit(generate([2] * 12, 8))
    engine.step()
    assert second.started_s is None  # 12 blocks are free, 3 are wanted, 10 must stay
    engine.finish()
    assert engine.answer(second).tokens[0] == answer([2] * 12, 100, 8)


def test_what_never_fits_is_refused() -> None:
    limits = BatchLimits(max_model_len=100)

    def message(wire, pool_tokens=80):
        refused = refusal(wire, limits, pool_tokens, vocab_size=50)
        return None if refused is None else refused.message

    assert message(generate(range(40), 40)) is None
    assert "KV pool of 80" in message(generate(range(41), 40))
    assert "context of 100" in message(generate(range(41), 60), 1000)
    assert "vocabulary" in message(generate([50], 1))
    assert "prompt_ids" in message(generate([], 1))
    assert "root" in message(generate([1], 1, root=b"short"))
    assert "max_tokens" in message(generate([1], -1))
    assert "output_ids" in message(generate([1], 1, resumed={0: [1, 2]}))
    assert "vocabulary" in message(generate([1], 1, resumed={0: [77]}))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", -1.0),
        ("top_p", 2.0),
        ("min_p", -0.1),
        ("typical_p", float("nan")),
        ("repetition_penalty", 0.0),
        ("frequency_penalty", 1e30),
        ("presence_penalty", float("nan")),
        ("top_k", 10**12),
        ("top_k", -1),
        ("min_tokens", -1),
        ("logprobs", 10**9),
        ("prompt_logprobs", -1),
        ("logit_bias", ((1, float("inf")),)),
        ("logit_bias", ((2**63, 1.0),)),
        ("bad_words", ((-1,),)),
        ("allowed_token_ids", (2**40,)),
        ("stop_token_ids", (-5,)),
        ("stop_token_ids", (1,) * 70_000),
        ("priority", 1001),
        ("deadline_s", float("nan")),
    ],
)
def test_numbers_that_no_step_should_see_are_refused(name: str, value: object) -> None:
    request = generate([1, 2], 4)
    if name in ("priority", "deadline_s"):
        request = replace(request, **{name: value})
    else:
        request = replace(request, sampling=replace(request.sampling, **{name: value}))
    refused = refusal(request, BatchLimits(max_model_len=100), 80, vocab_size=50)
    assert refused is not None
    assert refused.message.startswith(name)
    assert len(refused.message) < 200
    for choice in (ChoiceState(2**40, 1), ChoiceState(-1, 1), ChoiceState(0, 2**70)):
        refused = refusal(replace(request, choices=(choice,)), BatchLimits(max_model_len=100), 80, vocab_size=50)
        assert refused is not None


@pytest.mark.parametrize("when", [0, 1, 2, 5])
def test_abort_frees_at_any_moment(when: int) -> None:
    engine = HandEngine(max_num_batched_tokens=8, max_num_seqs=8)
    request = engine.submit(generate(range(20), 8, n=3))
    other = engine.submit(generate(range(5), 8))
    for _ in range(when):
        engine.step()
    engine.abort(request)
    engine.abort(request)
    assert {end.reason for end in engine.answer(request).finished.values()} == {"abort"}
    engine.finish()
    assert engine.answer(other).tokens[0] == answer(range(5), 100, 8)


def test_one_choice_is_aborted_and_the_others_go_on() -> None:
    for when in (0, 2):
        engine = HandEngine()
        request = engine.submit(generate(range(10), 8, n=3))
        for _ in range(when):
            engine.step()
        engine.abort(request, 0)
        engine.finish()
        got = engine.answer(request)
        assert got.finished[0].reason == "abort"
        assert [got.tokens[i] for i in (1, 2)] == [answer(range(10), 100 + i, 8) for i in (1, 2)]


def test_only_the_poisoned_request_fails() -> None:
    def poisoned(step) -> bool:
        return any(13 in sequence.token_ids for sequence in step.sequences)

    engine = HandEngine(fails=poisoned)
    good = [engine.submit(generate([i, 2, 3], 6, n=2)) for i in (1, 5, 7)]
    bad = engine.submit(generate([13, 2, 3], 6))
    engine.finish()
    assert isinstance(engine.answer(bad).last, Failed)
    for i, request in zip((1, 5, 7), good, strict=True):
        expected = [answer([i, 2, 3], 100 + choice, 6) for choice in (0, 1)]
        got = engine.answer(request)
        if any(13 in tokens for tokens in expected):
            assert isinstance(got.last, Failed)
        else:
            assert [got.tokens[0], got.tokens[1]] == expected
    assert engine.allocator.find([13, 2, 3, 0, 0], ROOT) == 0


@pytest.mark.parametrize("raises", [False, True])
def test_what_ends_while_its_step_runs_keeps_its_blocks_until_then(raises: bool) -> None:
    failures = iter([raises])
    engine = HandEngine(fails=lambda step: next(failures, False), stream=LateStream())
    gone, other = engine.submit(generate(range(10))), engine.submit(generate(range(20, 30)))
    held: list[int] = []

    def abort() -> None:
        held.append(engine.allocator.num_free_blocks)
        engine.abort(gone)
        held.append(engine.allocator.num_free_blocks)

    engine.step(abort)
    assert engine.answer(gone).finished[0].reason == "abort"
    assert engine.answer(gone).last is not None
    assert held[0] == held[1] == engine.allocator.num_free_blocks - 3
    assert engine.allocator.find([*range(10), 1], ROOT) == (0 if raises else 8)
    engine.finish()
    assert engine.answer(other).tokens[0] == answer(range(20, 30), 100, 4)


def test_who_had_a_block_copied_in_a_failed_step_is_computed_anew() -> None:
    failures = iter([True, True, False])
    engine = HandEngine(fails=lambda step: len(engine.runner.steps) > 1 and next(failures, False))
    request = engine.submit(generate(range(10), 6, n=3))
    other = engine.submit(generate(range(20, 27), 6, n=2))
    engine.step()
    engine.step()
    steps = engine.runner.steps
    assert [len(step.copies) for step in steps] == [0, 3, 0, 0]
    assert [len(step.sequences) for step in steps] == [2, 5, 1, 1]  # the retries are of the last sharers
    engine.finish()
    assert isinstance(engine.answer(request).last, Failed)  # first retried, fails alone too
    assert engine.answer(other).tokens == {i: answer(range(20, 27), 100 + i, 6) for i in range(2)}


@pytest.mark.parametrize(
    ("prefix_cache", "num_blocks", "num_tokens", "long", "short", "failing"),
    [("hash", 6, 6, (14, 1, 2), (2, 2, 2), 2), ("off", 6, 8, (16, 1, 2), (1, 3, 3), 1)],
)
def test_what_a_block_was_copied_from_may_be_overwritten_in_the_step_that_fails(
    prefix_cache, num_blocks, num_tokens, long, short, failing
) -> None:
    count = iter(range(1000))
    engine = HandEngine(
        num_blocks,
        prefix_cache=prefix_cache,
        max_num_batched_tokens=num_tokens,
        max_num_seqs=4,
        fails=lambda step: next(count) == failing,
    )
    asked = [([first] * length, n, max_tokens) for first, (length, n, max_tokens) in ((1, long), (11, short))]
    requests = [engine.submit(generate(prompt_ids, max_tokens, n)) for prompt_ids, n, max_tokens in asked]
    engine.finish()
    failed = engine.runner.steps[failing]
    written = {slot // 4 for sequence in failed.sequences for slot in sequence.slots}
    assert written & {copy.source for copy in failed.copies}  # who forked gave it up, and the prefill took it
    for (prompt_ids, n, max_tokens), request in zip(asked, requests, strict=True):
        assert engine.answer(request).tokens == {i: answer(prompt_ids, 100 + i, max_tokens) for i in range(n)}


def test_preempting_all_allows_a_reset_and_changes_no_token() -> None:
    engine = HandEngine()
    requests = [engine.submit(generate([i, 2, 3, 4, 5], 9, n=2)) for i in range(3)]
    for _ in range(4):
        engine.step()
    assert not engine.allocator.reset()
    engine.scheduler.preempt_all()
    assert engine.allocator.reset()
    engine.finish()
    for i, request in enumerate(requests):
        assert engine.answer(request).tokens == {c: answer([i, 2, 3, 4, 5], 100 + c, 9) for c in range(2)}


def test_a_pool_exhausted_by_sixteen_long_requests_serves_them_all() -> None:
    engine = HandEngine(num_blocks=33, block_size=4, max_num_batched_tokens=32, max_num_seqs=16)
    prompts = [[i, *range(40)] for i in range(16)]  # each needs 26 of 32 blocks in the end
    requests = [engine.submit(generate(prompt, 60)) for prompt in prompts]
    engine.finish()
    assert engine.num_preempted > 0
    for prompt, request in zip(prompts, requests, strict=True):
        assert engine.answer(request).tokens[0] == answer(prompt, 100, 60)


def test_a_burst_with_one_prefix_computes_it_once() -> None:
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=64, max_num_seqs=16)
    shared = [i % 50 for i in range(200)]
    requests = [engine.submit(generate([*shared, i, i, i], 4)) for i in range(8)]
    assert [request.num_uncached_tokens for request in requests] == [203] + 7 * [3]
    bystander = engine.submit(generate([49] * 12, 4))
    engine.step()
    assert bystander.started_s is not None  # those that wait for the prefix let it pass
    engine.finish()
    for i, request in enumerate(requests):
        assert engine.answer(request).tokens[0] == answer([*shared, i, i, i], 100, 4)
    prefilled = sum(step.num_tokens for step in engine.runner.steps) - 9 * 3
    assert prefilled == 203 + 7 * 3 + 12


def test_nobody_waits_for_a_prefix_that_gets_no_further() -> None:
    engine = HandEngine(num_blocks=600, max_num_batched_tokens=64, max_num_seqs=16)
    first = engine.submit(generate([1] * 200, 4))
    engine.step()
    engine.submit(generate([1] * 201, 4))
    second = next(iter(engine.scheduler.waiting))
    second.awaited = (next(iter(engine.scheduler.running)), first.sequences[0].num_computed)
    engine.step()
    assert second.allocation is not None
    engine.finish()


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


@pytest.mark.parametrize("prefix_cache", ["hash", "radix", "off"])
def test_prompt_logprobs_of_a_cached_prompt_fit_into_a_pool_that_holds_it_once(prefix_cache) -> None:
    limits = {"max_num_batched_tokens": 6, "max_num_seqs": 1}
    engine = HandEngine(num_blocks=15, block_size=4, prefix_cache=prefix_cache, **limits)
    engine.submit(generate([7] * 33, 2))
    engine.finish()
    request = engine.submit(generate([7] * 33, 2, prompt_logprobs=0))
    engine.finish(max_steps=100)
    assert engine.num_preempted == 0
    assert engine.answer(request).tokens[0] == answer([7] * 33, 100, 2)
