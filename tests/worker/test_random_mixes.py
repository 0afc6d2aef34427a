"""Random mixes of requests over the real scheduler, allocators and runner: each gives the tokens that it gives alone.

They are compared with the tokens of each request alone, with a cold cache and in one chunk. A mix chooses arrivals,
aborts, the sizes of pool, batch and chunks, resets of the cache, and whether steps are scheduled ahead. Requests come
between steps or while they run. Each mix runs cold and then warm.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cache.allocators import PREFIX_CACHES, PrefixCache
from tests.worker.device_streams import LateStream
from tests.worker.families import write_family
from tests.worker.scheduler.engine import HandEngine, generate
from worker.device import DeviceStream
from worker.model.load import LoadedModel, LoadOptions, load_model
from worker.runner.model_runner import ModelRunner
from worker.wire import GenerateRequest

BLOCK_SIZE = 4
SHARED = [i * 7 % 99 for i in range(48)]
PARAMS = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.4},
    {"temperature": 1.2, "top_k": 12, "repetition_penalty": 1.1},
    {"temperature": 1.0, "allowed_token_ids": (3, 14, 15)},  # the output repeats itself
)
REQUESTS = [
    generate(
        [*SHARED[: 12 * (i % 5)], *(i * k % 99 for k in range(1, 3 + 2 * (i % 7)))],
        4 + i % 9,
        1 + (i % 4 == 3),
        **params,
    )
    for i, params in enumerate(PARAMS * 5)
]
"""Prompts of 2 to 62 tokens, most of which share a beginning of up to 48."""


@dataclass(frozen=True)
class Arrival:
    step: int
    request: int
    abort_after: int | None


@dataclass(frozen=True)
class Mix:
    arrivals: list[Arrival]
    num_blocks: int
    max_num_seqs: int
    num_tokens: int
    num_solo_tokens: int | None
    watermark: float
    forget_at: int | None
    in_flight: bool
    async_scheduling: bool
    max_drafts: int


mixes = st.builds(
    Mix,
    arrivals=st.lists(
        st.builds(
            Arrival,
            step=st.integers(0, 15),
            request=st.integers(0, len(REQUESTS) - 1),
            abort_after=st.none() | st.none() | st.integers(0, 12),
        ),
        min_size=1,
        max_size=17,
    ),
    num_blocks=st.sampled_from([22, 30, 60, 400]),  # the largest choice takes 19
    max_num_seqs=st.integers(2, 17),
    num_tokens=st.sampled_from([17, 24, 64, 512]),
    num_solo_tokens=st.none() | st.just(600),
    watermark=st.sampled_from([0.0, 0.1]),
    forget_at=st.none() | st.integers(1, 20),
    in_flight=st.booleans(),
    async_scheduling=st.booleans(),
    max_drafts=st.sampled_from([0, 0, 1, 5]),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder: Path = tmp_path_factory.mktemp("llama3")
    write_family("llama3", folder)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for products this small a second thread costs more than it does
    yield load_model(str(folder), LoadOptions())
    torch.set_num_threads(num_threads)


def make_engine(
    model: LoadedModel, num_blocks: int, prefix_cache: PrefixCache, stream: DeviceStream | None = None, **limits
) -> HandEngine:
    runner = ModelRunner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, eos_token_ids=(), stream=stream)
    return HandEngine(num_blocks, BLOCK_SIZE, runner=runner, prefix_cache=prefix_cache, max_model_len=256, **limits)


@pytest.fixture(scope="module")
def alone(model: LoadedModel):
    @cache
    def tokens(request: int) -> dict[int, list[int]]:
        engine = make_engine(model, 100, "off")
        submitted = engine.submit(REQUESTS[request])
        engine.finish()
        return engine.answer(submitted).tokens

    return tokens


def run(engine: HandEngine, mix: Mix, alone) -> None:
    left = sorted(mix.arrivals, key=lambda arrival: arrival.step)
    live, step = [], 0

    def submit_and_abort() -> None:
        while left and left[0].step <= step:
            arrival = left.pop(0)
            live.append((arrival, step, engine.submit(REQUESTS[arrival.request])))
        for arrival, since, request in live:
            if arrival.abort_after is not None and step - since == arrival.abort_after:
                engine.abort(request)

    while left or engine.scheduler.has_work:
        if not mix.in_flight:
            submit_and_abort()
        if step == mix.forget_at:
            engine.settle()
            engine.scheduler.preempt_all()
            assert engine.allocator.reset()
        engine.step(submit_and_abort if mix.in_flight else lambda: None)
        step += 1
        assert step < 2000
    engine.finish()
    for arrival, _, request in live:
        answer = engine.answer(request)
        for choice, want in alone(arrival.request).items():
            got = answer.tokens.get(choice, [])
            assert got == (want if answer.finished[choice].reason != "abort" else want[: len(got)])


def check(model: LoadedModel, alone, prefix_cache: PrefixCache, mix: Mix) -> None:
    solo = None if mix.num_solo_tokens is None else max(mix.num_solo_tokens, mix.num_tokens)
    engine = make_engine(
        model,
        mix.num_blocks,
        prefix_cache,
        LateStream() if mix.in_flight or mix.async_scheduling else None,
        async_scheduling=mix.async_scheduling,
        max_num_seqs=mix.max_num_seqs,
        max_num_batched_tokens=mix.num_tokens,
        max_solo_prefill_tokens=solo,
        watermark=mix.watermark,
        max_drafts=mix.max_drafts,
    )
    run(engine, mix, alone)
    run(engine, mix, alone)


@pytest.mark.parametrize("prefix_cache", PREFIX_CACHES)
@settings(max_examples=4, deadline=None)
@given(mix=mixes)
def test_any_mix_gives_the_tokens_of_each_alone(model: LoadedModel, alone, prefix_cache: PrefixCache, mix: Mix) -> None:
    check(model, alone, prefix_cache, mix)


@pytest.mark.deep
@pytest.mark.parametrize("prefix_cache", PREFIX_CACHES)
@settings(max_examples=1000, deadline=None)
@given(mix=mixes)
def test_any_mix_gives_the_tokens_of_each_alone_deep(
    model: LoadedModel, alone, prefix_cache: PrefixCache, mix: Mix
) -> None:
    check(model, alone, prefix_cache, mix)


@pytest.mark.parametrize("prefix_cache", PREFIX_CACHES)
def test_sixteen_requests_that_exhaust_the_pool_all_end_right(model: LoadedModel, prefix_cache: PrefixCache) -> None:
    wires: list[GenerateRequest] = [
        generate([i, *(i * k % 99 for k in range(1, 40))], 16, temperature=float(i % 2)) for i in range(16)
    ]  # each takes 14 of 39 blocks in the end
    want = []
    for wire in wires:
        engine = make_engine(model, 40, "off")
        request = engine.submit(wire)
        engine.finish()
        want.append(engine.answer(request).tokens)
    tight = make_engine(model, 40, prefix_cache, max_num_seqs=16, max_num_batched_tokens=48, watermark=0.0)
    requests = [tight.submit(wire) for wire in wires]
    tight.finish()
    assert tight.num_preempted > 0
    assert [tight.answer(request).tokens for request in requests] == want
