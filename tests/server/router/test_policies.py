from __future__ import annotations

import os
from dataclasses import replace

import pytest

from cache.records import WorkerMember
from cache.types import BlockHash, Epoch, WorkerId
from server.router.cost import CostModel
from server.router.index_accuracy import Foresight, ForesightSettings
from server.router.placement import RouteRequest
from server.router.policies import POLICIES, FleetView, Option, Policy, make_policy

COST = CostModel()


def option(name: str, **changes: float) -> Option:
    member = WorkerMember(WorkerId(name), Epoch("e"), "http://x", "m", "n", "cpu", 16, 4096, protocol=1)
    fields: dict[str, float] = {
        "matched_tokens": 0,
        "own_s": 1.0,
        "wait_s": 0.0,
        "recent_s": 0.0,
        "num_outstanding": 0,
        "num_waiting": 0,
        "active_blocks": 0,
        "kv_usage": 0.0,
        "num_blocks": 1000,
        "prefill_tokens_per_s": 1000.0,
    }
    return Option(member, **{**fields, **changes})  # type: ignore[arg-type]


def ask(num_blocks: int = 10, **changes: str) -> RouteRequest:
    hashes = [BlockHash(os.urandom(16)) for _ in range(num_blocks)]
    return RouteRequest("r", "m", num_blocks * 16 + 1, hashes, affinity_key=changes.get("affinity_key"))


def chosen(policy: Policy, request: RouteRequest, *options: Option, recent_s: float = 0.0) -> set[str]:
    scores = policy.scores(request, options, FleetView(COST, recent_s, len(options)))
    assert len(scores) == len(options)
    return {o.member.worker_id for o, score in zip(options, scores, strict=True) if score == min(scores)}


@pytest.mark.parametrize(("rho", "beta"), [(0.0, 0.0), (0.5, 1.0), (0.8, 4.0), (0.95, 8.0), (5.0, 8.0)])
def test_beta_grows_with_utilisation_up_to_its_cap(rho: float, beta: float) -> None:
    assert COST.beta(rho * 60.0 * 8, 8) == pytest.approx(beta)


def test_headstart_weighs_own_work_more_the_busier_the_fleet() -> None:
    policy = make_policy("headstart")
    warm, idle = option("warm", wait_s=1.5, own_s=0.5), option("idle", own_s=1.5)
    assert chosen(policy, ask(), warm, idle) == {"idle"}
    assert chosen(policy, ask(), warm, idle, recent_s=0.8 * 120) == {"warm"}


def test_a_pool_that_is_held_makes_a_request_wait() -> None:
    waits_s = [COST.room_s(0.01 * percent, 10.0, hold_s=2.0) for percent in range(0, 150)]
    assert waits_s == sorted(waits_s)
    assert waits_s[10] < 0.001, "it would have the pool to itself"
    assert waits_s[30] < 0.05
    assert waits_s[95] > 1.0
    assert COST.room_s(3.0, 10.0, 2.0) - COST.room_s(2.0, 10.0, 2.0) == pytest.approx(2.0), "a pool must turn over"
    assert COST.room_s(0.5, 2.0, 2.0) > 10 * COST.room_s(0.5, 50.0, 2.0), "fewer places for large requests"
    assert COST.room_s(0.95, 10.0, 0.0) == 0.0, "no request has ended yet: nothing is known"


def test_a_pool_of_one_place_is_taken_as_often_as_it_is_used() -> None:
    for usage in (0.2, 0.5, 0.9):
        assert COST.room_s(usage, 1.0, 3.0) == pytest.approx(3.0 * usage)


@pytest.mark.parametrize(("usage", "num_places"), [(1e15, 0.1), (-7.0, 10.0), (1e-15, 1e15)])
def test_a_report_that_cannot_be_stops_nobody(usage: float, num_places: float) -> None:
    assert COST.room_s(usage, num_places, 3.0) >= 0.0


def test_headstart_leaves_a_holder_whose_pool_is_held() -> None:
    policy = make_policy("headstart")
    full, other = option("full", own_s=0.1, room_s=1.5), option("other", own_s=1.0)
    assert chosen(policy, ask(), full, other) == {"other"}
    assert chosen(policy, ask(), option("full", own_s=0.1, room_s=0.5), other) == {"full"}


def test_headstart_spreads_equal_costs_by_recent_work() -> None:
    assert chosen(make_policy("headstart"), ask(), option("a", recent_s=9.0), option("b", recent_s=3.0)) == {"b"}


def test_headstart_blurs_what_other_gateways_may_have_done() -> None:
    draws = iter([0.9, 0.1])
    options = [option("a", unseen_s=0.25), option("b", unseen_s=0.25)]
    fleet = FleetView(COST, 0.0, 2, draw=lambda: next(draws))
    first, second = make_policy("headstart").scores(ask(), options, fleet)
    assert first - second == pytest.approx(0.2)


def test_a_cache_key_is_a_hint_that_every_gateway_takes_alike_and_that_work_outdoes() -> None:
    """Among equals the key's worker, whatever else each gateway has seen; not at the price of a match or of a queue."""
    requests = [ask(affinity_key=f"conversation {number}") for number in range(64)]
    names = [f"w{number}" for number in range(4)]
    first, second = make_policy("headstart"), make_policy("headstart")
    homes = [chosen(first, request, *map(option, names)) for request in requests]
    assert {name for home in homes for name in home} == set(names), "keys spread"
    for request, home in zip(requests, homes, strict=True):
        (name,) = home
        others = [other for other in names if other != name]
        busy_lately = option(name, recent_s=5.0)
        assert chosen(second, request, *map(option, reversed(others)), busy_lately) == home
        assert name not in chosen(first, request, *map(option, others), option(name, wait_s=0.05))
        warm = option("warm", matched_tokens=160, own_s=0.01)
        assert chosen(first, request, *map(option, names), warm) == {"warm"}


def test_longest_prefix_takes_the_match_whatever_waits_and_then_the_load() -> None:
    policy = make_policy("longest_prefix")
    options = [
        option("a", matched_tokens=32, num_outstanding=9, wait_s=99.0),
        option("b", matched_tokens=32, num_outstanding=5, wait_s=99.0),
        option("c", matched_tokens=16),
    ]
    assert chosen(policy, ask(), *options) == {"b"}


def test_round_robin_takes_turns_and_survives_a_changing_fleet() -> None:
    policy = make_policy("round_robin")
    options = {name: option(name) for name in "abc"}
    seen = []
    for names in ("abc", "abc", "ac", "abc", "abc"):
        (name,) = chosen(policy, ask(), *(options[n] for n in names))
        policy.placed(ask(), options[name])
        seen.append(name)
    assert seen == ["a", "b", "c", "a", "b"]


def test_least_load_counts_requests() -> None:
    options = [option("a", num_outstanding=2), option("b", num_outstanding=1, wait_s=50.0)]
    assert chosen(make_policy("least_load"), ask(), *options) == {"b"}


def test_a_consistent_hash_moves_only_the_keys_of_a_lost_worker() -> None:
    policy = make_policy("consistent_hash")
    options = [option(name) for name in "abcdefgh"]
    requests = [ask() for _ in range(200)]
    before = [chosen(policy, request, *options).pop() for request in requests]
    after = [chosen(policy, request, *options[:-1]).pop() for request in requests]
    assert all(b in ("h", a) for b, a in zip(before, after, strict=True))
    assert 10 <= before.count("h") <= 45
    assert chosen(policy, ask(affinity_key="k"), *options) == chosen(policy, ask(affinity_key="k"), *options)


def test_sglang_follows_the_tree_until_the_fleet_is_out_of_balance() -> None:
    policy = make_policy("sglang")
    request = ask()
    policy.placed(request, option("b"))
    assert chosen(policy, request, option("a"), option("b", num_outstanding=32)) == {"b"}
    assert chosen(policy, request, option("a"), option("b", num_outstanding=33)) == {"a"}
    assert chosen(policy, ask(), option("a"), option("b")) == {"a"}, "no match: the smaller tree"


def test_sglang_trees_are_bounded() -> None:
    policy = make_policy("sglang")
    first = ask()
    policy.placed(first, option("b", num_blocks=10))
    for _ in range(10):
        policy.placed(ask(), option("b", num_blocks=10))
    assert chosen(policy, first, option("a"), option("b")) == {"a"}, "forgotten, and a's tree is smaller"


def test_llm_d_adds_prefix_memory_and_queue() -> None:
    policy = make_policy("llm-d")
    assert chosen(policy, ask(), option("a", matched_tokens=80), option("b")) == {"a"}
    assert chosen(policy, ask(), option("a", kv_usage=0.5), option("b")) == {"b"}
    assert chosen(policy, ask(), option("a", matched_tokens=40, num_waiting=5), option("b")) == {"b"}


def test_dynamo_adds_prefill_and_active_blocks() -> None:
    policy = make_policy("dynamo")
    assert chosen(policy, ask(), option("a", own_s=0.5), option("b", own_s=1.0)) == {"a"}
    assert chosen(policy, ask(), option("a", own_s=0.5, active_blocks=100), option("b", own_s=1.0)) == {"b"}


@pytest.mark.parametrize("name", list(POLICIES))
def test_every_policy_answers_for_one_worker_and_an_empty_prompt(name: str) -> None:
    policy = make_policy(name)
    request = replace(ask(), hashes=[], num_prompt_tokens=1)
    assert chosen(policy, request, option("a")) == {"a"}
    policy.placed(request, option("a"))


def test_a_blind_index_is_said_loudly_once(caplog: pytest.LogCaptureFixture) -> None:
    foresight = Foresight(ForesightSettings(window=20, min_requests=10, min_tokens=100))
    for _ in range(20):
        foresight.add(promised=100, found=90)
    assert not foresight.blind
    for _ in range(20):
        foresight.add(promised=100, found=0)
    assert foresight.blind
    assert "0% of the promised" in foresight.reason
    for _ in range(20):
        foresight.add(promised=0, found=100)
    assert "0% of the cached tokens were promised" in foresight.reason
    for _ in range(20):
        foresight.add(promised=100, found=100)
    assert not foresight.blind
    assert len([r for r in caplog.records if "is blind" in r.getMessage()]) == 1


def test_few_requests_are_no_proof_and_a_doubtful_index_stays_what_it_was() -> None:
    settings = ForesightSettings(window=20, min_requests=10, min_tokens=100, blind_below=0.4, seeing_above=0.6)
    blind, seeing = Foresight(settings), Foresight(settings)
    for _ in range(9):
        blind.add(promised=100, found=0)
    assert not blind.blind
    blind.add(promised=100, found=0)
    assert blind.blind
    for foresight in (blind, seeing):
        for _ in range(40):
            foresight.add(promised=100, found=50)
        assert foresight.kept == 0.5, "of the window alone"
    assert (blind.blind, seeing.blind) == (True, False)


def test_cold_prompts_do_not_make_the_index_blind() -> None:
    foresight = Foresight(ForesightSettings(window=20, min_requests=10, min_tokens=100))
    for _ in range(50):
        foresight.add(promised=0, found=0)
    assert not foresight.blind
    assert (foresight.kept, foresight.told) == (1.0, 1.0)
