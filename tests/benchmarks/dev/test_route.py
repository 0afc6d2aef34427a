"""The router on a recorded workload, in simulated time: the promises about time to first token."""

from __future__ import annotations

import gzip
import json
import random
from argparse import ArgumentTypeError
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.dev.route import DEEP_CELLS, DEFAULT_CELLS, options_of
from benchmarks.dev.route_load.figures import is_sure, overview, ratio_figures, ratio_of
from benchmarks.dev.route_load.predictions import is_near, prediction_figures, price_change
from benchmarks.dev.route_load.runs import BOUNDS, COMPARED, POOLED, POOLED1, execute, parse_cell, plan, processes
from benchmarks.dev.simulation.fleet import ReplaySettings
from benchmarks.dev.simulation.outcomes import Decile, Move, Observed, Outcome, Predictions
from benchmarks.dev.simulation.replay import Replay
from benchmarks.dev.simulation.traces import DATA, SWE_AGENT, ConversationTrace, SweAgentTrace, TraceRequest, Workload
from benchmarks.dev.simulation.variants import (
    NUM_TENANTS,
    with_answers,
    with_hot_prefix,
    with_kept_answers,
    with_rate,
    with_tenants,
)
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


@pytest.mark.deep
def test_the_reference_figures_are_met() -> None:
    found = replayed(REFERENCE_RUNS)
    reference = {"pooled": (0.344, 1.164), "headstart": (0.323, 1.393), "llm-d": (0.336, 1.668)}
    for policy, (hit, ttft_s) in {**reference, "least_load": (0.095, 5.48)}.items():
        assert found[f"one.{policy}"].hit == pytest.approx(hit, rel=0.05)
        assert found[f"one.{policy}"].ttft_mean_s == pytest.approx(ttft_s, rel=0.05)


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


def test_copies_spread_a_prefix_that_becomes_hot(tmp_path: Path) -> None:
    trace = ConversationTrace(conversations(tmp_path / "trace.jsonl.gz", 400))
    workload = trace.workload(num_workers=8, load=0.05, seed=1)
    hot = with_hot_prefix(workload, 1, ramp_s=60.0)
    assert hot.num_requests - workload.num_requests == pytest.approx(1.5 * 60 * 50, rel=0.1)
    settings = ReplaySettings(num_workers=8, cache_share=4.0, shared_engine=True, fetch=4.0)
    without, copied = (
        Replay(hot, lambda: make_policy("headstart"), replace(settings, copies=copies)).run().growth
        for copies in (False, True)
    )
    assert (without.num_copies, copied.num_copies) == (0, pytest.approx(5, abs=2))
    assert copied.hot_ttft_p99_s < without.hot_ttft_p99_s / 2


@pytest.mark.parametrize("warm_s", [0.0, 5.0])
def test_a_worker_joins_with_or_without_a_warm_start(tmp_path: Path, warm_s: float) -> None:
    trace = ConversationTrace(conversations(tmp_path / "trace.jsonl.gz", 400))
    workload = trace.workload(num_workers=4, load=0.9, seed=1)
    settings = ReplaySettings(
        num_workers=4, cache_share=2.0, shared_engine=True, fetch=20.0, join=True, warm_start_s=warm_s
    )
    growth = Replay(workload, lambda: make_policy("headstart"), settings).run().growth
    assert growth.warm_s < 60.0
    assert growth.others_ttft_p99_s > 0.0


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


@pytest.mark.parametrize(
    "cell", ["conv", "conv0_n8", "x25_n8", "conv25_n0", "conv25_n8_x9", "conv25_n8@speed=2", "conv25_n8@load=much"]
)
def test_an_unknown_cell_is_refused(cell: str) -> None:
    with pytest.raises(ArgumentTypeError, match=f"cell '{cell}'"):
        parse_cell(cell)


def test_a_cell_replaces_options_of_the_command() -> None:
    options = options_of(["--cells", "swe25_n8_kept_x8@gateways=4,engine=fifo", "swe25_n8_speeds_churn"])
    changed, other = (plan(options, cell, 0, {})[0] for cell in options.cells)
    assert changed.cell.variants == ["kept", "x8"]
    assert (changed.settings.num_gateways, changed.settings.shared_engine) == (4, False)
    assert (other.settings.num_gateways, other.settings.shared_engine) == (1, True)
    assert other.settings.two_speeds
    assert other.settings.death_and_join


def test_deep_adds_cells() -> None:
    assert [cell.name for cell in options_of(["--deep"]).cells] == [*DEFAULT_CELLS, *DEEP_CELLS]
    assert len(DEFAULT_CELLS) <= 20


def test_moving_blocks_nears_the_bound(outcomes: dict[str, Outcome]) -> None:
    """Fetched blocks bring TTFT close to the pooled bound, and costs in seconds beat fixed weights."""
    fetching = outcomes["fetching.headstart"].ttft_mean_s
    assert fetching <= 1.03 * outcomes["shared.pooled"].ttft_mean_s
    assert fetching < outcomes["fetching.llm-d-tiers"].ttft_mean_s
    small, large = outcomes["tiers.headstart"], outcomes["shared.headstart"]
    assert small.ttft_mean_s <= 1.10 * large.ttft_mean_s, "a fifth of the pool, and four times that below it"


def test_blocks_move_only_between_workers_that_share_their_time() -> None:
    for arguments in (["--engine", "fifo", "--fetch", "20"], ["--cells", "conv25_n8@engine=fifo,fetch=20"]):
        with pytest.raises(SystemExit):
            options_of(arguments)


@pytest.fixture(scope="module")
def agent_workload() -> Workload:
    return SweAgentTrace(DATA / SWE_AGENT, half=0).workload(num_workers=1, load=1.0, seed=0)


def test_copies_of_a_trajectory_share_the_system_prompt(agent_workload: Workload) -> None:
    by_size: dict[int, list[TraceRequest]] = {}
    for session in agent_workload.sessions:
        by_size.setdefault(session.requests[-1].num_prompt_tokens, []).append(session.requests[-1])
    one, other, *_ = max(by_size.items())[1]
    shared = [a == b for a, b in zip(one.hashes, other.hashes, strict=True)]
    assert 0 < sum(shared) < len(shared)
    assert not any(shared[sum(shared) :])


def test_longer_answers_change_only_their_length(agent_workload: Workload) -> None:
    longer = with_answers(agent_workload, lambda num_tokens: 8 * num_tokens)
    for session, same in zip(longer.sessions, agent_workload.sessions, strict=True):
        assert [r.num_output_tokens for r in session.requests] == [8 * r.num_output_tokens for r in same.requests]
        assert session.start_s == same.start_s


def small_trace(tmp_path: Path) -> ConversationTrace:
    return ConversationTrace(conversations(tmp_path / "trace.jsonl.gz", 150))


def test_tenants_share_no_block_and_have_zipf_weights(tmp_path: Path) -> None:
    workload = small_trace(tmp_path).workload(num_workers=4, load=0.9, seed=1)
    changed = with_tenants(workload, 1)
    first = {s.conversation: s.requests[0].hashes[0] for s in changed.sessions}
    assert 1 < len(set(first.values())) <= NUM_TENANTS
    assert len({s.requests[0].hashes[0] for s in workload.sessions}) == 1, "one system prompt"
    assert changed.num_distinct_blocks > workload.num_distinct_blocks
    for session in changed.sessions:
        assert session.requests[0].hashes[0] == first[session.conversation]


def test_a_kept_answer_begins_the_next_prompt(tmp_path: Path) -> None:
    workload = small_trace(tmp_path).workload(num_workers=4, load=0.9, seed=1)
    changed = with_kept_answers(with_answers(workload, lambda num_tokens: 6 * num_tokens))
    last: dict[int, TraceRequest] = {}
    num_found = 0
    for session in changed.sessions:
        request = session.requests[0]
        before = last.get(session.conversation)
        if before is not None and before.answer_ids is not None and len(before.hashes) < len(request.hashes):
            held = [*before.block_ids, *before.answer_ids]
            shared = min(len(held), len(request.hashes))
            num_found += held[:shared] == list(request.block_ids[:shared])
        last[session.conversation] = request
    assert num_found > 50


def test_a_higher_rate_moves_only_arrivals(tmp_path: Path) -> None:
    workload = small_trace(tmp_path).workload(num_workers=4, load=0.9, seed=1)
    faster = with_rate(workload, 1.5)
    assert [s.start_s for s in faster.sessions] == [pytest.approx(s.start_s / 1.5) for s in workload.sessions]


@pytest.mark.parametrize("policy", ["headstart", "pooled", "dynamo"])
@pytest.mark.parametrize("shared", [False, True])
def test_no_request_is_lost_with_a_dead_worker(tmp_path: Path, policy: str, *, shared: bool) -> None:
    """`Replay` asserts that each has a first token; the worker that joins gets some too."""
    trace = small_trace(tmp_path)
    workload = with_kept_answers(trace.workload(num_workers=4, load=1.5, seed=1))
    settings = ReplaySettings(
        num_workers=4,
        cache_share=0.3,
        death_and_join=True,
        two_speeds=True,
        shared_engine=shared,
        pooled=policy == POOLED,
    )
    replay = Replay(workload, COMPARED["headstart" if policy == POOLED else policy], settings)
    outcome = replay.run()
    assert outcome.num_requests == 135
    assert outcome.max_over_mean_busy < 5.0


def outcome(ttft_s: float) -> Outcome:
    return Outcome(0.5, ttft_s, ttft_s, ttft_s, ttft_s, ttft_s, 1.0, 1.0, num_requests=100.0)


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
    assert figures["worst_ratio"].note.endswith(": b")
    assert figures["headstart.b.p95_over_rival"].value == pytest.approx(1.5)
    assert figures["worst_tail_ratio"].note == "b"
    marked = [line for line in overview(outcomes).splitlines() if line.startswith("b")]
    assert marked[0].count("*") == 1, "the bound is no policy"


def test_moves_and_waits_are_reported_over_all_requests() -> None:
    predictions = Predictions()
    predictions.add(Observed(0.35, 0.0, 0.5, 1.0, Move(0.2, 0.5), actual_wait_s=0.0))
    predictions.add(Observed(1.4, 3.0, 2.0, 1.0, Move(0.9, 0.5), actual_wait_s=1.0))
    figures = {f.name: f for f in prediction_figures({"a": [replace(outcome(1.0), predictions=predictions)]})}
    assert figures["headstart.a.moves_losing"].value == 0.5
    assert figures["headstart.a.room_deciles_missed"].value == 1
    assert figures["headstart.a.room_error_s"].value == pytest.approx(2.0)


def test_a_wait_is_near_within_a_quarter() -> None:
    assert is_near(Decile(num_requests=2, predicted_s=9.0, actual_s=8.0))
    assert not is_near(Decile(num_requests=2, predicted_s=11.0, actual_s=8.0))
    assert is_near(Decile(num_requests=2, predicted_s=0.3, actual_s=0.1)), "within .2 s"
    assert not is_near(Decile(num_requests=2, predicted_s=0.3, actual_s=0.0)), "nobody waited"


def test_prices_are_compared_at_the_same_fill() -> None:
    short, long = Predictions(), Predictions()
    for fill, price_s in ((0.35, 1.0), (0.95, 4.0)):
        short.add(Observed(fill, 0.0, price_s, 1.0, None))
    for _ in range(3):
        long.add(Observed(0.95, 0.0, 4.4, 1.0, None))
    assert price_change(short, long) == pytest.approx(0.1)


def test_a_ratio_lies_between_its_bounds() -> None:
    ratio = ratio_of([1.0, 1.2, 0.9, 1.1], [1.0, 1.0, 1.0, 1.0])
    assert ratio.value == pytest.approx(1.05)
    assert ratio.lower < ratio.value < ratio.upper
    assert ratio_of([1.2], [1.0]).half_width == 0.0
    assert ratio_of([1.0, 2.0], [2.0, 4.0]).half_width == 0.0, "what pairs have in common does not count"


def test_later_spreadings_have_the_best_rivals() -> None:
    options = options_of(["--cells", CELL])
    first = {run.policy: [outcome(at + 1.0)] for at, run in enumerate(plan(options, options.cells[0], 0, {}))}
    outcomes = {(policy, CELL): runs for policy, runs in first.items()}
    assert {*BOUNDS, "headstart", "llm-d", "dynamo", "sglang"} == first.keys()
    assert [run.policy for run in plan(options, options.cells[0], 1, outcomes)] == ["headstart", "llm-d", "dynamo"]
    outcomes["headstart", CELL].append(outcome(1.5))
    outcomes["llm-d", CELL].append(outcome(2.0))
    assert not is_sure(outcomes, CELL)
    outcomes["headstart", CELL][1] = outcome(1.0)
    assert is_sure(outcomes, CELL)
