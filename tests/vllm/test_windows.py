"""A real engine finds what the index promises, for each of many random prompts and their answers.

`pytest -m vllm -k five_hundred -s tests/vllm/test_windows.py tests/vllm/test_images.py` tries 500 of each kind.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.tiny_model import write_tiny_model
from tests.vllm import windows
from tests.vllm.engines import MODEL
from tests.vllm.fleet import BLOCK_SIZE, OWN_BLOCK_SIZE, TENANTS, VllmFleet, found
from tests.vllm.replay import batches
from tests.waiting import wait_until

RESTART_EVERY: Final = 70
LEAST_EQUAL: Final = 0.85
"""vLLM 0.32 does not count the copies of a block: a removal of one counts as that of all. Equal answers make copies."""
MAX_TOKENS: Final = 580
STABLE: Final = 8
"""Lookups in a row with one result: longer than a publish takes."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[VllmFleet]:
    """One engine, so that every prompt goes there. Its model has windows, or none."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "windows":
        model = windows.write_model(folder / "model")
    else:
        model = write_tiny_model(folder / "model", hidden_size=128)
    with VllmFleet(folder, 1, windows.options(model)) as fleet:
        yield fleet


def random_prompt(rng: random.Random, prompts: list[list[int]]) -> list[int]:
    """Return a new prompt, an old one with its answer, or one that begins like that."""
    fresh = [rng.randrange(1000, 20_000) for _ in range(rng.randint(1, 200))]
    kind = rng.choice(("new", "old", "next turn", "next turn", "cut"))
    if not prompts or kind == "new":
        return fresh
    before = rng.choice(prompts[-8:])
    if kind == "old":
        return before[:MAX_TOKENS]
    return (before[: rng.randint(1, len(before)) if kind == "cut" else len(before)] + fresh)[:MAX_TOKENS]


@pytest.mark.parametrize(
    ("fleet", "num_prompts"),
    [
        pytest.param("windows", 200),
        pytest.param("windows", 500, marks=pytest.mark.deep, id="five_hundred-windows"),
        pytest.param("plain", 500, marks=pytest.mark.deep, id="five_hundred-plain"),
    ],
    indirect=["fleet"],
)
def test_promises_for_prompts_and_their_answers(fleet: VllmFleet, num_prompts: int) -> None:
    rng = random.Random(num_prompts)
    [adapter] = fleet.adapters
    prompts: dict[str, list[list[int]]] = {tenant: [] for tenant in TENANTS}
    counts: list[tuple[int, int]] = []
    num_before = 0
    for number in range(1, num_prompts + 1):
        tenant = rng.choice(list(TENANTS))
        prompt = random_prompt(rng, prompts[tenant])
        promised = stable_promise(fleet, prompt, tenant, num_before)
        body = {"prompt": prompt, "max_tokens": rng.randint(1, 40), "return_token_ids": True}
        answer = fleet.complete(body, tenant=tenant)
        counts.append((promised, found(answer)))
        prompts[tenant].append(prompt + answer.json()["choices"][0]["token_ids"])
        if number % RESTART_EVERY == 0:
            restart(fleet)
            num_before = adapter.counted("batch")
    print(f"promised, found: {counts}")
    num_equal = sum(promised == num_found for promised, num_found in counts)
    print(f"equal: {num_equal} of {num_prompts}; found something: {sum(num_found > 0 for _, num_found in counts)}")
    assert all(promised <= num_found for promised, num_found in counts)
    assert num_equal >= LEAST_EQUAL * num_prompts
    assert sum(num_found > 0 for _, num_found in counts) > num_prompts // 5


def stable_promise(fleet: VllmFleet, prompt: list[int], tenant: str, num_before: int) -> int:
    """Return what the index promises when all events of the engine have arrived there.

    `num_before`: the batches of the processes before it.
    """
    [engine], [adapter] = fleet.engines, fleet.adapters
    wait_until(lambda: adapter.counted("batch") >= num_before + len(batches(engine.options.replay)))
    body: dict[str, Any] = {"prompt": prompt}
    reads: list[int] = []

    def is_stable() -> bool:
        reads.append(fleet.indexed(body, adapter, tenant=tenant))
        return len(reads) >= STABLE and len(set(reads[-STABLE:])) == 1

    wait_until(is_stable)
    return min(reads[-1], (len(prompt) - 1) // BLOCK_SIZE * BLOCK_SIZE)


def restart(fleet: VllmFleet) -> None:
    [engine], [adapter] = fleet.engines, fleet.adapters
    epoch = adapter.epoch()
    engine.kill()
    engine.start()
    engine.wait_ready()
    fleet.wait_ready()
    wait_until(lambda: adapter.epoch() != epoch, what="a new epoch")
    wait_until(lambda: fleet.knows_epoch({"prompt": [5] * OWN_BLOCK_SIZE, "model": MODEL}, adapter))
