"""The bench over real workers of a tiny model, and over scripted ones that answer wrongly."""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

import pytest

from benchmarks.dev import tiers
from benchmarks.dev.tiers_load.worker import Answer
from tests.tiny_model import write_tiny_model

# Names that scripts outside of the repository read.
STABLE = {
    *("ttft_cold_s", "ttft_pool_s", "ttft_disk_s", "ttft_disk_uncached_s", "ttft_peer_s", "ttft_restart_s"),
    *("pool_of_cold", "disk_of_cold", "disk_uncached_of_cold", "peer_of_cold", "restart_of_cold"),
    *("ttft_join_s", "join_of_cold"),
    *("disk_write_mb_per_s", "disk_read_mb_per_s", "disk_uncached_read_mb_per_s", "peer_read_mb_per_s"),
    *("overhead_ratio_b8", "tokens_per_s_b8", "tokens_per_s_b8_disk", "written_bytes_per_read_byte"),
}
SMALL = ["--prompt-tokens", "1024", "--rounds", "1", "--pairs", "1", "--json"]


def test_every_figure_comes_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tiers, "BATCH_ANSWER_TOKENS", 4)
    write_tiny_model(tmp_path)
    assert tiers.main(["--model", str(tmp_path), *SMALL]) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])["figures"]
    assert figures.keys() >= STABLE
    assert all(math.isfinite(figures[name]) and figures[name] > 0 for name in STABLE)


class ScriptedWorker:
    """Stands in for a process: finds every prompt but the first time, and answers with `answer`."""

    url = epoch = ""

    def __init__(self, options: list[str]) -> None:
        self._prompts: list[list[int]] = []

    def ask(self, prompt_ids: list[int], num_tokens: int, source: object = None) -> Answer:
        is_known = prompt_ids in self._prompts or source is not None
        self._prompts.append(prompt_ids)
        return Answer(0.1, 0.1, (len(prompt_ids) - 1) // 16 * 16 if is_known else 0, None, self.answer(is_known))

    def answer(self, is_known: bool) -> tuple[int, ...]:
        return (1, 2)

    def metric(self, name: str, **labels: str) -> float:
        return float(len(self._prompts) * 1000)

    def device_read_bytes(self) -> int:
        return 0

    def stop(self) -> None:
        pass

    start = stop


def scripted_bench(monkeypatch: pytest.MonkeyPatch, worker: type[ScriptedWorker], folder: Path) -> tiers.TiersBench:
    monkeypatch.setattr(tiers, "BenchWorker", worker)
    options = argparse.Namespace(model="", prompt_tokens=1024, rounds=2, pairs=1)
    return tiers.TiersBench(options, folder, 8192)


def test_another_answer_than_the_computed_one_fails_the_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class WrongWorker(ScriptedWorker):
        def answer(self, is_known: bool) -> tuple[int, ...]:
            return (1, 3) if is_known else (1, 2)

    with pytest.raises(SystemExit, match="in the pool"):
        scripted_bench(monkeypatch, WrongWorker, tmp_path).measure_first_tokens()
