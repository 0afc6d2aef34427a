"""Steps that fail, requests that break workers, and a pool that is too small: rows 9, 17 and 19."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.client import Outcome, ask, ask_all, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.part import metrics
from tests.faults.worker_process import Additions
from tests.waiting import wait_until

POISON = 4242
"""A token that no other prompt holds."""


def plain(rng: random.Random, count: int, **options: Any) -> list[dict[str, Any]]:
    """Completions of random token ids, none of them poison."""
    prompts = [[rng.randrange(100, 4000) for _ in range(rng.randint(5, 200))] for _ in range(count)]
    return [completion("", **{"max_tokens": 24, **options}) | {"prompt": prompt} for prompt in prompts]


def poison(rng: random.Random) -> dict[str, Any]:
    ids = [rng.randrange(100, 4000) for _ in range(40)]
    ids[rng.randrange(40)] = POISON
    return completion("", max_tokens=8) | {"prompt": ids}


def fleet(kind: str, folder: Path, model: Path, **changes: Any) -> Cluster:
    additions = Additions(step_s=0.01, poison_token=POISON, poison=kind)
    return Cluster(folder, model, Topology(additions=additions, **changes))


def num_failures(cluster: Cluster) -> float:
    """Count the steps that raised, of any kind."""
    samples = [metrics(worker.url) for worker in cluster.workers]
    return sum(v for s in samples for name, v in s.items() if name.startswith("headstart_worker_step_failures_total"))


@pytest.fixture(scope="module")
def raising(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    with fleet("raise", tmp_path_factory.mktemp("raise"), model) as cluster:
        yield cluster


def assert_culprit(outcome: Outcome) -> None:
    assert outcome.status == 500
    assert outcome.headers["x-should-retry"] == "false"


async def poisoned_among(cluster: Cluster, rng: random.Random) -> tuple[Outcome, list[Outcome], list[Outcome]]:
    """Return the culprit's outcome amid running streams, and theirs with those of an undisturbed run."""
    asked = plain(rng, 12, max_tokens=60)
    reference = await ask_all(cluster.gateway.url, asked)
    running = asyncio.create_task(ask_all(cluster.gateway.url, asked))
    await asyncio.sleep(0.25)
    async with session() as http:
        culprit = await ask(http, cluster.gateway.url, poison(rng))
    return culprit, await running, reference


async def test_row_9_a_step_raises(raising: Cluster, rng: random.Random) -> None:
    """Only the culprit fails; those of its batch get their tokens, the engine lives, and health stays truthful."""
    pids = [worker.pid for worker in raising.workers]
    culprit, outcomes, reference = await poisoned_among(raising, rng)
    assert_culprit(culprit)
    assert all(outcome.same_as(want) for outcome, want in zip(outcomes, reference, strict=True))
    assert [worker.pid for worker in raising.workers if worker.poll() is None and worker.is_ready()] == pids
    assert num_failures(raising) == 1
    raising.assert_quiet()


async def test_row_19_quarantined_by_hash(raising: Cluster, rng: random.Random) -> None:
    """Asked again and again, a poisonous request reaches an engine once."""
    asked = poison(rng)
    failures = num_failures(raising)
    for outcome in await ask_all(raising.gateway.url, [asked] * 8, parallel=1):
        assert_culprit(outcome)
    after = num_failures(raising)
    assert after == failures + 1
    assert raising.gateway.metrics()["headstart_quarantined_total"] >= 1
    raising.assert_quiet()


async def test_row_9_a_device_that_breaks_for_good(tmp_path: Path, model: Path, rng: random.Random) -> None:
    """The device does not recover after a step: the worker ends, names the culprit, and hands the rest over.

    One worker is lost, not two.
    """
    with fleet("break", tmp_path, model) as cluster:
        culprit, outcomes, reference = await poisoned_among(cluster, rng)
        assert_culprit(culprit)
        assert all(outcome.same_as(want) for outcome, want in zip(outcomes, reference, strict=True))
        wait_until(lambda: [worker.poll() for worker in cluster.workers].count(None) == 1, what="the broken one ended")
        assert sorted(worker.poll() or 0 for worker in cluster.workers) == [0, 1]
        cluster.assert_quiet()


async def test_row_19_a_request_that_kills_the_process(tmp_path: Path, model: Path, rng: random.Random) -> None:
    """The first worker's death has no sure culprit; the second has one, and there is no third."""
    with fleet("kill", tmp_path, model, num_workers=3) as cluster:
        culprit, outcomes, reference = await poisoned_among(cluster, rng)
        assert_culprit(culprit)
        assert [worker.poll() for worker in cluster.workers].count(-signal.SIGKILL) == 2
        assert all(outcome.same_as(want) for outcome, want in zip(outcomes, reference, strict=True))
        cluster.assert_quiet()


async def test_row_17_a_pool_that_is_too_small(tmp_path: Path, model: Path, rng: random.Random) -> None:
    """Many requests that each need a third of the pool: preempted, recomputed, and equal to those of an unloaded
    run, greedy and seeded. A request larger than the pool is refused at once."""
    small = ["--num-blocks", "65", "--max-model-len", "900"]
    with Cluster(tmp_path, model, Topology(num_workers=1, worker_args=small)) as cluster:
        asked = plain(rng, 12, max_tokens=200)
        asked += [body | {"temperature": 0.8, "seed": rng.randrange(1000)} for body in plain(rng, 12, max_tokens=200)]
        reference = await ask_all(cluster.gateway.url, asked, parallel=1)
        outcomes = await ask_all(cluster.gateway.url, asked, parallel=len(asked))
        assert all(outcome.same_as(want) for outcome, want in zip(outcomes, reference, strict=True))
        assert metrics(cluster.workers[0].url)["headstart_worker_preemptions_total"] > 5
        (too_large,) = await ask_all(cluster.gateway.url, [completion("x", max_tokens=2000)])
        assert too_large.status == 400
        cluster.assert_quiet()
