"""The bench of prefill and decode apart: its figures, and the replay of splits."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.dev import splits
from benchmarks.dev.simulation.fleet import ReplaySettings
from benchmarks.dev.simulation.split_replay import SplitReplay, SplitWorker
from benchmarks.dev.simulation.traces import CONVERSATION, Workload
from benchmarks.dev.splits_load import simulated
from server.router.cost import CostModel
from server.router.policies import POLICIES
from tests.benchmarks.dev.test_route import conversations
from tests.benchmarks.dev.test_steps import RATE, workload
from tests.tiny_model import write_tiny_model

STEP_S = 0.012
PAIR = workload((0.0, 512, 400), (1.0, 8192, 4))


def run(work: Workload, num_prefill: int, weight: float = 1.0, max_step_s: float | None = None) -> SplitReplay:
    cost = CostModel(decode_weight=weight)
    fleet = ReplaySettings(2, 2.0, fetch=20.0, max_step_s=max_step_s, num_prefill=num_prefill)
    settings = replace(fleet, warmup_share=0.0, shared_engine=True, cost=cost)
    replay = SplitReplay(work, POLICIES["headstart"], settings)
    replay.token_times()
    for worker in replay._workers.values():
        assert isinstance(worker, SplitWorker)
        assert not worker.running
        assert worker.cache.num_free_blocks == worker.cache.num_blocks - 1
    return replay


def longest_gap_s(replay: SplitReplay) -> float:
    return max(max(worker.token_times, default=0) for worker in replay._workers.values()) / 10_000  # type: ignore[attr-defined]


def test_a_long_prompt_next_to_a_decode_is_split() -> None:
    replay = run(PAIR, num_prefill=1)
    assert replay.num_splits == 1
    assert replay._ttft_s[2] == pytest.approx(4 * (STEP_S + 2048 / RATE))
    assert longest_gap_s(replay) < 2 * STEP_S, "the decode goes on"
    (gap,) = replay._gaps
    assert 8192 / (20 * RATE) < gap / 10_000 < 8192 / (20 * RATE) + 3 * STEP_S, "the fetch, and a step begun before"
    total = sum(worker.token_times.total() for worker in replay._workers.values())  # type: ignore[attr-defined]
    assert total + replay._gaps.total() == 399 + 3


def test_without_weight_or_role_nothing_is_split() -> None:
    assert run(PAIR, num_prefill=1, weight=0.0).num_splits == 0
    mixed = run(PAIR, num_prefill=0)
    assert mixed.num_splits == 0
    assert mixed._ttft_s[2] == pytest.approx(4 * (STEP_S + 2048 / RATE)), "at the idle one of two"


def test_every_simulated_figure_comes_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations(tmp_path / CONVERSATION, 100)
    monkeypatch.setattr(simulated, "DATA", tmp_path)
    small = ["--workers", "2", "--workloads", "chat", "short", "--objectives", "50", "--loads", "0.8", "--prefill", "1"]
    assert splits.main(["--json", "--only", "simulation", *small]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert all(math.isfinite(value) for value in figures.values())
    assert figures["chat.50ms.0.8.prefill1.split_share"] > 0.0
    assert {"short.50ms.0.8.prefill0.itl_p99_s", "short.50ms.0.8.prefill1.ttft_over_mixed"} <= figures.keys()


@pytest.mark.deep
def test_every_real_figure_comes_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_tiny_model(tmp_path)
    small = ["--prompt-tokens", "256", "--rounds", "1", "--decodes", "2"]
    assert splits.main(["--json", "--only", "real", "--model", str(tmp_path), *small]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures["split.fetched"] == 1.0
    assert all(figures[f"{name}.ttft_s"] > 0.0 for name in ("one", "mixed", "split"))
