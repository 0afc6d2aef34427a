from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cache.allocators.base import BlockCopy
from cache.types import BlockId
from tests.worker.families import write_family
from worker.attention.base import AttentionShape
from worker.config import WorkerConfig
from worker.contracts.step import NonFinite, SamplingRow, SequenceStep, Step
from worker.kernels.device import Stopwatch
from worker.loading import pool
from worker.model.load import LoadedModel, LoadOptions, load_model
from worker.runner import memory
from worker.runner.memory import block_bytes, free_memory_bytes, num_blocks_that_fit
from worker.runner.model_runner import ModelRunner
from worker.wire import SamplingParams

BLOCK = 4
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("llama3")
    return write_family("llama3", folder), folder


@pytest.fixture
def model(written: tuple[Any, Path]) -> LoadedModel:
    return load_model(str(written[1]), LoadOptions())


@pytest.fixture
def runner(model: LoadedModel) -> ModelRunner:
    return ModelRunner(model, num_blocks=32, block_size=BLOCK, eos_token_ids=(2,))


def part(
    token_ids: Sequence[int],
    table: Sequence[int],
    start: int = 0,
    sampling_rows: tuple[SamplingRow, ...] | None = None,
    **fields: Any,
) -> SequenceStep:
    """Tokens start.. of `token_ids` over the blocks of `table`, with one greedy row by default."""
    if sampling_rows is None:
        sampling_rows = (SamplingRow(GREEDY, 0, len(token_ids), token_ids, ()),)
    slots = [table[i // BLOCK] * BLOCK + i % BLOCK for i in range(start, len(token_ids))]
    return SequenceStep(token_ids[start:], start, [BlockId(block) for block in table], slots, sampling_rows, **fields)


@torch.inference_mode()
def best(reference: Any, token_ids: Sequence[int]) -> int:
    return int(reference(torch.tensor([list(token_ids)])).logits[0, -1].argmax())


def test_results_come_in_the_order_of_the_step(runner: ModelRunner, written: tuple[Any, Path]) -> None:
    """The batch has decodes before chunks, and short contexts before long ones."""
    prompts = [[9, 8, 7, 6, 5, 4, 3], [50, 51], [1], [60, 61, 62, 63, 64], [70]]
    tables = [[3, 17], [5], [30], [2, 8], [9]]
    runner.run(Step([part(prompts[3][:-1], tables[3], sampling_rows=())]))
    starts = [0, 0, 0, 4, 0]
    steps = [part(prompt, table, start) for prompt, table, start in zip(prompts, tables, starts, strict=True)]
    results = runner.run(Step(steps))
    assert [one.sampled[0].token_id for one in results] == [best(written[0], prompt) for prompt in prompts]


def test_copied_blocks_are_read_in_the_same_step(runner: ModelRunner, written: tuple[Any, Path]) -> None:
    prompt = [4, 8, 15, 16, 23, 42]
    runner.run(Step([part(prompt[:-1], [7, 8], sampling_rows=())]))
    # 8 -> 20 -> 21: the second copy reads what the first wrote.
    copies = [BlockCopy(BlockId(8), BlockId(20)), BlockCopy(BlockId(20), BlockId(21))]
    (result,) = runner.run(Step([part(prompt, [7, 21], start=5)], copies))
    assert result.sampled[0].token_id == best(written[0], prompt)


def test_a_step_may_hold_only_copies(runner: ModelRunner) -> None:
    assert runner.run(Step([], [BlockCopy(BlockId(1), BlockId(2))])) == []


@pytest.mark.parametrize("sampling_rows", [None, ()])
def test_the_parts_of_a_step_are_timed(runner: ModelRunner, sampling_rows: tuple[()] | None) -> None:
    begun_s = time.perf_counter()
    times = runner.launch(Step([part([4, 8, 15], [7], sampling_rows=sampling_rows)])).collect().times
    assert times is not None
    assert min(times) > 0
    assert sum(times) < time.perf_counter() - begun_s


def test_a_gpu_times_parts_by_its_events(monkeypatch: pytest.MonkeyPatch) -> None:
    class Event:
        """Stands for one recorded as the third, the fifth or the ninth millisecond ends."""

        ends_ms = iter((3, 5, 9))

        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.ended_ms = next(self.ends_ms)

        def elapsed_time(self, end: Event) -> float:
            return end.ended_ms - self.ended_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    stopwatch = Stopwatch(torch.device("cuda"))
    stopwatch.mark()
    stopwatch.mark()
    assert stopwatch.seconds() == [0.002, 0.004]


def test_several_samples_from_one_prompt(runner: ModelRunner) -> None:
    prompt = [4, 8, 15, 16, 23, 42]
    params = SamplingParams(max_tokens=8, temperature=3.0)
    sampling_rows = tuple(SamplingRow(params, seed, len(prompt), prompt, ()) for seed in range(20))
    other = part([9, 9], [9])
    together = runner.run(Step([other, part(prompt, [7, 8], sampling_rows=sampling_rows)]))[1].sampled
    alone = [runner.run(Step([part(prompt, [7, 8], sampling_rows=(one,))]))[0].sampled[0] for one in sampling_rows]
    assert list(together) == alone
    assert len({one.token_id for one in together}) > 3


def test_prompt_logprobs_over_chunks(runner: ModelRunner, written: tuple[Any, Path]) -> None:
    prompt = [4, 8, 15, 16, 23, 42, 1, 77]
    first = part(prompt[:5], [7, 8], sampling_rows=(), num_prompt_logprobs=2, next_token_ids=prompt[1:6])
    rest = part(prompt, [7, 8], start=5, num_prompt_logprobs=2, next_token_ids=prompt[6:])
    other = part([3, 3, 3], [11])
    found = [
        *runner.run(Step([other, first]))[1].prompt_logprobs,
        *runner.run(Step([rest, other]))[0].prompt_logprobs,
    ]
    with torch.inference_mode():
        want = written[0](torch.tensor([prompt])).logits[0, :-1].log_softmax(-1)
    assert len(found) == len(prompt) - 1
    for row, token_id, one in zip(want, prompt[1:], found, strict=True):
        assert one.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
        assert [value for _, value in one.top] == pytest.approx(row.topk(2).values.tolist(), abs=1e-3)


def test_a_broken_sequence_leaves_nothing_behind(model: LoadedModel, written: tuple[Any, Path]) -> None:
    """One token's embedding is NaN. The next owner of its blocks, padded to a longer one, must not see it."""
    runner = ModelRunner(model, num_blocks=32, block_size=BLOCK, eos_token_ids=(2,))
    with torch.inference_mode():
        model.decoder.embedding[13] = float("nan")  # type: ignore[attr-defined]
    with pytest.raises(NonFinite):
        runner.run(Step([part([13, 13, 13, 13, 13, 13], [7, 8])]))
    prompts, tables = [[4, 8, 15, 16, 23], [4, 9, 1, 1, 2, 2, 77]], [[7, 8], [10, 11]]
    starts = [part(prompt[:-1], table, sampling_rows=()) for prompt, table in zip(prompts, tables, strict=True)]
    runner.run(Step(starts))
    last = [part(prompt, table, len(prompt) - 1) for prompt, table in zip(prompts, tables, strict=True)]
    results = runner.run(Step(last))
    assert [one.sampled[0].token_id for one in results] == [best(written[0], prompt) for prompt in prompts]


def test_numerics_name_the_kernel(runner: ModelRunner) -> None:
    assert runner.numerics == "cpu/float32/panels/tiled"


def test_pools_are_sized_from_memory(model: LoadedModel) -> None:
    shape = model.config.attention
    size = block_bytes(shape, 16, torch.bfloat16)
    assert size == 2 * 3 * 16 * 2 * 16 * 2
    assert num_blocks_that_fit(10 * size + 1, shape, 16, torch.bfloat16) == 10
    with pytest.raises(ValueError, match="KV pool"):
        num_blocks_that_fit(size, shape, 16, torch.bfloat16)
    assert free_memory_bytes(torch.device("cpu")) > 1_000_000
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "_MEMINFO", Path("/nothing"))  # as on macOS
        assert free_memory_bytes(torch.device("cpu")) > 1_000_000


def test_the_pool_of_a_gpu_leaves_room_for_the_largest_step(
    model: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model of 8 G parameters leaves little of a GPU of 24 GB. 90 % of the rest would be too much."""
    large = replace(
        model.config,
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        attention=AttentionShape(32, 32, 8, 128, 128**-0.5),
        max_model_len=131_072,
    )
    loaded = SimpleNamespace(config=large, device=torch.device("cuda"), dtype=torch.bfloat16, options=model.options)
    per_block = block_bytes(large.attention, 16, torch.bfloat16)
    for free, config, least, most in (
        (64 << 30, WorkerConfig(), 57.0, 58.0),
        (7 << 30, WorkerConfig(), 4.0, 5.5),
        (7 << 30, WorkerConfig(max_num_batched_tokens=512, max_num_seqs=8), 5.2, 6.3),
    ):
        monkeypatch.setattr(pool, "free_memory_bytes", lambda device, num_sharing, free=free: free)
        taken = pool.num_pool_blocks(config, loaded) * per_block / (1 << 30)  # type: ignore[arg-type]
        assert least < taken < most
    monkeypatch.setattr(pool, "free_memory_bytes", lambda device, num_sharing: 1 << 30)
    with pytest.raises(ValueError, match="KV pool"):
        pool.num_pool_blocks(WorkerConfig(), loaded)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("device", "num_gpus", "devices", "num_sharing"),
    [
        ("auto", 4, ["cuda:0", "cuda:1", "cuda:2"], [1, 1, 1]),
        ("cuda", 2, ["cuda:0", "cuda:1", "cuda:0"], [2, 1, 2]),
        ("cuda:1", 2, ["cuda:1"] * 3, [3, 3, 3]),
        ("cpu", 2, ["cpu"] * 3, [3, 3, 3]),
        ("auto", 0, ["cpu"] * 3, [3, 3, 3]),
    ],
)
def test_workers_of_one_machine_share_its_gpus(
    device: str, num_gpus: int, devices: list[str], num_sharing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: num_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    configs = [WorkerConfig(device=device, local_rank=index, local_world_size=3) for index in range(3)]
    assert [pool.device_of(config) for config in configs] == devices
    assert [pool.num_sharing(config) for config in configs] == num_sharing


def test_workers_get_equal_parts_of_a_gpu_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second worker finds little or much free, as the first loads. Both get half of the whole."""
    held = 16 << 30
    for free in (60 << 30, 30 << 30):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device, free=free: (free, 80 << 30))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: held)
        assert free_memory_bytes(torch.device("cuda:0")) == free
        assert free_memory_bytes(torch.device("cuda:0"), 2) == (40 << 30) - held
