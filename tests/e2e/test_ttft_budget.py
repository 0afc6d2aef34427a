"""A request names its longest wait for the first token, and is refused at once when it would wait longer."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.e2e.serving import Serve, cached_tokens
from tests.waiting import wait_until

pytestmark = pytest.mark.e2e


def ask(serve: Serve, prompt: str, budget_s: str | None = None, max_tokens: int = 1) -> httpx.Response:
    headers = {} if budget_s is None else {"x-headstart-ttft-budget": budget_s}
    body = {"model": serve.model(), "messages": [{"role": "user", "content": prompt}], "max_tokens": max_tokens}
    return serve.post("/v1/chat/completions", body, headers=headers)


def prompt(seed: int, num_words: int) -> str:
    rng = random.Random(seed)
    return " ".join(rng.choice(["quokka", "marmalade", "Zanzibar", "seven", "juggles"]) for _ in range(num_words))


def waiting_prefill_s(serve: Serve) -> float:
    lines = httpx.get(f"{serve.ops_url}/metrics").text.splitlines()
    values = [float(line.split()[-1]) for line in lines if line.startswith("headstart_waiting_prefill_seconds{")]
    return sum(values)


def test_a_budget_that_would_be_missed_is_refused(smollm2: Serve) -> None:
    """The refusal comes before any prefill."""
    wanted = prompt(0, 200)
    with ThreadPoolExecutor(8) as pool:
        load = [pool.submit(ask, smollm2, prompt(seed, 200)) for seed in range(1, 6)]
        wait_until(lambda: waiting_prefill_s(smollm2) > 0.2)
        refused = ask(smollm2, wanted, "0.1")
        generous = ask(smollm2, "Say hello.", "500")
        assert [each.result().status_code for each in load] == [200] * 5
    assert refused.status_code == 429, refused.text
    error = refused.json()["error"]
    predicted_s = float(refused.headers["x-headstart-predicted-ttft"])
    assert error["code"] == "ttft_budget_exceeded"
    assert predicted_s > 0.1
    assert f"{predicted_s:.3g}"[:3] in error["message"]
    assert "0.1 s" in error["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert generous.status_code == 200, generous.text
    wait_until(lambda: waiting_prefill_s(smollm2) == 0.0)
    answer = ask(smollm2, wanted)
    assert answer.status_code == 200
    assert cached_tokens(answer) < 64, "the refused prompt had been prefilled"


@pytest.mark.parametrize("budget_s", ["soon", "-1", "0", "nan", "inf"])
def test_a_budget_that_is_no_number_of_seconds_is_named(smollm2: Serve, budget_s: str) -> None:
    answer = ask(smollm2, "Say hello.", budget_s)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "x-headstart-ttft-budget"
