"""The scheduler over the real runner: cache, chunks, mix and pool change no token."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.worker.families import write_family
from tests.worker.scheduler.engine import HandEngine, generate
from worker.model.load import LoadedModel, LoadOptions, load_model
from worker.runner.model_runner import ModelRunner

BLOCK_SIZE = 4
SHARED = [i * 7 % 99 for i in range(40)]
REQUESTS = [
    generate([*SHARED[: 10 * (i % 5)], *(i * k % 99 for k in range(1, 4 + 3 * i))], 12, 1 + i % 3, **params)
    for i, params in enumerate(
        [
            {"temperature": 0.0},
            {"temperature": 1.0},
            {"temperature": 0.7, "top_p": 0.9, "repetition_penalty": 1.2},
            {"temperature": 0.0, "frequency_penalty": 0.5, "presence_penalty": 0.5},
            {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
        ]
        * 2
    )
]


@pytest.fixture(scope="module", params=["llama3", "mistral_window"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LoadedModel]:
    folder: Path = tmp_path_factory.mktemp(request.param)
    write_family(request.param, folder)
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # for products this small, a second thread costs more than it saves
    yield load_model(str(folder), LoadOptions())
    torch.set_num_threads(num_threads)


def engine(model: LoadedModel, num_blocks: int = 400, **options) -> HandEngine:
    runner = ModelRunner(model, num_blocks=num_blocks, block_size=BLOCK_SIZE, eos_token_ids=())
    return HandEngine(num_blocks, BLOCK_SIZE, runner=runner, **options)


def run(engine: HandEngine, wires) -> list[dict[int, list[int]]]:
    requests = [engine.submit(wire) for wire in wires]
    engine.finish()
    return [engine.answer(request).tokens for request in requests]


@pytest.fixture(scope="module")
def alone(model: LoadedModel) -> list[dict[int, list[int]]]:
    """Each request by itself, with a cold cache."""
    return [run(engine(model), [wire])[0] for wire in REQUESTS]


@pytest.mark.parametrize("prefix_cache", ["hash", "radix", "off"])
def test_mixed_then_warm(model: LoadedModel, alone, prefix_cache) -> None:
    mixed = engine(model, prefix_cache=prefix_cache)
    assert run(mixed, REQUESTS) == alone
    assert run(mixed, REQUESTS) == alone
    assert (mixed.allocator.stats().hit_tokens > 0) == (prefix_cache != "off")


@pytest.mark.parametrize("prefix_cache", ["hash", "radix", "off"])
def test_chunked_preempted_and_evicted(model: LoadedModel, alone, prefix_cache) -> None:
    tight = engine(model, 30, prefix_cache=prefix_cache, max_num_batched_tokens=11, max_num_seqs=9, watermark=0.0)
    assert run(tight, REQUESTS) == alone
    assert run(tight, REQUESTS) == alone
    assert tight.num_preempted > 0


@pytest.mark.parametrize("max_drafts", [0, 3])
@pytest.mark.parametrize(
    "async_scheduling", [False, True]
)  # with True, shared blocks of forks are copied in steps scheduled ahead
def test_a_sequence_holds_only_the_window_and_a_chunk(tmp_path: Path, async_scheduling: bool, max_drafts: int) -> None:
    write_family("mistral_window", tmp_path)
    model = load_model(str(tmp_path), LoadOptions())
    window = model.config.attention.longest_window
    assert window == 9
    few = {"allowed_token_ids": (11, 42)} if max_drafts else {}  # the output repeats itself
    wires = [
        generate([i * k % 99 for k in range(1, 60)], 40, 1 + i % 2, temperature=float(i % 2), **few) for i in range(6)
    ]
    want = [run(engine(model), [wire])[0] for wire in wires]
    # a ring of 5 blocks per sequence instead of 25; the pool of 14 does not hold four of them
    limits = {"max_num_batched_tokens": 8, "max_num_seqs": 8, "max_drafts": max_drafts}
    ring = engine(model, 15, prefix_cache="off", window_size=window + 8, async_scheduling=async_scheduling, **limits)
    most_held = 0
    requests = [ring.submit(wire) for wire in wires]
    while ring.step() is not None:
        most_held = max(most_held, *(len(table.block_table) for table in ring.allocator._live), 0)
    assert [ring.answer(request).tokens for request in requests] == want
    assert most_held == 5
    assert (ring.num_async > 0) == async_scheduling or max_drafts > 0
    assert (ring.num_accepted > 0) == (max_drafts > 0)


def test_deterministic_bfloat16_alone_and_among_sixteen_others(tmp_path: Path) -> None:
    write_family("llama3", tmp_path)
    model = load_model(str(tmp_path), LoadOptions(dtype="bfloat16", deterministic=True))
    wire = generate([i * 5 % 99 for i in range(37)], 24, temperature=0.0)
    others = [generate([i * k % 99 for i in range(3 * k)], 8 + k, temperature=1.0) for k in range(1, 17)]
    [want] = run(engine(model), [wire])
    crowd = engine(model, max_num_batched_tokens=50, max_num_seqs=20)
    assert run(crowd, [*others[:8], wire, *others[8:]])[8] == want
