from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from benchmarks.dev.simulation.rivals import RIVALS, Dynamo, LlmD, LlmDTiers, Sglang
from server.router.fetch_plan import FetchPlan
from tests.server.router.test_policies import chosen, make_request, view


def test_sglang_follows_the_tree_while_in_balance() -> None:
    """Out of balance, it chooses the least loaded worker."""
    policy = Sglang()
    request = make_request()
    policy.on_dispatch(request, view("b"))
    assert chosen(policy, request, view("a"), view("b", num_running=32)) == {"b"}
    assert chosen(policy, request, view("a"), view("b", num_running=33)) == {"a"}
    loads = view("a", num_running=2), view("b", num_running=1)
    assert chosen(policy, make_request(), *loads) == {"b"}, "no match: the least loaded"


def test_llm_d_adds_prefix_memory_and_queue() -> None:
    policy = LlmD()
    assert chosen(policy, make_request(), view("a", matched_tokens=80), view("b")) == {"a"}
    assert chosen(policy, make_request(), view("a", num_free_blocks=500), view("b")) == {"b"}
    assert chosen(policy, make_request(), view("a", matched_tokens=40, num_waiting=5), view("b")) == {"b"}


def test_dynamo_adds_prefill_and_active_blocks() -> None:
    policy, request = Dynamo(), make_request()
    holder = view("a", matched_tokens=160)
    assert chosen(policy, request, holder, view("b")) == {"a"}
    policy.on_dispatch(make_request(), view("a"))
    assert chosen(policy, request, holder, view("b")) == {"b"}


def test_a_credit_of_dynamo_decays_at_a_busy_worker() -> None:
    """It holds all of the prompt, and has half as much to compute."""
    holder = view("a", matched_tokens=160)
    holder.estimate.add(0.08, 5, 0.0)
    assert chosen(Dynamo(), make_request(), holder, view("b")) == {"a"}
    assert chosen(Dynamo(credit_decay=3.0), make_request(), holder, view("b")) == {"b"}


def test_dynamo_may_count_requests_and_tiers() -> None:
    busy = view("a", matched_tokens=160, num_running=1)
    assert chosen(Dynamo(request_tokens=100.0), make_request(), busy, view("b")) == {"a"}
    assert chosen(Dynamo(request_tokens=200.0), make_request(), busy, view("b")) == {"b"}
    loaded = view("c", plan=FetchPlan(160, tier_tokens=(160,)))
    loaded.member = dataclasses.replace(loaded.member, tiers=("disk",))
    assert chosen(Dynamo(), make_request(), loaded, view("b", matched_tokens=32)) == {"c"}
    assert chosen(Dynamo(), make_request(), loaded, view("b", matched_tokens=48)) == {"b"}


@pytest.mark.parametrize("name", list(RIVALS))
def test_every_rival_answers_for_one_worker_and_an_empty_prompt(name: str) -> None:
    policy = RIVALS[name]()
    request = replace(make_request(), hashes=[], num_prompt_tokens=1)
    assert chosen(policy, request, view("a")) == {"a"}
    policy.on_dispatch(request, view("a"))


def test_llm_d_counts_blocks_by_the_place_they_are_in() -> None:
    policy = LlmDTiers()
    loaded = view("a", matched_tokens=10, plan=FetchPlan(80, tier_tokens=(20, 40), peer_tokens=10))
    loaded.member = dataclasses.replace(loaded.member, tiers=("host", "disk"))
    assert policy.prefix(loaded) == pytest.approx(10 + 0.8 * 20 + 0.3 * 40 + 0.3 * 10)
    assert policy.prefix(view("a", matched_tokens=10)) == 10
    assert chosen(policy, make_request(), loaded, view("b", matched_tokens=40)) == {"a"}
