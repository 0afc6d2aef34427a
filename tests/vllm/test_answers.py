"""Clients get from a real vLLM, through the gateway, the texts of a Headstart worker."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import pytest

from tests.e2e.serving import READY, SMALL_POOL, Serve
from tests.vllm.fleet import LONG_S, VllmFleet

PROMPTS: Final = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n",
    "Once upon a time, in a small village by the sea,",
)
TIE: Final = 1e-3
"""Two log probabilities this close may be ordered either way by the rounding of another summation order."""


@pytest.fixture(scope="module")
def own() -> Iterator[Serve]:
    serve = Serve("--num-workers", "1", "--threads", "1", "--worker-args", SMALL_POOL)
    try:
        serve.wait_for_line(READY, LONG_S)
        yield serve
    finally:
        serve.stop()


def test_same_text_as_our_own_worker(fleet: VllmFleet, own: Serve) -> None:
    """Greedy ids in float32 are equal up to a tie: there both have the two tokens within its rounding."""
    model = own.model()
    served = set()
    for prompt in PROMPTS:
        body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, "logprobs": 2, "return_token_ids": True}
        want = own.post("/v1/completions", body | {"model": model}).json()["choices"][0]
        # At the same time and with different salts: some go to either engine, also when one is slower.
        with ThreadPoolExecutor(6) as pool:
            salted = [body | {"cache_salt": f"{prompt} {number}"} for number in range(6)]
            answers = list(pool.map(fleet.complete, salted))
        for answer in answers:
            served.add(answer.headers["x-headstart-worker"])
            assert_same(answer.json()["choices"][0], want)
    assert len(served) == len(fleet.adapters), "both engines have answered"


def assert_same(found: dict[str, Any], want: dict[str, Any]) -> None:
    pairs = zip(found["token_ids"], want["token_ids"], strict=True)
    first = next((position for position, (one, other) in enumerate(pairs) if one != other), None)
    if first is None:
        assert found["text"] == want["text"]
        return
    for choice in (found, want):
        best, second = sorted(choice["logprobs"]["top_logprobs"][first].values(), reverse=True)[:2]
        assert best - second < TIE, (found["text"], want["text"], first)
