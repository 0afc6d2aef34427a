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
from tests.waiting import until, wait_until

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
    """Send the signal to the answering worker after `num_tokens` tokens; return the longest silence after that."""
    watch = cluster.stopwatch()
    silence_s, last_s = 0.0, None

    def on_tokens(outcome: Outcome) -> None:
        nonlocal silence_s, last_s
        if last_s is not None:
            now_s = watch.own_s()
            silence_s, last_s = max(silence_s, now_s - last_s), now_s
        elif outcome.num_tokens >= num_tokens:
            last_s = watch.own_s()
            cluster.named(outcome.headers["x-headstart-worker"]).send(number)

    async with session() as http:
        outcome = await ask(http, cluster.gateway.url, body, on_tokens=on_tokens)
    assert last_s is not None
    return outcome, max(silence_s, watch.own_s() - last_s)


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
    outcome, silence_s = await lose_after(cluster, body, 5, signal.SIGKILL)
    assert outcome.error == "worker_lost"
    assert not outcome.done
    assert silence_s < 2.0


@pytest.mark.parametrize("when", ["before headers", "mid-stream"])
async def test_row_8_hung(cluster: Cluster, rng: random.Random, when: str) -> None:
    """A stopped worker keeps its connections open. The watchdog finds it; the other worker's streams do not notice."""
    asked = bodies(rng, 8)
    reference = await ask_all(cluster.gateway.url, asked)
    watch = cluster.stopwatch()
    if when == "before headers":
        cluster.named(reference[0].headers["x-headstart-worker"]).freeze()
        outcomes = await ask_all(cluster.gateway.url, asked)
    else:
        others = asyncio.create_task(ask_all(cluster.gateway.url, asked[1:]))
        hung, _ = await lose_after(cluster, asked[0], rng.randint(1, 40), signal.SIGSTOP)
        outcomes = [hung, *await others]
    assert all(outcome.same_as(want) for outcome, want in zip(outcomes, reference, strict=True))
    assert watch.own_s() < STALL_S + 8
    await until(lambda: is_broken(cluster))
    answering = {outcome.headers["x-headstart-worker"] for outcome in await ask_all(cluster.gateway.url, asked)}
    assert len(answering) == 1, "the breaker keeps requests away from the hung worker"
    for worker in cluster.workers:
        worker.thaw()


def is_broken(cluster: Cluster) -> bool:
    """No request goes to the hung worker: by its breaker, or for it has not answered for long."""
    return cluster.gateway.metrics()["headstart_workers{tiny,broken}"] == 1.0 or cluster.gateway.num_ready() == 1


async def test_row_10_restarted_at_the_same_address(cluster: Cluster, rng: random.Random) -> None:
    body = completion(" ".join(rng.choices(["one", "two", "three"], k=300)), max_tokens=4)
    async with session() as http:
        first = await ask(http, cluster.gateway.url, body)
        again: list[Outcome] = []

        async def is_known() -> bool:
            again.append(await ask(http, cluster.gateway.url, body))
            return int(again[-1].headers["x-headstart-cached-tokens"]) > 100

        await until(is_known)
        assert all(outcome.same_as(first) for outcome in again)
        for worker in cluster.workers:
            worker.kill()
            worker.start()
        cluster.wait_ready()
        third = await ask(http, cluster.gateway.url, body | {"stream_options": {"include_usage": True}})
    assert third.same_as(first)
    assert int(third.headers["x-headstart-cached-tokens"]) == 0
    assert third.usage is not None
    assert third.usage["prompt_tokens_details"]["cached_tokens"] == 0
