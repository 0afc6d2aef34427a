"""Generated bodies of every route stay within the bounds of memory and of the loop."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from benchmarks.dev.bodies import run, start, table
from benchmarks.dev.bodies_load.generated import MAX_BYTES, bodies
from benchmarks.dev.limits import SPARE_BYTES

CONTEXTS = (8192, 131_072)


async def check(count: int, max_bytes: int, seed: int) -> None:
    with ExitStack() as stack:
        done = await run(start(stack, CONTEXTS), CONTEXTS, list(enumerate(bodies(seed, count, max_bytes))))
    assert len(done) == 2 * count
    assert not [each for each in done if each.failed], table(done)


async def test_generated_bodies() -> None:
    """They take little memory and never hold the loop."""
    await check(30, 2 << 20, seed=2)


@pytest.mark.deep
async def test_two_thousand_generated_bodies() -> None:
    """They take little memory and never hold the loop."""
    await check(1000, MAX_BYTES, seed=1)


def test_equal_seeds_give_equal_bodies_of_every_kind() -> None:
    made = list(bodies(3, 300, 1 << 14))
    assert made == list(bodies(3, 300, 1 << 14))
    assert len({body.path for body in made}) == 8
    assert SPARE_BYTES == 64 << 20
