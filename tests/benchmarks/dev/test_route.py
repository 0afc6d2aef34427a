"""The router on a recorded workload, in simulated time: the promises about time to first token."""

from __future__ import annotations

import gzip
import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.dev.route import options_of
from benchmarks.dev.route_load.figures import lower_bound, ratio_figures
from benchmarks.dev.route_load.runs import DATA, execute, parse_cell, plan, processes
from benchmarks.dev.simulation.replay import POOLED, Outcome, Replay, ReplaySettings
from benchmarks.dev.simulation.traces import (
    SWE_AGENT,
    ConversationTrace,
    SweAgentTrace,
    TraceRequest,
    with_longer_answers,
)
from server.router.policies import make_policy

CELL = "conv25_n8"


@pytest.fixture(scope="module")
def outcomes() -> dict[str, Outcome]:
    """Run one spreading of each: spreadings differ by less than two per cent."""
    runs = {
        "one": (["headstart", "llm-d", "least_load"], ["--gateways", "1"]),
        "four": (["headstart"], ["--gateways", "4"]),
        "late": (["headstart"], ["--index-delay", "1.0"]),
        "shared": (["headstart"], ["--engine", "shared"]),
        "fetching": (["headstart", "llm-d-tiers"], ["--engine", "shared", "--fetch", "20"]),
        "tiers": (["headstart"], ["--engine", "shared", "--cells", "conv5_n8", "--lower-tier", "4"]),
    }
    planned = {}
    for name, (policies, arguments) in runs.items():
        options = options_of(["--cells", CELL, "--policies", *policies, "--spreadings", "1", *arguments])
        for run in plan(options):
            if run.policy != POOLED or name in ("one", "shared"):
                planned[f"{name}.{run.policy}"] = run
    with processes(2) as pool:
        return dict(zip(planned, pool.map(execute, planned.values()), strict=True))


def test_headstart_is_near_the_pooled_bound(outcomes: dict[str, Outcome]) -> None:
    ours, bound = outcomes["one.headstart"], outcomes["one.pooled"]
    assert ours.hit >= 0.93 * bound.hit
    assert ours.ttft_mean_s <= 1.22 * bound.ttft_mean_s
    assert ours.max_over_mean_busy <= 1.05


@pytest.mark.parametrize(
    ("run", "hit", "ttft_s"),
    [
        ("one.pooled", 0.344, 1.164),
        ("one.headstart", 0.323, 1.393),
        ("one.llm-d", 0.336, 1.668),
        ("one.least_load", 0.095, 5.48),
    ],
)
def test_the_reference_figures_are_met(outcomes: dict[str, Outcome], run: str, hit: float, ttft_s: float) -> None:
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
    assert ours.max_over_mean_busy <= 1.05


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


@pytest.mark.parametrize("cell", ["conv", "conv0_n8", "x25_n8", "conv25_n0"])
def test_an_unknown_cell_is_refused(cell: str) -> None:
    with pytest.raises(Exception, match="use conv25_n8"):
        parse_cell(cell)


def test_moving_blocks_nears_the_bound(outcomes: dict[str, Outcome]) -> None:
    """Fetched blocks bring TTFT close to the pooled bound, and costs in seconds beat fixed weights."""
    fetching = outcomes["fetching.headstart"].ttft_mean_s
    assert fetching <= 1.03 * outcomes["shared.pooled"].ttft_mean_s
    assert fetching < outcomes["fetching.llm-d-tiers"].ttft_mean_s
    small, large = outcomes["tiers.headstart"], outcomes["shared.headstart"]
    assert small.ttft_mean_s <= 1.10 * large.ttft_mean_s, "a fifth of the pool, and four times that below it"


def test_blocks_move_only_between_workers_that_share_their_time() -> None:
    with pytest.raises(SystemExit):
        options_of(["--fetch", "20"])


def test_copies_of_a_trajectory_share_the_system_prompt() -> None:
    workload = SweAgentTrace(DATA / SWE_AGENT).workload(num_workers=1, load=1.0, seed=0)
    by_size: dict[int, list[TraceRequest]] = {}
    for session in workload.sessions:
        by_size.setdefault(session.requests[-1].num_prompt_tokens, []).append(session.requests[-1])
    one, other, *_ = max(by_size.items())[1]
    shared = [a == b for a, b in zip(one.hashes, other.hashes, strict=True)]
    assert 0 < sum(shared) < len(shared)
    assert not any(shared[sum(shared) :])


def test_longer_answers_change_only_their_length() -> None:
    workload = SweAgentTrace(DATA / SWE_AGENT, half=0).workload(num_workers=1, load=1.0, seed=0)
    longer = with_longer_answers(workload, 8)
    for session, same in zip(longer.sessions, workload.sessions, strict=True):
        assert [r.num_output_tokens for r in session.requests] == [8 * r.num_output_tokens for r in same.requests]
        assert session.start_s == same.start_s
    assert parse_cell("swe25_n8_x8").answer_times == 8
    assert parse_cell("swe25_n8").answer_times == 1


def outcome(ttft_s: float) -> Outcome:
    return Outcome(0.5, ttft_s, ttft_s, ttft_s, ttft_s, 1.0, 1.0)


def test_the_worst_ratio_is_of_the_best_rival() -> None:
    """Spreadings are compared in pairs: what both have in common does not count."""
    outcomes = {
        ("headstart", "a"): [outcome(1.0), outcome(2.0)],
        ("llm-d", "a"): [outcome(2.0), outcome(4.0)],
        ("headstart", "b"): [outcome(1.5), outcome(3.0)],
        ("llm-d", "b"): [outcome(9.0), outcome(9.0)],
        ("dynamo", "b"): [outcome(1.0), outcome(2.0)],
        (POOLED, "b"): [outcome(0.1), outcome(0.1)],
    }
    figures = {figure.name: figure for figure in ratio_figures(outcomes)}
    assert figures["headstart.a.ttft_over_rival"].value == pytest.approx(0.5)
    assert figures["worst_ratio"].value == pytest.approx(1.5)
    assert figures["worst_ratio"].note == "b"


def test_the_lower_bound_is_below_the_mean() -> None:
    values = [1.0, 1.1, 0.9, 1.05]
    assert lower_bound(values) == pytest.approx(1.0125 - 2.353 * statistics.stdev(values) / 2)
    assert lower_bound([1.2]) == 1.2
