"""Workers that die, hang, or are cut off: rows 6, 7, 8, 10 and 13 of the matrix in docs/reliability.md."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.client import Outcome, ask, ask_all, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.worker_process import Additions
from tests.waiting import wait_until

pytestmark = pytest.mark.faults
STALL_S = 1.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Cluster]:
    topology = Topology(gateway_args=["--stall-s", str(STALL_S)], additions=Additions(step_s=0.01))
    with Cluster(tmp_path_factory.mktemp("lost"), model, topology) as running:
        yield running


@pytest.fixture(autouse=True)
def whole(cluster: Cluster) -> Iterator[None]:
    """Every test finds all workers alive, and leaves nothing behind at those that live."""
    yield
    for worker in cluster.workers:
        worker.thaw()
    cluster.assert_quiet()
    for worker in cluster.workers:
        if worker.poll() is not None:
            worker.start()
    cluster.wait_ready()


def bodies(rng: random.Random, count: int, **options: object) -> list[dict[str, object]]:
    prompts = [" ".join(rng.choices(["alpha", "beta", "gamma", "delta"], k=rng.randint(5, 60))) for _ in range(count)]
    return [completion(prompt, max_tokens=64, **options) for prompt in prompts]


async def lose_after(cluster: Cluster, body: dict[str, object], num_tokens: int, number: int) -> tuple[Outcome, float]:
    """Send the signal to the worker that answers, once so many tokens have come; the longest silence after that."""
    silence_s, hit_s, loop = 0.0, None, asyncio.get_running_loop()
    last_s = 0.0

    def on_tokens(outcome: Outcome) -> None:
        nonlocal silence_s, hit_s, last_s
        now_s = loop.time()
        if hit_s is None and outcome.num_tokens >= num_tokens:
            hit_s = now_s
            name = outcome.headers["x-headstart-worker"]
            next(worker for worker in cluster.workers if worker.name == name).send(number)
        elif hit_s is not None:
            silence_s = max(silence_s, now_s - max(last_s, hit_s))
        last_s = now_s

    async with session() as http:
        outcome = await ask(http, cluster.gateway.url, body, on_tokens=on_tokens)
    assert hit_s is not None
    return outcome, silence_s


async def test_row_6_killed_before_the_first_byte(cluster: Cluster, rng: random.Random) -> None:
    """Every request that a dead worker would have got is answered by the other, with 200."""
    asked = bodies(rng, 12)
    reference = await ask_all(cluster.gateway.url, asked)
    victim = rng.choice(cluster.workers)
    victim.freeze()  # requests reach its socket and no further
    pending = asyncio.create_task(ask_all(cluster.gateway.url, asked))
    await asyncio.sleep(0.3)
    victim.kill()
    outcomes = await pending
    assert [outcome.status for outcome in outcomes] == [200] * len(asked)
    assert all(outcome.same_as(want) for outcome, want in zip(outcomes, reference, strict=True))


async def test_row_7_killed_mid_stream(cluster: Cluster, rng: random.Random) -> None:
    (body,) = bodies(rng, 1)
    (reference,) = await ask_all(cluster.gateway.url, [body])
    outcome, silence_s = await lose_after(cluster, body, rng.randint(1, 60), signal.SIGKILL)
    assert outcome.same_as(reference)
    assert silence_s < 1.0


async def test_row_7_killed_mid_stream_without_another_worker(cluster: Cluster, rng: random.Random) -> None:
    """No worker can take over: an error event within a second, never an end that looks whole."""
    other = cluster.workers[1]
    other.kill()
    wait_until(lambda: cluster.gateway.num_ready() == 1)
    (body,) = bodies(rng, 1)
    outcome, _ = await lose_after(cluster, body, 5, signal.SIGKILL)
    assert outcome.error == "worker_lost"
    assert not outcome.done
    assert outcome.took_s < 2.5


@pytest.mark.parametrize("when", ["before headers", "mid-stream"])
async def test_row_8_hung(cluster: Cluster, rng: random.Random, when: str) -> None:
    """A stopped worker keeps its connections open. The watchdog finds it; the other worker's streams do not notice."""
    asked = bodies(rng, 8)
    reference = await ask_all(cluster.gateway.url, asked)
    opened = asyncio.create_task(asyncio.to_thread(wait_until, lambda: is_broken(cluster), 30, "the breaker opens"))
    if when == "before headers":
        victim = rng.choice(cluster.workers)
        victim.freeze()
        outcomes = await ask_all(cluster.gateway.url, asked)
    else:
        others = asyncio.create_task(ask_all(cluster.gateway.url, asked[1:]))
        hung, _ = await lose_after(cluster, asked[0], rng.randint(1, 40), signal.SIGSTOP)
        outcomes = [hung, *await others]
    assert all(outcome.same_as(want) for outcome, want in zip(outcomes, reference, strict=True))
    assert max(outcome.took_s for outcome in outcomes) < STALL_S + 8
    await opened
    again = await ask_all(cluster.gateway.url, asked)
    assert max(outcome.took_s for outcome in again) < 3, "the breaker keeps requests away from the hung worker"
    for worker in cluster.workers:
        worker.thaw()


def is_broken(cluster: Cluster) -> bool:
    return cluster.gateway.metrics()["headstart_workers{tiny,broken}"] == 1.0


async def test_row_10_restarted_at_the_same_address(cluster: Cluster, rng: random.Random) -> None:
    body = completion(" ".join(rng.choices(["one", "two", "three"], k=300)), max_tokens=4)
    async with session() as http:
        first = await ask(http, cluster.gateway.url, body)
        await asyncio.sleep(0.3)  # published
        second = await ask(http, cluster.gateway.url, body)
        assert second.headers["x-headstart-worker"] == first.headers["x-headstart-worker"]
        assert int(second.headers["x-headstart-cached-tokens"]) > 100
        for worker in cluster.workers:
            worker.kill()
            worker.start()
        cluster.wait_ready()
        third = await ask(http, cluster.gateway.url, body | {"stream_options": {"include_usage": True}})
    assert third.same_as(first)
    assert int(third.headers["x-headstart-cached-tokens"]) == 0
    assert third.usage is not None
    assert third.usage["prompt_tokens_details"]["cached_tokens"] == 0
