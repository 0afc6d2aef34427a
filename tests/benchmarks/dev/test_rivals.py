"""The policies of other routers that `headstart bench route` compares. `test_route.py` pins the figures of llm-d's."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from benchmarks.dev.simulation.rivals import RIVALS
from tests.server.router.test_policies import chosen, make_request, view


@pytest.mark.parametrize("name", list(RIVALS))
def test_every_rival_answers_for_one_worker_and_an_empty_prompt(name: str) -> None:
    policy = RIVALS[name]()
    request = replace(make_request(), hashes=[], num_prompt_tokens=1)
    assert chosen(policy, request, view("a")) == {"a"}
    policy.on_dispatch(request, view("a"))
