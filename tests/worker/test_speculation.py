"""Drafts change no token: requests of all kinds, with drafts and without, through a pool that is too small."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_model import write_tiny_model
from tests.waiting import HANG_S
from tests.worker.device_streams import LateStream
from tests.worker.scheduler.engine import Answer, HandEngine, generate
from worker.config import WorkerConfig
from worker.engine.grammar import GrammarCompiler
from worker.loading.engine import build_bundle
from worker.model.load import LoadOptions, load_model
from worker.runner.model_runner import ModelRunner
from worker.wire import GenerateRequest, Grammar

SHORT, DEEP = 150, 500
"""Numbers of requests."""
NUM_BLOCKS = 50
BLOCK_SIZE = 8
EOS = 2
RECORD = [3 + i * 7 % 60 for i in range(40)]
GRAMMARS = (
    Grammar("json_schema", '{"type": "array", "items": {"enum": ["on", "off"]}, "minItems": 2, "maxItems": 9}'),
    Grammar("regex", "(ab|abc){2,30}"),
    Grammar("choice", '["yes yes yes yes", "no no no no no"]'),
)


def wire(rng: random.Random, number: int) -> GenerateRequest:
    """A request of random kind. Few allowed tokens make an output that repeats itself."""
    params: dict[str, Any] = {"temperature": rng.choice([0.0, 0.0, 0.8, 1.5])}
    few = tuple(rng.sample(range(3, 60), rng.choice([2, 3, 5])))
    kind = number % 10
    if kind == 9:
        params["grammar"] = rng.choice(GRAMMARS)
    elif kind < 7:
        params["allowed_token_ids"] = (*few, EOS) if kind == 1 else few
    if kind == 2:
        params |= {"repetition_penalty": 1.05, "frequency_penalty": 0.01, "presence_penalty": -0.1}
    if kind == 3:
        params |= {"logprobs": 3, "prompt_logprobs": rng.choice([None, 1])}
    if kind == 4:
        params |= {"stop_token_ids": few[:1], "min_tokens": rng.randint(0, 9)}
    if kind == 5:
        params |= {"bad_words": ((few[0], few[1], few[0]),), "logit_bias": ((few[0], 1.5),)}
    if kind == 6:
        params |= {"top_p": 0.9, "top_k": 3, "min_p": 0.01}
    begun = {0: [rng.choice(few) for _ in range(rng.randint(1, 12))]} if kind == 7 else None
    prompt = [*RECORD[: rng.randint(0, 40)], *few * rng.randint(1, 4)]
    num_choices = 1 + 2 * (kind in (0, 8) and rng.random() < 0.4)
    return generate(
        prompt,
        rng.randint(1, 40),
        num_choices,
        resumed=begun,
        tenant=rng.choice("ab"),
        priority=rng.choice([0, 0, 1]),
        **params,
    )


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory):
    folder: Path = write_tiny_model(tmp_path_factory.mktemp("tiny") / "tiny-llama")
    return load_model(str(folder), LoadOptions(dtype="float32", deterministic=True))


def run(
    model, num_requests: int, max_drafts: int, *, async_scheduling: bool = False
) -> tuple[HandEngine, list[Answer]]:
    rng, stream = random.Random(1), LateStream() if async_scheduling else None
    runner = ModelRunner(model, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, eos_token_ids=(EOS,), stream=stream)
    engine = HandEngine(
        NUM_BLOCKS,
        BLOCK_SIZE,
        runner=runner,
        eos=(EOS,),
        max_drafts=max_drafts,
        async_scheduling=async_scheduling,
        max_num_seqs=24,
        max_num_batched_tokens=64,
        watermark=0.0,
    )
    compiler = GrammarCompiler(build_bundle(WorkerConfig(block_size=BLOCK_SIZE), model, 400), compile_timeout_s=HANG_S)
    requests = []
    for number in range(num_requests):
        given = wire(rng, number)
        requests.append(engine.submit(given, asyncio.run(compiler.constraints(given))))
        for _ in range(number % 3):
            engine.step()
    engine.finish(50_000)
    compiler.close()
    return engine, [engine.answer(request) for request in requests]


@pytest.fixture(scope="module", params=[SHORT, pytest.param(DEEP, marks=pytest.mark.deep)])
def want(request: pytest.FixtureRequest, model) -> list[Answer]:
    """The answers without drafts."""
    engine, answers = run(model, request.param, 0)
    assert engine.num_preempted > 0
    return answers


@pytest.mark.parametrize("async_scheduling", [pytest.param(False, marks=pytest.mark.e2e), True])
def test_no_token_of_many_requests_differs(model, want: list[Answer], async_scheduling: bool) -> None:
    drafting, got = run(model, len(want), 6, async_scheduling=async_scheduling)
    assert [answer.tokens for answer in got] == [answer.tokens for answer in want]
    assert [answer.finished for answer in got] == [answer.finished for answer in want]
    assert [answer.prompt_logprobs for answer in got] == [answer.prompt_logprobs for answer in want]
    assert [answer.logprobs for answer in got] == [answer.logprobs for answer in want]
    assert drafting.num_preempted > 0
    assert len(want) < drafting.num_accepted < drafting.num_drafted
    assert (drafting.num_async > 0) == async_scheduling
