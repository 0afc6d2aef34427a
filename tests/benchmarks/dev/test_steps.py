"""The bench of steps bounded by time: its figures, and the simulated engine in steps."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
import torch

from benchmarks.dev import steps
from benchmarks.dev.simulation.fleet import ReplaySettings
from benchmarks.dev.simulation.step_engine import StepWorker
from benchmarks.dev.simulation.step_replay import StepReplay, quantile
from benchmarks.dev.simulation.traces import CONVERSATION, ROOT, Session, TraceRequest, Workload
from cache.hashing import hash_chain
from server.router.policies import POLICIES
from tests.benchmarks.dev.test_route import conversations
from tests.tiny_model import write_tiny_model

RATE = 8000.0
BLOCK = 512


def request(number: int, num_tokens: int, num_output: int) -> TraceRequest:
    block_ids = [*range(1000 * number, 1000 * number + num_tokens // BLOCK), (1 << 31) | number]
    chain = hash_chain(ROOT, block_ids, 1)
    return TraceRequest(number, num_tokens, num_output, block_ids, chain, chain[:-1])


def workload(*requests: tuple[float, int, int]) -> Workload:
    """Each request's start, prompt tokens and output tokens."""
    sessions = [
        Session(start_s, (request(number, num_tokens, num_output),), (0.0,), number)
        for number, (start_s, num_tokens, num_output) in enumerate(requests, 1)
    ]
    return Workload(sessions, BLOCK, len(sessions), 400, RATE)


def run(work: Workload, max_step_s: float | None) -> tuple[StepReplay, Counter[int]]:
    settings = ReplaySettings(1, 1.0, warmup_share=0.0, shared_engine=True, max_step_s=max_step_s)
    replay = StepReplay(work, POLICIES["headstart"], settings)
    replay.token_times()
    times: Counter[int] = Counter()
    for worker in replay._workers.values():
        assert isinstance(worker, StepWorker)
        times.update(worker.token_times)
        assert worker.steps is None
        assert not worker.running
        assert worker.cache.num_free_blocks == worker.cache.num_blocks - 1
    return replay, times


def test_one_request_takes_the_steps_of_its_tokens() -> None:
    replay, times = run(workload((0.0, 4096, 11)), None)
    assert replay._ttft_s[1] == pytest.approx(2 * (0.012 + 2048 / RATE))
    assert replay._token_s[1] == pytest.approx(0.01225)
    assert times.total() == 10


def test_an_objective_bounds_the_time_between_tokens() -> None:
    """A prompt that comes while another request decodes: slower with an objective, and every token comes."""
    work = workload((0.0, 512, 200), (1.0, 8192, 4))
    free, free_times = run(work, None)
    bound, times = run(work, 0.05)
    assert free_times.total() == times.total() == 199 + 3
    assert max(free_times) == round((0.01225 + 2047 / RATE) * 10_000)
    assert 400 <= max(times) <= 500
    assert free._ttft_s[2] < bound._ttft_s[2] < 2 * free._ttft_s[2]
    assert free._ttft_s[1] == bound._ttft_s[1]


def test_a_request_joins_after_the_step_that_runs() -> None:
    replay, _ = run(workload((0.0, 512, 100), (0.5, 512, 2)), None)
    step_s = 0.01225
    first_s = 0.012 + 512 / RATE
    joined_s = first_s + math.ceil((0.5 - first_s) / step_s) * step_s
    assert replay._ttft_s[2] == pytest.approx(joined_s + step_s + 512 / RATE - 0.5)


def test_quantiles_count_tokens() -> None:
    assert quantile(Counter({120: 99, 2680: 1}), 0.5) == pytest.approx(0.012)
    assert quantile(Counter({120: 98, 2680: 2}), 0.99) == pytest.approx(0.268)


def test_every_figure_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path, max_position_embeddings=2048)
    threads = torch.get_num_threads()
    small = ["--decodes", "2", "--prompt-tokens", "256", "--prompts", "1", "--only", "engine"]
    assert steps.main(["--model", str(tmp_path), "--json", *small]) == 0
    torch.set_num_threads(threads)
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert all(math.isfinite(value) and value >= 0 for value in figures.values())
    assert figures["objective_s"] == pytest.approx(3 * figures["decode_step_cpu_s"])
    assert {"free.within", "bounded.within", "bounded.step_cpu_p99_s"} <= figures.keys()


def test_the_curve_over_objectives_comes_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations(tmp_path / CONVERSATION, 150)
    monkeypatch.setattr(steps, "DATA", tmp_path)
    small = ["--workers", "2", "--objectives", "50", "100", "--only", "simulation"]
    assert steps.main(["--json", *small]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["objective_50ms.itl_p99_s"] <= 0.05
    assert figures["objective_100ms.itl_p99_s"] <= 0.1 < figures["free.itl_p99_s"]
    assert 0.0 < figures["free.within"] <= 1.0
    assert figures["objective_50ms.ttft_over_free"] > figures["objective_100ms.ttft_over_free"] > 0.9
