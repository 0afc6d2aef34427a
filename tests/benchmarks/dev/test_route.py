"""The router on a recorded workload, in simulated time: the promises about time to first token."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from benchmarks.dev.route import options_of
from benchmarks.dev.route_load.runs import POOLED, POOLED1, execute, plan, processes
from benchmarks.dev.simulation.outcomes import Outcome
from benchmarks.dev.simulation.rivals import RIVALS
from tests.server.router.test_policies import chosen, make_request, view

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
        "small": (["round_robin"], ["--cells", "tau1_n16"]),
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


@pytest.mark.parametrize(("run", "hit", "ttft"), [("one", 0.93, 1.22), ("shared", 0.97, 1.10)])
def test_headstart_is_near_the_pooled_bound(outcomes: dict[str, Outcome], run: str, hit: float, ttft: float) -> None:
    """Where prefills share steps, it is close to one pooled cache."""
    ours, bound = outcomes[f"{run}.headstart"], outcomes[f"{run}.pooled"]
    assert ours.hit >= hit * bound.hit
    assert ours.ttft_mean_s <= ttft * bound.ttft_mean_s
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


def test_a_small_pool_still_takes_the_longest_prompt(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["small.round_robin"].ttft_mean_s > 0


def test_four_gateways_lose_little(outcomes: dict[str, Outcome]) -> None:
    one, four = outcomes["one.headstart"], outcomes["four.headstart"]
    assert four.hit >= 0.97 * one.hit
    assert four.ttft_mean_s <= 1.08 * one.ttft_mean_s


def test_an_index_a_second_late_loses_nothing(outcomes: dict[str, Outcome]) -> None:
    assert outcomes["late.headstart"].ttft_mean_s <= 1.02 * outcomes["one.headstart"].ttft_mean_s


def test_moving_blocks_nears_the_bound(outcomes: dict[str, Outcome]) -> None:
    """Fetched blocks bring TTFT close to the pooled bound, and costs in seconds beat fixed weights."""
    fetching = outcomes["fetching.headstart"].ttft_mean_s
    assert fetching <= 1.03 * outcomes["shared.pooled"].ttft_mean_s
    assert fetching < outcomes["fetching.llm-d-tiers"].ttft_mean_s
    small, large = outcomes["tiers.headstart"], outcomes["shared.headstart"]
    assert small.ttft_mean_s <= 1.10 * large.ttft_mean_s, "a fifth of the pool, and four times that below it"


@pytest.mark.parametrize("name", list(RIVALS))
def test_every_rival_answers_for_one_worker_and_an_empty_prompt(name: str) -> None:
    policy = RIVALS[name]()
    request = replace(make_request(), hashes=[], num_prompt_tokens=1)
    assert chosen(policy, request, view("a")) == {"a"}
    policy.on_dispatch(request, view("a"))
