"""Silent is not gone: late answers, a registry that is away and loops that stand still cost waiting, no request.

`pytest -m faults tests/faults/test_not_heard.py -s` prints how the requests ended.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from pathlib import Path

import pytest

from tests.faults import rollouts
from tests.faults.client import Outcome, ask, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.worker_process import Additions
from tests.waiting import until

STOP_S = 5.0
DEADLINE_S = 30.0
NUM_OF_EACH = 200


async def ask_through(cluster: Cluster, parts: str, num_of_each: int, stop_s: float) -> list[Outcome]:
    """Stop parts of the fleet while streams run and other requests are held. Return how all ended."""
    stopped = {"gateway": cluster.gateways, "workers": cluster.workers, "redis": [], "all": list(cluster.parts)}[parts]
    stops_redis = parts in ("redis", "all") and cluster.topology.redis
    begun: set[int] = set()
    async with session() as http, asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(
                ask(
                    http,
                    cluster.gateway.url,
                    completion(f"stream {number}", max_tokens=64),
                    on_tokens=lambda outcome, number=number: begun.add(number),
                )
            )
            for number in range(num_of_each)
        ]
        await until(lambda: len(begun) >= min(num_of_each, 32))
        for part in stopped:
            part.freeze()
        if stops_redis:
            cluster.redis.stop()
        try:
            for number in range(num_of_each):
                body = completion(f"held {number} " * 20, max_tokens=8, stream=False)
                tasks.append(group.create_task(ask(http, cluster.gateway.url, body)))
            await asyncio.sleep(stop_s)
        finally:
            for part in stopped:
                part.thaw()
            if stops_redis:
                cluster.redis.resume()
    return [task.result() for task in tasks]


@pytest.mark.parametrize("redis", [True, False])
@pytest.mark.parametrize("parts", ["gateway", "workers", "redis", "all"])
async def test_what_is_not_heard_is_waited_for(parts: str, redis: bool, tmp_path: Path, model: Path) -> None:
    if parts == "redis" and not redis:
        pytest.skip("it has no registry")
    topology = Topology(
        gateway_args=["--request-timeout-s", str(DEADLINE_S), "--hold-s", "0.05"],
        worker_args=["--max-num-seqs", "64"],
        additions=Additions(step_s=0.01),
        redis=redis,
        static_workers=not redis,
    )
    with Cluster(tmp_path / "fleet", model, topology) as cluster:
        outcomes = await ask_through(cluster, parts, NUM_OF_EACH, STOP_S)
        ends = Counter("ok" if each.ok else f"{each.status} {each.error}" for each in outcomes)
        print(f"{parts} stopped for {STOP_S:g} s, {'registry' if redis else '--workers'}: {dict(ends)}")
        late = [each for each in outcomes if not each.ok]
        assert all(each.error == "timeout" and each.took_s >= DEADLINE_S - 1 for each in late), ends
        cluster.assert_quiet(within_s=20.0)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_a_revision_serves_when_another_leaves(number: int, tmp_path: Path, model: Path) -> None:
    """At once when it leaves in good order, and within a lease when it is killed."""
    with Cluster(tmp_path / "fleet", model, rollouts.topology(3, static_workers=False)) as cluster:
        *old, new = cluster.workers
        new.send(signal.SIGTERM)
        new.wait()
        new.args += ["--block-size", "32"]
        new.start()
        await until(lambda: [w["state"] for w in cluster.gateway.workers()].count("standby") == 1)
        watch = cluster.stopwatch()
        for worker in old:
            worker.send(number)
        if number == signal.SIGKILL:
            for worker in old:
                worker.wait()
        outcomes = []
        async with session() as http:
            while not outcomes or not outcomes[-1].ok:
                outcomes.append(await ask(http, cluster.gateway.url, completion("hello", max_tokens=4)))
        print(f"{signal.Signals(number).name}: {len(outcomes) - 1} failed, {watch.own_s():.1f} s")
        assert outcomes[-1].headers["x-headstart-worker"] == new.name
        assert len(outcomes) == 1, [each.error for each in outcomes]
