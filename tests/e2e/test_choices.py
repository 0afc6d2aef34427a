"""n answers to one prompt are the answers to n requests with the choices' seeds, and share its blocks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.api.prompts.params import choice_seeds
from tests.e2e.serving import Serve
from tests.waiting import HANG_S

pytestmark = pytest.mark.e2e
NUM_PROMPT_TOKENS = 2000
SEED = 7


@pytest.fixture(scope="module", params=["hash", "radix", pytest.param("off", marks=pytest.mark.deep)])
def serve(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Serve]:
    # 125 blocks of prompt, 2 of answer for each of 4 choices, the null block, 2 to spare: not room for two prompts.
    pool = f"--num-blocks {NUM_PROMPT_TOKENS // 16 + 4 * 2 + 1 + 2}"
    options = ["--num-workers", "1", "--prefix-cache", request.param, "--worker-args", pool]
    with Serve("--model", str(tiny_model), *options) as running:
        yield running


def choices(serve: Serve, seed: int, n: int) -> list[dict[str, Any]]:
    prompt = [100 + 7 * position % 4001 for position in range(NUM_PROMPT_TOKENS)]
    body = {"model": "tiny-llama", "prompt": prompt, "max_tokens": 24, "temperature": 1.0, "ignore_eos": True}
    answer = serve.post("/v1/completions", body | {"seed": seed, "n": n, "return_token_ids": True})
    assert answer.status_code == 200, answer.text
    found: list[dict[str, Any]] = answer.json()["choices"]
    return sorted(found, key=lambda choice: int(choice["index"]))


def worker_metric(serve: Serve, name: str) -> float:
    """The value of one sample of the only worker; 0 while it has none."""
    [worker] = httpx.get(f"{serve.ops_url}/workers", timeout=HANG_S).json()["workers"]
    lines = httpx.get(f"{worker['url']}/metrics", timeout=HANG_S).text.splitlines()
    return next((float(line.split()[-1]) for line in lines if line.startswith(f"{name} ")), 0.0)


def test_n_choices_share_the_blocks_of_the_prompt(serve: Serve) -> None:
    """The first request that this server sees: nothing is cached."""
    before = worker_metric(serve, 'headstart_worker_batch_tokens_sum{kind="prefill"}')
    assert len(choices(serve, SEED + 1, 4)) == 4
    computed = worker_metric(serve, 'headstart_worker_batch_tokens_sum{kind="prefill"}') - before
    assert computed == NUM_PROMPT_TOKENS
    assert worker_metric(serve, "headstart_worker_preemptions_total") == 0


def test_n_choices_equal_n_requests(serve: Serve) -> None:
    together = choices(serve, SEED, 4)
    alone = [choices(serve, seed, 1)[0] for seed in choice_seeds(SEED, 4)]
    assert [choice["token_ids"] for choice in together] == [choice["token_ids"] for choice in alone]
    assert len({tuple(choice["token_ids"]) for choice in together}) == 4
