from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from cache.records import WorkerLoad
from cache.types import BlockHash
from server.router.cost import CostModel, WorkerView, idle_best_matches
from server.router.load_tracker import WorkerLoadEstimate
from server.router.policies import AFFINITY, POLICIES, FleetView, Policy, make_policy, rendezvous_worker
from server.router.types import RouteRequest
from tests.members import make_member

COST = CostModel()


def view(
    name: str,
    *,
    num_running: int = 0,
    num_waiting: int = 0,
    num_free_blocks: int = 1000,
    num_blocks: int = 1000,
    **changes: Any,
) -> WorkerView:
    """One idle worker that holds nothing of the prompt, but for what is named."""
    member = make_member(name)
    load = WorkerLoad(
        num_running=num_running, num_waiting=num_waiting, num_free_blocks=num_free_blocks, num_blocks=num_blocks
    )
    estimate = WorkerLoadEstimate(member.epoch, 60.0)
    fields: dict[str, Any] = {
        "index_tokens": 0,
        "pending_tokens": 0,
        "matched_tokens": 0,
        "prefill_tokens_per_s": 1000.0,
        "prefill_fixed_s": 0.01,
        "prefill_s": 1.0,
        "queue_s": 0.0,
        "num_displaced": 0.0,
        "num_live_blocks": 0,
        "kv_usage": 0.0,
        "kv_wait_s": 0.0,
        "eviction_s": 0.0,
        "least_eviction_s": 0.0,
        "decode_s": 0.0,
        "assigned_s": 0.0,
        "report_age_s": 0.0,
    }
    return WorkerView(member, load, estimate, **{**fields, **changes})


def make_request(num_blocks: int = 10, **changes: str) -> RouteRequest:
    hashes = [BlockHash(os.urandom(16)) for _ in range(num_blocks)]
    return RouteRequest("r", "m", num_blocks * 16 + 1, hashes, affinity_key=changes.get("affinity_key"))


def chosen(
    policy: Policy, request: RouteRequest, *workers: WorkerView, assigned_s: float = 0.0, index_answered: bool = True
) -> set[str]:
    fleet = FleetView(COST, assigned_s / len(workers), lambda: 0.5, index_answered=index_answered)
    scores = policy.scores(request, workers, fleet)
    assert len(scores) == len(workers)
    return {w.member.worker_id for w, score in zip(workers, scores, strict=True) if score == min(scores)}


@pytest.mark.parametrize(("rho", "beta"), [(0.0, 0.0), (0.5, 1.0), (0.7, 7 / 3), (0.8, 3.0), (5.0, 3.0)])
def test_beta_grows_with_utilisation_up_to_its_cap(rho: float, beta: float) -> None:
    assert COST.beta(rho * 60.0) == pytest.approx(beta)


def test_headstart_weighs_the_prefill_more_the_busier_the_fleet() -> None:
    policy = make_policy("headstart")
    warm, idle = view("warm", queue_s=1.5, prefill_s=0.5), view("idle", prefill_s=1.5)
    assert chosen(policy, make_request(), warm, idle) == {"idle"}
    assert chosen(policy, make_request(), warm, idle, assigned_s=0.8 * 120) == {"warm"}


def test_the_price_of_evictions_grows_with_the_fill() -> None:
    prices_s = [COST.eviction_s(0.01 * percent, 10.0, 2.0, 1.0) for percent in range(0, 150)]
    assert prices_s == sorted(prices_s)
    assert prices_s[10] < 0.001, "it would have the pool to itself"
    assert prices_s[30] < 0.05
    assert prices_s[100] == prices_s[149] == 2.0, "one prompt comes back for each that does not"
    assert COST.eviction_s(0.5, 2.0, 2.0, 1.0) > 10 * COST.eviction_s(0.5, 50.0, 2.0, 1.0), "fewer slots"
    assert COST.eviction_s(0.2, 1.0, 3.0, 1.0) == pytest.approx(3.0 * 0.2), "one slot is taken as often as it is used"


def test_the_odds_of_a_return_are_bounded() -> None:
    assert [COST.return_odds(share) for share in (0.0, 0.5, 0.75, 0.99, 1.0)] == [0.0, 1.0, 3.0, 8.0, 8.0]
    assert [COST.num_turns(share) for share in (0.0, 0.5, 0.75, 1.0)] == [1.0, 2.0, 4.0, 50.0]


def test_only_blocks_that_do_not_fit_are_waited_for() -> None:
    assert [COST.kv_wait_s(usage, 2.0, 2) for usage in (0.5, 1.0, 1.5, 3.0)] == [0.0, 0.0, 1.5, 4.0]
    assert view("full", queue_s=1.0, kv_wait_s=1.5, prefill_s=0.5).predicted_ttft_s == 3.0
    assert COST.kv_wait_s(3.0, 0.0, 2) == 0.0, "no request has ended yet: nothing is known"


@pytest.mark.parametrize(("usage", "num_slots"), [(1e15, 0.1), (-7.0, 10.0), (1e-15, 1e15)])
def test_an_impossible_report_raises_nothing(usage: float, num_slots: float) -> None:
    assert COST.kv_wait_s(usage, 3.0, 0) >= 0.0
    assert COST.eviction_s(usage, num_slots, 3.0, 1.0) >= 0.0


def test_headstart_spreads_decodes_by_how_long_they_run() -> None:
    policy = make_policy("headstart")
    busy, other = view("busy", decode_s=COST.decode_s(50, 10.0)), view("other", decode_s=COST.decode_s(20, 10.0))
    assert chosen(policy, make_request(), busy, other) == {"other"}
    assert chosen(policy, make_request(), replace(busy, prefill_s=0.1), replace(other, prefill_s=4.0)) == {"busy"}
    assert COST.decode_s(50, 90.0) == COST.decode_s(50, 20.0), "later requests even out the rest"


def test_headstart_spreads_equal_costs_by_recent_work() -> None:
    workers = view("a", assigned_s=9.0), view("b", assigned_s=3.0)
    assert chosen(make_policy("headstart"), make_request(), *workers) == {"b"}


def test_headstart_draws_where_other_gateways_may_have_sent_work() -> None:
    draws = iter([0.9, 0.1])
    workers = [view("a", report_age_s=0.25), view("b", report_age_s=0.25)]
    fleet = FleetView(COST, 0.0, draw=lambda: next(draws))
    first, second = make_policy("headstart").scores(make_request(), workers, fleet)
    assert first - second == pytest.approx(0.2)


def test_without_the_index_a_key_outweighs_a_prefill_elsewhere() -> None:
    """Every gateway prefers the same worker, whatever it has sent lately and where, but for a long queue."""
    requests = [make_request(affinity_key=f"conversation {number}") for number in range(64)]
    names = [f"w{number}" for number in range(4)]
    first, second = make_policy("headstart"), make_policy("headstart")
    shared = {"report_age_s": 0.25}  # other gateways send here
    workers = [view(name, **shared) for name in names]
    homes = [chosen(first, request, *workers, index_answered=False) for request in requests]
    assert {name for home in homes for name in home} == set(names), "keys spread"
    for request, home in zip(requests, homes, strict=True):
        (name,) = home
        others = [view(other, **shared) for other in names if other != name]
        busy_lately = view(name, assigned_s=5.0, **shared)
        assert chosen(second, request, *reversed(others), busy_lately, index_answered=False) == home
        assert chosen(second, request, *others, busy_lately) == {each.member.worker_id for each in others}
        long_s = 1.1 * AFFINITY
        assert name not in chosen(first, request, *others, view(name, queue_s=long_s), index_answered=False)
        warm = replace(others[0], matched_tokens=160, prefill_s=0.01)
        workers = [warm, *others[1:], view(name, **shared)]
        assert chosen(first, request, *workers, index_answered=False) == home
        alone = [replace(each, report_age_s=0.0) for each in workers]
        assert chosen(first, request, *alone, index_answered=False) == {warm.member.worker_id}, "it sent each turn"


def test_longest_prefix_prefers_the_match_to_the_load() -> None:
    policy = make_policy("longest_prefix")
    workers = [
        view("a", matched_tokens=32, num_running=9, queue_s=99.0),
        view("b", matched_tokens=32, num_running=5, queue_s=99.0),
        view("c", matched_tokens=16),
    ]
    assert chosen(policy, make_request(), *workers) == {"b"}


def test_round_robin_takes_turns_and_survives_a_changing_fleet() -> None:
    policy = make_policy("round_robin")
    workers = {name: view(name) for name in "abc"}
    seen = []
    for names in ("abc", "abc", "ac", "abc", "abc"):
        (name,) = chosen(policy, make_request(), *(workers[n] for n in names))
        policy.on_dispatch(make_request(), workers[name])
        seen.append(name)
    assert seen == ["a", "b", "c", "a", "b"]


def test_round_robin_takes_turns_for_each_model() -> None:
    policy = make_policy("round_robin")
    seen = []
    for model, names in (("m", "ab"), ("other", "cd")) * 2:
        request, workers = replace(make_request(), model=model), [view(name) for name in names]
        (name,) = chosen(policy, request, *workers)
        policy.on_dispatch(request, view(name))
        seen.append(name)
    assert seen == ["a", "c", "b", "d"]


def test_least_load_counts_requests() -> None:
    workers = [view("a", num_running=2), view("b", num_running=1, queue_s=50.0)]
    assert chosen(make_policy("least_load"), make_request(), *workers) == {"b"}


def test_a_consistent_hash_moves_only_the_keys_of_a_lost_worker() -> None:
    policy = make_policy("consistent_hash")
    workers = [view(name) for name in "abcdefgh"]
    requests = [make_request() for _ in range(200)]
    before = [chosen(policy, request, *workers).pop() for request in requests]
    after = [chosen(policy, request, *workers[:-1]).pop() for request in requests]
    assert all(b in ("h", a) for b, a in zip(before, after, strict=True))
    assert 10 <= before.count("h") <= 45
    assert chosen(policy, make_request(affinity_key="k"), *workers) == chosen(
        policy, make_request(affinity_key="k"), *workers
    )


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_answers_for_one_worker_and_an_empty_prompt(name: str) -> None:
    policy = make_policy(name)
    request = replace(make_request(), hashes=[], num_prompt_tokens=1)
    assert chosen(policy, request, view("a")) == {"a"}
    policy.on_dispatch(request, view("a"))


TERMS = {
    "queue_s": st.floats(0.0, 30.0),
    "prefill_s": st.floats(0.01, 20.0),
    "assigned_s": st.floats(0.0, 60.0),
    "matched_tokens": st.sampled_from([0, 16, 64]),
}


@given(seed=st.integers(0, 10_000), terms=st.lists(st.fixed_dictionaries(TERMS), min_size=1, max_size=5))
def test_no_cost_is_negative_and_a_key_counts_without_the_index(seed: int, terms: list[dict[str, Any]]) -> None:
    """The choice is as if the session's own worker had a discount: costs are seconds, which it would make negative."""
    workers = [view(f"w{at}", report_age_s=0.25, **changes) for at, changes in enumerate(terms)]
    fleet = FleetView(COST, sum(each["assigned_s"] for each in terms) / len(workers), lambda: 0.5)
    blind, policy = replace(fleet, index_answered=False), make_policy("headstart")
    plain, request = policy.scores(make_request(num_blocks=4), workers, fleet), make_request(4, affinity_key=f"k{seed}")
    costs_s = policy.scores(request, workers, blind)
    assert min(costs_s) >= 0.0
    assert policy.scores(request, workers, fleet) == plain, "the index knows more than a key"
    own = workers.index(rendezvous_worker(f"k{seed}", workers))
    away_s = AFFINITY * workers[own].prefill_s
    assert costs_s == pytest.approx([cost_s + away_s * (at != own) for at, cost_s in enumerate(plain)])


def test_a_match_that_most_have_makes_no_home() -> None:
    alike = [view(f"w{at}", matched_tokens=64) for at in range(3)]
    assert [idle_best_matches(alike, common) for common in (None, 64, 16)] == [[], [], [0, 1, 2]]


def test_the_page_has_a_row_for_each_policy() -> None:
    page = (Path(__file__).parents[3] / "docs" / "routing.md").read_text(encoding="utf-8")
    rows = page.partition("## Other policies")[2].partition("\n## ")[0]
    names = [name for cell in re.findall(r"^\| ([^|]+) \|", rows, re.MULTILINE) for name in re.findall("`(.+?)`", cell)]
    assert sorted(names) == sorted(POLICIES)
