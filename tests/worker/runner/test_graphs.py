"""Recorded decodes of fixed shapes give the tokens of steps of any shape. A replay here runs the decoder again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.worker.device_streams import LateStream
from tests.worker.families import write_family
from tests.worker.scheduler.engine import HandEngine, generate
from worker.attention.base import Span
from worker.attention.torch_paged import PagedPlan, TorchPagedAttention
from worker.model.load import LoadedModel, LoadOptions, load_model
from worker.runner import graphs
from worker.runner.graphs import Replay, StepGraphs
from worker.runner.model_runner import ModelRunner

BLOCK_SIZE = 4
NUM_BLOCKS = 200


class Refillable(TorchPagedAttention):
    """Torch's attention with a plan that is replaced in place."""

    def static_plan(self, num_rows: int, num_blocks: int) -> dict[int | None, PagedPlan]:
        return self.plan([Span(0, 1, [0])] * num_rows)

    def refill(self, plan: dict[int | None, PagedPlan], spans: Sequence[Span]) -> None:
        num_rows = plan[None].decodes[-1].stop
        plan.update(self.plan([*spans, *[Span(0, 1, [0])] * (num_rows - len(spans))]))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("llama3")
    write_family("llama3", folder)
    return load_model(str(folder), LoadOptions())


def run(
    model: LoadedModel,
    recorded: list[int] | None,
    max_model_len: int = 256,
    *,
    max_rows: int = 8,
    async_scheduling: bool = False,
) -> list[dict[int, list[int]]]:
    runner = ModelRunner(
        model,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        eos_token_ids=(),
        stream=LateStream() if async_scheduling else None,
    )
    if recorded is not None:

        def record(run: Replay) -> Replay:
            def replay() -> torch.Tensor:
                hidden = run()
                recorded.append(len(hidden))
                return hidden

            return replay

        runner._graphs = StepGraphs(
            model.decoder,
            Refillable(model.config.attention, runner.cache),
            model.device,
            block_size=BLOCK_SIZE,
            max_rows=max_rows,
            max_model_len=max_model_len,
            record=record,
        )
    engine = HandEngine(
        NUM_BLOCKS,
        BLOCK_SIZE,
        runner=runner,
        async_scheduling=async_scheduling,
        max_num_batched_tokens=80,
    )
    wires = [
        generate([i * k % 99 for k in range(1, 4 + 9 * i)], 6 + 3 * i, temperature=float(i % 2), logprobs=i % 3)
        for i in range(7)
    ]
    requests = [engine.submit(wire) for wire in wires]
    engine.finish()
    assert (engine.num_async > 0) == async_scheduling
    return [engine.answer(request).tokens for request in requests]


def test_recorded_decodes_give_the_same_tokens(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "CONTEXTS", (24, 48))
    recorded: list[int] = []
    assert run(model, recorded) == run(model, None)
    assert set(recorded) == {1, 2, 4, 8}  # seven sequences in eight rows, until one is left


def test_recorded_chunks_give_the_same_tokens(model: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, their later chunks and decodes next to them are rows of one recording, unless they read too much."""
    counts = []
    for most in (1 << 17, 400):
        monkeypatch.setattr(graphs, "MAX_CHUNK_READS", most)
        recorded: list[int] = []
        assert run(model, recorded, max_rows=96) == run(model, None)
        counts.append(sum(rows >= 16 for rows in recorded))
    assert counts[0] > counts[1]


def test_recorded_decodes_after_a_step_give_the_same_tokens(model: LoadedModel) -> None:
    """Recorded decodes that follow a step give the same tokens."""
    recorded: list[int] = []
    assert run(model, recorded, async_scheduling=True) == run(model, None)
    assert recorded


def test_a_step_that_no_recording_holds_is_not_replayed(model: LoadedModel) -> None:
    recorded: list[int] = []
    assert run(model, recorded, max_model_len=16) == run(model, None)
    assert len(recorded) < 10  # only the first steps of the shortest


def test_steps_of_more_rows_than_recorded_are_not_replayed(model: LoadedModel) -> None:
    recorded: list[int] = []
    assert run(model, recorded, max_rows=3) == run(model, None)
    assert set(recorded) == {1, 2, 4}


class FakeCuda:
    """Logs the streams that work goes to, and what is recorded there."""

    def __init__(self) -> None:
        self.streams = 0
        self.current = "default"
        self.log: list[str] = []

    def make_stream(self) -> FakeStream:
        self.streams += 1
        return FakeStream(self, f"side {self.streams}")

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        yield
        self.current = before

    @contextmanager
    def graph(self, graph: FakeGraph, *, pool: str, stream: FakeStream) -> Iterator[None]:
        with self.stream(stream):
            self.log.append(f"begin in {pool}")
            yield
            self.log.append("end")


class FakeStream:
    def __init__(self, cuda: FakeCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name

    def wait_stream(self, other: FakeStream) -> None:
        self.cuda.log.append(f"{self.name} waits for {other.name}")


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda

    def replay(self) -> None:
        self.cuda.log.append("replay")


def test_recordings_are_warmed_up_and_share_one_stream_and_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    """First calls compile and allocate, so they precede the recording. A stream each would mean a workspace each."""
    cuda = FakeCuda()
    default = FakeStream(cuda, "default")
    fakes = {"Stream": cuda.make_stream, "stream": cuda.stream, "graph": cuda.graph}
    fakes |= {"CUDAGraph": lambda: FakeGraph(cuda), "current_stream": lambda: default, "graph_pool_handle": lambda: "p"}
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    outputs: list[torch.Tensor] = []

    def run() -> torch.Tensor:
        cuda.log.append(f"run on {cuda.current}")
        outputs.append(torch.empty(0))
        return outputs[-1]

    record = graphs.cuda_recorder()
    once = ["side 1 waits for default", "run on side 1", "run on side 1", "default waits for side 1"]
    once += ["begin in p", "run on side 1", "end"]
    first, second = record(run), record(run)
    assert cuda.log == 2 * once
    assert first() is outputs[2]
    assert second() is outputs[5]
    assert cuda.log[-2:] == ["replay", "replay"]


def test_rerun_runs_the_function_each_time() -> None:
    runs: list[int] = []

    def run() -> torch.Tensor:
        runs.append(1)
        return torch.zeros(len(runs))

    again = graphs.rerun(run)
    assert [len(again()), len(again())] == [2, 3]
