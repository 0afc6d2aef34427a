from __future__ import annotations

import pytest

from benchmarks.dev.simulation.ablation import TERMS, WITHOUT, Without
from server.router.policies import make_policy
from tests.server.router.test_policies import chosen, make_request, view


@pytest.mark.parametrize(("term", "field"), [*zip(TERMS, TERMS, strict=True), ("recent", "assigned_s")])
def test_a_term_that_is_left_out_decides_nothing(term: str, field: str) -> None:
    workers, request = (view("a", **{field: 5.0}), view("b")), make_request()
    assert chosen(make_policy("headstart"), request, *workers) == {"b"}
    assert chosen(Without(term), request, *workers) == {"a", "b"}
    assert getattr(workers[0], field) == 5.0, "the prediction keeps it"


def test_the_rules_of_the_cost_are_left_out_too() -> None:
    ours = make_policy("headstart")
    busy = view("a", queue_s=1.5, prefill_s=0.5), view("b", prefill_s=1.5)
    assert chosen(ours, make_request(), *busy, assigned_s=96.0) == {"a"}
    assert chosen(Without("beta"), make_request(), *busy, assigned_s=96.0) == {"b"}
    full = view("a", matched_tokens=16, prefill_s=0.9, eviction_s=5.0), view("b")
    assert chosen(ours, make_request(), *full) == {"a"}
    assert chosen(Without("idle"), make_request(), *full) == {"b"}
    keyed = make_request(affinity_key="session")
    assert len(chosen(ours, keyed, view("a"), view("b"))) == 1
    assert chosen(Without("affinity"), keyed, view("a"), view("b")) == {"a", "b"}


@pytest.mark.parametrize("name", list(WITHOUT))
def test_every_ablation_answers_for_one_worker(name: str) -> None:
    assert chosen(WITHOUT[name](), make_request(affinity_key="session"), view("a")) == {"a"}
