"""Any mix, pool and failures: every request ends with the right tokens, and no block stays allocated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.worker.device_streams import LateStream
from tests.worker.scheduler.arithmetic_runner import answer
from tests.worker.scheduler.engine import HandEngine, generate
from worker.wire import End, Failed

BLOCK_SIZE = 4
MAX_TOKENS = 12


@dataclass(frozen=True)
class Arrival:
    """A request that arrives at a step, may share a prefix, and may be aborted or resumed."""

    step: int
    prefix: int
    prompt: tuple[int, ...]
    n: int
    max_tokens: int
    num_resumed: int
    priority: int
    abort_after: int | None
    prompt_logprobs: bool
    tenant: str = ""

    @property
    def prompt_ids(self) -> list[int]:
        return [*([0, 1] * 30)[: self.prefix], *self.prompt]


arrivals = st.builds(
    Arrival,
    step=st.integers(0, 12),
    prefix=st.integers(0, 24),
    prompt=st.lists(st.integers(0, 1), min_size=1, max_size=16).map(tuple),
    n=st.sampled_from([1, 1, 2, 3, 6]),
    max_tokens=st.integers(0, MAX_TOKENS),
    num_resumed=st.integers(0, 3),
    priority=st.integers(-1, 1),
    abort_after=st.none() | st.integers(0, 8),
    prompt_logprobs=st.booleans(),
    tenant=st.sampled_from("aab"),
)

mixes = st.fixed_dictionaries(
    {
        "arrivals": st.lists(arrivals, min_size=1, max_size=8),
        "num_blocks": st.integers(15, 40),  # 14 hold the largest choice
        "max_num_seqs": st.integers(1, 6),
        "num_tokens": st.integers(6, 40),
        "watermark": st.sampled_from([0.0, 0.1, 0.4]),
        "ratio": st.sampled_from([None, 0.5, 1.2]),
        "total_tokens": st.sampled_from([None, 60, 100]),
        "failing_steps": st.sets(st.integers(0, 60), max_size=6),
        "in_flight": st.booleans(),  # submit and abort while steps run, or between them
        "async_scheduling": st.booleans(),
        "max_drafts": st.sampled_from([0, 0, 1, 5]),
        "stop": st.sampled_from([(), (0, 7, 20, 33)]),
    }
)


def outputs(arrival: Arrival, stop: Sequence[int]) -> dict[int, list[int]]:
    return {i: answer(arrival.prompt_ids, 100 + i, arrival.max_tokens, stop) for i in range(arrival.n)}


def run_mix(mix, prefix_cache) -> None:
    count = iter(range(1_000_000))
    engine = HandEngine(
        mix["num_blocks"],
        BLOCK_SIZE,
        prefix_cache=prefix_cache,
        fails=lambda step: next(count) in mix["failing_steps"],
        stream=LateStream() if mix["in_flight"] or mix["async_scheduling"] else None,
        async_scheduling=mix["async_scheduling"],
        eos=mix["stop"],
        max_num_seqs=mix["max_num_seqs"],
        max_num_batched_tokens=mix["num_tokens"],
        watermark=mix["watermark"],
        waiting_served_ratio=mix["ratio"],
        max_waiting_tokens=4,
        max_batch_total_tokens=mix["total_tokens"],
        max_drafts=mix["max_drafts"],
    )
    left = sorted(mix["arrivals"], key=lambda arrival: arrival.step)
    live, step = [], 0

    def submit_and_abort() -> None:
        while left and left[0].step <= step:
            arrival = left.pop(0)
            resumed = {i: tokens[: arrival.num_resumed * i] for i, tokens in outputs(arrival, mix["stop"]).items()}
            wire = generate(
                arrival.prompt_ids,
                arrival.max_tokens,
                arrival.n,
                resumed=resumed,
                priority=arrival.priority,
                tenant=arrival.tenant,
                prompt_logprobs=0 if arrival.prompt_logprobs else None,
            )
            live.append((arrival, resumed, step, engine.submit(wire)))
        for arrival, _, since, request in live:
            if arrival.abort_after is not None and step - since == arrival.abort_after:
                engine.abort(request, None if arrival.n == 1 else 0)

    while left or engine.scheduler.has_work:
        if mix["in_flight"]:
            engine.step(submit_and_abort)
        else:
            submit_and_abort()
            engine.step()
        step += 1
        assert step < 3000
    engine.finish()
    for arrival, resumed, _, request in live:
        check_answer(engine, arrival, resumed, request, mix["stop"])


def check_answer(engine, arrival, resumed, request, stop) -> None:
    got = engine.answer(request)
    for index, expected in outputs(arrival, stop).items():
        tokens = resumed[index] + got.tokens.get(index, [])
        assert tokens == expected[: len(tokens)]
        if isinstance(got.last, End) and got.finished[index].reason != "abort":
            assert tokens == expected
    assert isinstance(got.last, End | Failed)
    if arrival.prompt_logprobs and got.prompt_logprobs is not None:
        expected_logprobs = [-float(token_id) for token_id in arrival.prompt_ids[1:]]
        assert [position.logprob for position in got.prompt_logprobs.positions[1:]] == expected_logprobs


@pytest.mark.parametrize("prefix_cache", ["hash", "radix", "off"])
@settings(max_examples=60, deadline=None)
@given(mix=mixes)
def test_any_mix_gives_the_tokens_of_each_alone(prefix_cache, mix) -> None:
    run_mix(mix, prefix_cache)


@pytest.mark.deep
@pytest.mark.parametrize("prefix_cache", ["hash", "radix", "off"])
@settings(max_examples=20_000, deadline=None)
@given(mix=mixes)
def test_any_mix_gives_the_tokens_of_each_alone_deep(prefix_cache, mix) -> None:
    run_mix(mix, prefix_cache)


def test_forks_of_an_uncached_sequence_may_outlive_the_blocks_that_it_repeats() -> None:
    plain = Arrival(0, 0, (0,), 1, 0, 0, 0, None, False)
    mix = {
        "arrivals": [
            plain,
            replace(plain, prefix=3),
            replace(plain, prefix=3, n=3, max_tokens=6, prompt_logprobs=True),
            replace(plain, prefix=20, max_tokens=4),
            plain,
        ],
        "num_blocks": 15,
        "max_num_seqs": 4,
        "num_tokens": 14,
        "watermark": 0.0,
        "ratio": None,
        "total_tokens": None,
        "failing_steps": set(),
        "in_flight": False,
        "async_scheduling": False,
        "max_drafts": 0,
        "stop": (),
    }
    run_mix(mix, "radix")
