"""A real engine whose model has windows finds what the index promises, for each of 200 random prompts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.vllm import windows
from tests.vllm.engines import MODEL
from tests.vllm.fleet import OWN_BLOCK_SIZE, TENANTS, VllmFleet, found
from tests.vllm.replay import batches
from tests.waiting import wait_until

pytestmark = pytest.mark.vllm
NUM_PROMPTS: Final = 200
RESTART_EVERY: Final = 70
LEAST_EQUAL: Final = 0.95
MAX_TOKENS: Final = 580
STABLE: Final = 8
"""Lookups in a row with one result: longer than a publish takes."""


@pytest.fixture(scope="module")
def windows_fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmFleet]:
    """One engine, so that every prompt goes there."""
    folder = tmp_path_factory.mktemp("windows")
    with VllmFleet(folder, 1, windows.options(windows.write_model(folder / "model"))) as fleet:
        yield fleet


def random_prompt(rng: random.Random, prompts: list[list[int]]) -> list[int]:
    """Return a new prompt, an old one, or one that begins like an old one."""
    fresh = [rng.randrange(1000, 20_000) for _ in range(rng.randint(1, 200))]
    kind = rng.choice(("new", "old", "next turn", "next turn", "cut"))
    if not prompts or kind == "new":
        return fresh
    before = rng.choice(prompts[-8:])
    if kind == "old":
        return before
    return (before[: rng.randint(1, len(before)) if kind == "cut" else len(before)] + fresh)[:MAX_TOKENS]


def test_promises_of_a_model_with_windows(windows_fleet: VllmFleet) -> None:
    fleet, rng = windows_fleet, random.Random(0)
    [adapter] = fleet.adapters
    prompts: dict[str, list[list[int]]] = {tenant: [] for tenant in TENANTS}
    counts: list[tuple[int, int]] = []
    num_before = 0
    for number in range(1, NUM_PROMPTS + 1):
        tenant = rng.choice(list(TENANTS))
        prompt = random_prompt(rng, prompts[tenant])
        promised = stable_promise(fleet, prompt, tenant, num_before)
        answer = fleet.complete({"prompt": prompt, "max_tokens": rng.randint(1, 40)}, tenant=tenant)
        counts.append((promised, found(answer)))
        prompts[tenant].append(prompt)
        if number % RESTART_EVERY == 0:
            restart(fleet)
            num_before = adapter.counted("batch")
    print(f"promised, found: {counts}")
    num_equal = sum(promised == num_found for promised, num_found in counts)
    print(f"equal: {num_equal} of {NUM_PROMPTS}; found something: {sum(num_found > 0 for _, num_found in counts)}")
    assert all(promised <= num_found for promised, num_found in counts)
    assert num_equal >= LEAST_EQUAL * NUM_PROMPTS
    assert sum(num_found > 0 for _, num_found in counts) > NUM_PROMPTS // 5


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
    return min(reads[-1], len(prompt) - 1)


def restart(fleet: VllmFleet) -> None:
    [engine], [adapter] = fleet.engines, fleet.adapters
    epoch = adapter.epoch()
    engine.kill()
    engine.start()
    engine.wait_ready()
    fleet.wait_ready()
    wait_until(lambda: adapter.epoch() != epoch, what="a new epoch")
    wait_until(lambda: fleet.knows_epoch({"prompt": [5] * OWN_BLOCK_SIZE, "model": MODEL}, adapter))
