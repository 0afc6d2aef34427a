"""The router on a recorded workload, in simulated time: the promises about time to first token."""

from __future__ import annotations

import gzip
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.dev.route import options_of
from benchmarks.dev.route_load.runs import POOLED, POOLED1, execute, plan, processes
from benchmarks.dev.simulation.fleet import Fleet, ReplaySettings
from benchmarks.dev.simulation.outcomes import Outcome
from benchmarks.dev.simulation.replay import Replay
from benchmarks.dev.simulation.traces import ConversationTrace
from server.router.policies import make_policy

CELL = "conv25_n8"
REFERENCE_RUNS = {"one": (["headstart", "llm-d", "least_load"], ["--engine", "fifo", "--hold", "0"])}


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Run one spreading of half of the conversations: spreadings differ by less than two per cent."""
    runs = {
        **REFERENCE_RUNS,
        "four": (["headstart"], ["--engine", "fifo", "--gateways", "4"]),
        "late": (["headstart"], ["--engine", "fifo", "--index-delay", "1.0"]),
        "shared": (["headstart"], ["--engine", "shared"]),
        "fetching": (["headstart", "llm-d-tiers"], ["--engine", "shared", "--fetch", "20"]),
        "tiers": (["headstart"], ["--engine", "shared", "--cells", "conv5_n8", "--lower-tier", "4"]),
    }
    return replayed(runs, "--half", "1")


def replayed(runs: dict[str, tuple[list[str], list[str]]], *common: str) -> dict[str, Outcome]:
    planned = {}
    for name, (policies, arguments) in runs.items():
        options = options_of(["--cells", CELL, "--policies", *policies, "--spreadings", "1", *common, *arguments])
        for run in plan(options, options.cells[0], 0, {}):
            if run.policy != POOLED1 and (run.policy != POOLED or name in ("one", "shared")):
                planned[f"{name}.{run.policy}"] = run
    with processes(2) as pool:
        return dict(zip(planned, pool.map(execute, planned.values()), strict=True))


def test_headstart_is_near_the_pooled_bound(outcomes: dict[str, Outcome]) -> None:
    ours, bound = outcomes["one.headstart"], outcomes["one.pooled"]
    assert ours.hit >= 0.93 * bound.hit
    assert ours.ttft_mean_s <= 1.22 * bound.ttft_mean_s
    assert ours.max_over_mean_busy <= 1.20


@pytest.mark.parametrize(
    ("run", "hit", "ttft_s"),
    [
        ("one.pooled", 0.305, 1.196),
        ("one.headstart", 0.287, 1.410),
        ("one.llm-d", 0.302, 1.680),
        ("one.least_load", 0.092, 5.34),
    ],
)
def test_figures_of_half_the_conversations_stay(
    outcomes: dict[str, Outcome], run: str, hit: float, ttft_s: float
) -> None:
    assert outcomes[run].hit == pytest.approx(hit, rel=0.05)
    assert outcomes[run].ttft_mean_s == pytest.approx(ttft_s, rel=0.05)


def test_four_gateways_lose_little(outcomes: dict[str, Outcome]) -> None:
    one, four = outcomes["one.headstart"], outcomes["four.headstart"]
    assert four.hit >= 0.97 * one.hit
    assert four.ttft_mean_s <= 1.08 * one.ttft_mean_s


def test_an_index_a_second_late_loses_nothing(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["late.headstart"].ttft_mean_s <= 1.02 * outcomes["one.headstart"].ttft_mean_s


def test_shared_steps_bring_headstart_near_the_bound(outcomes: dict[str, Outcome]) -> None:
    """Where prefills share steps, hit rate and TTFT are close to those of one pooled cache."""
    ours, bound = outcomes["shared.headstart"], outcomes["shared.pooled"]
    assert ours.hit >= 0.97 * bound.hit
    assert ours.ttft_mean_s <= 1.10 * bound.ttft_mean_s
    assert ours.max_over_mean_busy <= 1.20


def test_headstart_beats_the_others(outcomes: dict[str, Outcome]) -> None:
    for rival in ("one.llm-d", "one.least_load"):
        assert outcomes["one.headstart"].ttft_mean_s < outcomes[rival].ttft_mean_s


def conversations(path: Path, num_requests: int) -> Path:
    """Write a small trace in the recorded form: turns of conversations that share a system prompt."""
    rng = random.Random(7)
    ids = iter(range(1, 1 << 20))
    open_chats = [[0] for _ in range(8)]
    with gzip.open(path, "wt") as lines:
        for number in range(num_requests):
            chat = rng.choice(open_chats)
            chat.extend(next(ids) for _ in range(rng.randint(1, 6)))
            turn = {"timestamp": 250 * number, "input_length": 512 * len(chat), "output_length": 100, "hash_ids": chat}
            lines.write(json.dumps(turn) + "\n")
            if len(chat) > 24:
                chat[:] = [0]
    return path


def test_a_real_redis_gives_the_figures_of_the_index_in_memory(tmp_path: Path) -> None:
    trace = ConversationTrace(conversations(tmp_path / "trace.jsonl.gz", 150))
    workload = trace.workload(num_workers=4, load=0.9, seed=1)
    settings = ReplaySettings(num_workers=4, cache_share=0.3)
    memory, redis = (
        Replay(workload, lambda: make_policy("headstart"), replace(settings, redis=real)).run()
        for real in (False, True)
    )
    assert redis == memory
    assert memory.hit > 0.3


def test_wrong_rates_are_reported_ten_seconds_late(tmp_path: Path) -> None:
    trace = ConversationTrace(conversations(tmp_path / "trace.jsonl.gz", 2))
    workload = trace.workload(num_workers=6, load=0.9, seed=1)
    fleet = Fleet(workload, ReplaySettings(num_workers=6, cache_share=9.0, wrong_rates=True))
    reported = []
    for worker in [fleet.make_worker() for _ in range(6)]:
        for ended_s in (2.0, 4.0):
            worker.line.add(3000, 1.5, ended_s)
        rates = []
        for now_s in (5.0, 14.5, 15.5):
            worker.report(now_s)
            rates.append(worker.load.prefill_tokens_per_s)
        reported.append(rates)
    assert reported == [[0.0, 0.0, pytest.approx(rate)] for rate in (4000.0, 2000.0, 2000.0, 1000.0, 2000.0, 2000.0)]


def test_moving_blocks_nears_the_bound(outcomes: dict[str, Outcome]) -> None:
    """Fetched blocks bring TTFT close to the pooled bound, and costs in seconds beat fixed weights."""
    fetching = outcomes["fetching.headstart"].ttft_mean_s
    assert fetching <= 1.03 * outcomes["shared.pooled"].ttft_mean_s
    assert fetching < outcomes["fetching.llm-d-tiers"].ttft_mean_s
    small, large = outcomes["tiers.headstart"], outcomes["shared.headstart"]
    assert small.ttft_mean_s <= 1.10 * large.ttft_mean_s, "a fifth of the pool, and four times that below it"
