"""Finite or failed: when NaN or infinity appears in a step, its requests end right or fail, and later ones are right.

Faults are put into the inputs or outputs of a layer's attention. A request survives a fault that comes once, and fails
by one that stays. Nothing of it is ever served from the cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cache.allocators import PREFIX_CACHES, PrefixCache
from cache.types import NULL_BLOCK
from tests.worker.device_streams import LateStream
from tests.worker.families import write_family
from tests.worker.scheduler.engine import HandEngine, generate
from worker.attention.base import ForwardBatch
from worker.contracts.step import NonFinite, SequenceStep, Step
from worker.kernels.device import DeviceStream
from worker.model.load import LoadedModel, LoadOptions, load_model
from worker.runner.model_runner import ModelRunner
from worker.wire import End, Failed

BLOCK_SIZE = 4
NUM_LAYERS = 3
NAN, INF = float("nan"), float("inf")
PLACES = ("query", "key", "value", "attended")
PROMPT = [i * 7 % 99 for i in range(62)]
PARAMS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.4},
    {"temperature": 1.2, "top_k": 12, "repetition_penalty": 1.1},
    {"temperature": 1.0, "allowed_token_ids": (3, 14, 15)},  # the output repeats itself
)
REQUESTS = [
    generate(
        [*PROMPT[: 12 * (i % 5)], *(i * k % 99 for k in range(1, 3 + 2 * (i % 7)))],
        4 + i % 9,
        1 + (i % 4 == 3),
        **params,
    )
    for i, params in enumerate(PARAMS * 5)
]
"""Prompts of 2 to 62 tokens, most of which share a beginning of up to 48."""
CHUNK = 16
NUM_CACHED = 16
"""Tokens of the prompt that an earlier request has cached."""
KINDS = {
    "float32": LoadOptions(),
    "float16": LoadOptions(dtype="float16"),
    "compiled": LoadOptions(dtype="bfloat16"),
    "invariant": LoadOptions(deterministic=True),
}


@dataclass(frozen=True)
class Fault:
    """Sets one element of a row to `value` where `strikes(step number, position)` is true."""

    strikes: Callable[[int, int], bool]
    place: str
    layer: int
    value: float
    element: int = 3


@dataclass
class FaultyAttention:
    inner: Any
    faults: list[Fault] = field(default_factory=list)
    num_steps: int = 0
    num_struck: int = 0
    name: str = "faulty"

    def plan(self, spans: Any) -> object:
        self.num_steps += 1
        return self.inner.plan(spans)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, batch: ForwardBatch) -> Tensor:
        states = {"query": query.clone(), "key": key.clone(), "value": value.clone()}
        self._strike(layer, states, batch)
        attended = self.inner.attend(layer, *states.values(), batch)
        self._strike(layer, {"attended": attended}, batch)
        return attended

    def _strike(self, layer: int, states: dict[str, Tensor], batch: ForwardBatch) -> None:
        is_probe = batch.slots.tolist() == [NULL_BLOCK]  # of the device: a fault there ends the engine
        for fault in () if is_probe else self.faults:
            if fault.layer == layer and fault.place in states:
                for row, position in enumerate(batch.positions.tolist()):
                    if fault.strikes(self.num_steps, position):
                        flat = states[fault.place].view(len(batch.positions), -1)
                        flat[row, fault.element % flat.shape[1]] = fault.value
                        self.num_struck += 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama3")
    write_family("llama3", folder)
    return folder


@pytest.fixture(scope="module")
def models(folder: Path) -> dict[str, LoadedModel]:
    return {kind: load_model(str(folder), options) for kind, options in KINDS.items()}


def make_engine(
    model: LoadedModel,
    *,
    num_blocks: int = 100,
    prefix_cache: PrefixCache = "hash",
    stream: DeviceStream | None = None,
    **limits: Any,
) -> tuple[HandEngine, FaultyAttention]:
    runner = ModelRunner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, eos_token_ids=(), stream=stream)
    runner._attention = faulty = FaultyAttention(runner._attention)
    limits = {"max_num_batched_tokens": CHUNK, "max_num_seqs": 8} | limits
    engine = HandEngine(num_blocks, BLOCK_SIZE, runner=runner, prefix_cache=prefix_cache, **limits)
    return engine, faulty


def ask(engine: HandEngine, prompt_ids: list[int], n: int = 1) -> dict[int, list[int]] | None:
    """Return the tokens of a greedy request. None: it failed."""
    request = engine.submit(generate(prompt_ids, 3, n, temperature=0.0))
    engine.finish()
    answer = engine.answer(request)
    assert isinstance(answer.last, End | Failed)
    return answer.tokens if isinstance(answer.last, End) else None


def assert_finite(engine: HandEngine) -> None:
    """Check that every entry of the pool is finite, as it may be read as padding."""
    for pool in (*engine.runner.cache.keys, *engine.runner.cache.values):
        assert bool(pool.isfinite().all())


@pytest.mark.parametrize("is_warm", [False, pytest.param(True, marks=pytest.mark.e2e)], ids=["cold", "warm"])
@pytest.mark.parametrize("chunk", range(3), ids=["first", "middle", "last"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_with_a_fault_is_right_or_fails(
    models: dict[str, LoadedModel], kind: str, chunk: int, is_warm: bool
) -> None:
    """First for one step, so that the chunk is computed again; then in every step. Later requests are right."""
    struck = (NUM_CACHED if is_warm else 0) + chunk * CHUNK + 5
    prompts = (PROMPT[: NUM_CACHED + 1], PROMPT, [*PROMPT[:-2], 50, 51])
    right = [ask(make_engine(models[kind])[0], prompt) for prompt in prompts]
    for place, layer, value in (("query", 0, -INF), ("key", 2, INF), ("value", 1, NAN), ("attended", 1, INF)):
        for stays in (False, True):
            engine, faulty = make_engine(models[kind])
            if is_warm:
                assert ask(engine, prompts[0]) == right[0]
            last = faulty.num_steps + chunk + 1

            def strikes(step: int, position: int, stays: bool = stays, last: int = last) -> bool:
                return position == struck and (stays or step <= last)

            faulty.faults = [Fault(strikes, place, layer, value)]
            got = ask(engine, PROMPT, n=3)
            assert faulty.num_struck > 0
            assert got == (None if stays else dict.fromkeys(range(3), right[1][0])), (place, value)
            assert_finite(engine)
            faulty.faults = []
            assert [ask(engine, prompt) for prompt in prompts] == right, (place, value)


def test_float16_that_overflows_fails_alone(folder: Path) -> None:
    """One token's embedding is finite, and the sums that follow are not."""
    model = load_model(str(folder), LoadOptions(dtype="float16"))
    with torch.inference_mode():
        model.decoder.embedding[13] = torch.finfo(torch.float16).max  # type: ignore[attr-defined]
    clean = [token if token != 13 else 14 for token in PROMPT]
    engine, _ = make_engine(model)
    right = ask(engine, clean, n=3)
    assert right is not None
    for is_warm in (False, True):
        for at in (2, 2 * CHUNK + 9, len(PROMPT) - 1):
            engine, _ = make_engine(model)
            if is_warm:
                assert ask(engine, clean, n=3) == right
            broken = [*clean[:at], 13, *clean[at + 1 :]]
            other = engine.submit(generate([3, 5, 8], 9, temperature=0.0))
            assert ask(engine, broken, n=3) is None
            assert isinstance(engine.answer(other).last, End)
            assert engine.allocator.find(broken, b"r" * 16) <= at
            assert_finite(engine)
            assert ask(engine, clean, n=3) == right


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_that_samples_nothing_is_checked(models: dict[str, LoadedModel], kind: str) -> None:
    """It keeps the blocks that it has only read."""
    runner = ModelRunner(models[kind], num_blocks=8, block_size=BLOCK_SIZE, eos_token_ids=())
    tables = [1, 2, 3], [1, 2, 4]
    runner.run(Step([SequenceStep(PROMPT[:8], 0, tables[0], range(4, 12))]))
    before = [pool.clone() for pool in (*runner.cache.keys, *runner.cache.values)]
    runner._attention = FaultyAttention(
        runner._attention, [Fault(lambda step, position: position == 9, "value", 1, INF)]
    )
    parts = [SequenceStep(PROMPT[8:11], 8, table, range(4 * table[2], 4 * table[2] + 3)) for table in tables]
    with pytest.raises(NonFinite):
        runner.run(Step(parts))
    for pool, was in zip((*runner.cache.keys, *runner.cache.values), before, strict=True):
        assert torch.equal(pool, was)


def test_logprobs_of_a_prompt_are_numbers_or_the_request_fails(models: dict[str, LoadedModel]) -> None:
    engine, faulty = make_engine(models["float32"])
    faulty.faults = [Fault(lambda step, position: position == 5, "attended", NUM_LAYERS - 1, NAN)]
    bad = engine.submit(generate(PROMPT, 2, prompt_logprobs=1))
    engine.finish()
    assert isinstance(engine.answer(bad).last, Failed)
    assert engine.answer(bad).prompt_logprobs is None


def test_a_step_that_raises_halfway_leaves_only_finite_padding(models: dict[str, LoadedModel]) -> None:
    engine, faulty = make_engine(models["float32"])
    right = {tuple(prompt): ask(make_engine(models["float32"])[0], prompt) for prompt in (PROMPT[:5], PROMPT[:30])}

    def out_of_memory(step: int, position: int) -> bool:
        if position == 0:
            raise RuntimeError("no memory is left")
        return False

    faulty.faults = [
        Fault(lambda step, position: True, "value", 0, NAN),
        Fault(out_of_memory, "query", 1, NAN),
    ]
    assert ask(engine, [*range(14)]) is None
    assert_finite(engine)
    faulty.faults = []
    requests = [engine.submit(generate(list(prompt), 3, temperature=0.0)) for prompt in right]
    engine.finish()
    assert [engine.answer(request).tokens for request in requests] == list(right.values())


def test_logits_of_minus_infinity_are_blamed_on_the_model(folder: Path) -> None:
    model = load_model(str(folder), LoadOptions())
    runner = ModelRunner(model, num_blocks=8, block_size=BLOCK_SIZE, eos_token_ids=())
    engine = HandEngine(8, BLOCK_SIZE, runner=runner)
    logits = model.decoder.logits
    runner._decoder = type("Broken", (), {"forward": model.decoder.forward, "logits": lambda _, h: logits(h) - INF})()
    request = engine.submit(generate([1, 2, 3]))
    plan = engine.scheduler.schedule(1.0)
    assert plan is not None
    with pytest.raises(NonFinite):
        runner.run(plan.step())
    assert request.started_s is not None


faults = st.builds(
    lambda step, row, place, layer, value, element: (step, row, place, layer, value, element),
    step=st.integers(1, 40),
    row=st.integers(0, 70),
    place=st.sampled_from(PLACES),
    layer=st.integers(0, NUM_LAYERS - 1),
    value=st.sampled_from([NAN, INF, -INF]),
    element=st.integers(0, 31),
)


@dataclass(frozen=True)
class BrokenMix:
    requests: list[tuple[int, int]]
    """Each with the step before which it arrives."""
    faults: list[tuple[int, int, str, int, float, int]]
    stays_for: int
    num_blocks: int
    num_tokens: int
    async_scheduling: bool


broken_mixes = st.builds(
    BrokenMix,
    requests=st.lists(st.tuples(st.integers(0, 12), st.integers(0, len(REQUESTS) - 1)), min_size=1, max_size=10),
    faults=st.lists(faults, min_size=1, max_size=6),
    stays_for=st.sampled_from([1, 1, 2, 4]),
    num_blocks=st.sampled_from([22, 40, 200]),
    num_tokens=st.sampled_from([17, 40, 512]),
    async_scheduling=st.booleans(),
)


@pytest.fixture(scope="module")
def alone(models: dict[str, LoadedModel]) -> Callable[[int], dict[int, list[int]]]:
    known: dict[int, dict[int, list[int]]] = {}

    def tokens(index: int) -> dict[int, list[int]]:
        if index not in known:
            engine, _ = make_engine(models["float32"], prefix_cache="off", max_num_batched_tokens=512)
            request = engine.submit(REQUESTS[index])
            engine.finish()
            known[index] = engine.answer(request).tokens
        return known[index]

    return tokens


def run(engine: HandEngine, mix: BrokenMix, alone: Any, faulty: FaultyAttention) -> int:
    """Return how many have failed, and check that the others are right."""
    if faulty.num_steps == 0:
        faulty.faults = [
            Fault(_struck(step, row, mix.stays_for), place, layer, value, element)
            for step, row, place, layer, value, element in mix.faults
        ]
    left, live, step = sorted(mix.requests), [], 0
    while left or engine.scheduler.has_work:
        while left and left[0][0] <= step:
            index = left.pop(0)[1]
            live.append((index, engine.submit(REQUESTS[index])))
        engine.step()
        step += 1
        assert step < 2000
    engine.finish()
    engine.allocator.check_integrity()
    failed = [request for _, request in live if isinstance(engine.answer(request).last, Failed)]
    for index, request in live:
        if request not in failed:
            assert engine.answer(request).tokens == alone(index)
    return len(failed)


def _struck(first: int, position: int, num_steps: int) -> Callable[[int, int], bool]:
    return lambda step, at: first <= step < first + num_steps and at == position


@pytest.mark.parametrize("prefix_cache", PREFIX_CACHES)
@pytest.mark.parametrize("num_mixes", [6, pytest.param(1000, marks=pytest.mark.deep)])
def test_any_faults_leave_answers_right_or_failed(
    models: dict[str, LoadedModel], alone: Any, prefix_cache: PrefixCache, num_mixes: int
) -> None:
    @settings(max_examples=num_mixes, deadline=None)
    @given(mix=broken_mixes)
    def check(mix: BrokenMix) -> None:
        engine, faulty = make_engine(
            models["float32"],
            num_blocks=mix.num_blocks,
            prefix_cache=prefix_cache,
            stream=LateStream() if mix.async_scheduling else None,
            async_scheduling=mix.async_scheduling,
            max_num_batched_tokens=mix.num_tokens,
            max_num_seqs=8,
        )
        num_failed = run(engine, mix, alone, faulty)
        assert num_failed == 0 or faulty.num_struck > 0
        assert_finite(engine)
        faulty.faults = []
        assert run(engine, mix, alone, faulty) == 0

    check()
