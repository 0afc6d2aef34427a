"""Rollouts of another revision in the order of a StatefulSet, under load, and what became of the requests."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.client import Outcome, ask, completion, session
from tests.faults.cluster import Cluster, Topology
from tests.faults.part import Gateway, Worker
from tests.faults.worker_process import Additions
from tests.tiny_model import write_tiny_model
from tests.waiting import until, wait_until

KINDS = ("revision", "tokenizer", "template", "block size")
NUM_CLIENTS = 8
READY = ("serving", "standby", "learning")
MIN_READY_S = 5.0
"""`minReadySeconds` of the chart's workers."""


def topology(num_workers: int, **changes: Any) -> Topology:
    return Topology(num_workers=num_workers, additions=Additions(step_s=0.01), **changes)


def args_of(kind: str, model: Path, folder: Path) -> list[str]:
    """Return the options that make a worker of another revision; later ones replace earlier ones."""
    if kind == "revision":  # other weights
        return ["--model", str(write_tiny_model(folder / "next", seed=1))]
    if kind == "block size":
        return ["--block-size", "32"]
    other = shutil.copytree(model, folder / "next")
    name = "tokenizer_config.json" if kind == "template" else "tokenizer.json"
    content = json.loads((other / name).read_text())
    if kind == "template":
        content["chat_template"] = "Answer briefly. " + content["chat_template"]
    else:
        content["model"]["merges"].pop()
    (other / name).write_text(json.dumps(content))
    return ["--model", str(other)]


@dataclass
class Observed:
    """Observations of clients and of an operator during a rollout."""

    outcomes: list[Outcome] = field(default_factory=list)
    num_serving: list[int] = field(default_factory=list)
    """Ready workers, by samples of the gateway: those of a revision that it still learns, too."""
    waits_s: list[float] = field(default_factory=list)
    """Own seconds of a request to each gateway, sent when a worker ends."""

    @property
    def failures(self) -> Counter[str]:
        return Counter(f"{each.status} {each.error}" for each in self.outcomes if not each.ok)

    def __str__(self) -> str:
        failed = dict(self.failures)
        ready, wait_s = min(self.num_serving), max(self.waits_s)
        return f"{len(self.outcomes)} requests, failed: {failed or 0}; ready at least {ready}; waited {wait_s:.1f} s"


async def _chat(cluster: Cluster, number: int, observed: Observed, stopping: asyncio.Event) -> None:
    async with session() as http:
        turn = 0
        while not stopping.is_set():
            turn += 1
            text = f"client {number} asks for the {turn}th time " * (1 + turn % 5)
            body = completion(text, max_tokens=24, stream=bool((turn + number) % 2))
            if turn % 3 == 0:
                del body["prompt"]
                body["messages"] = [{"role": "user", "content": text}]
            gateway = cluster.gateways[turn % len(cluster.gateways)]
            observed.outcomes.append(await ask(http, gateway.url, body))


async def _watch(cluster: Cluster, observed: Observed, stopping: asyncio.Event) -> None:
    while not stopping.is_set():
        listed = await asyncio.to_thread(cluster.gateway.workers)
        observed.num_serving.append(sum(each["state"] in READY for each in listed))
        await asyncio.sleep(0.02)


async def _first_answer(cluster: Cluster, url: str, observed: Observed) -> None:
    """Send a request now, and record how long it took."""
    watch = cluster.stopwatch()
    async with session() as http:
        observed.outcomes.append(await ask(http, url, completion("who is left?", max_tokens=4, stream=False)))
    observed.waits_s.append(watch.own_s())


def _epochs(gateway: Gateway, worker: Worker, *states: str) -> set[str]:
    """Return the epochs of a worker that a gateway lists in one of these states, or in any."""
    listed = [each for each in gateway.workers() if each["worker_id"] == worker.name]
    return {each["epoch"] for each in listed if each["state"] in (states or (each["state"],))}


def _wait_ready(cluster: Cluster, worker: Worker, old: set[str]) -> None:
    """Wait until the worker is ready, and until gateways list it: the chart gives them some seconds for that."""
    wait_until(worker.is_ready)
    for gateway in cluster.gateways:
        watch = cluster.stopwatch()
        watch.wait_until(lambda gateway=gateway: _epochs(gateway, worker, *READY) - old, MIN_READY_S, worker.name)  # type: ignore[misc]


async def roll(cluster: Cluster, args: Sequence[str], number: int, observed: Observed) -> None:
    """Replace the workers one by one, the highest ordinal first, each when the one before is ready."""
    for worker in reversed(cluster.workers):
        old = set[str]().union(*[_epochs(gateway, worker) for gateway in cluster.gateways])
        worker.send(number)
        async with asyncio.TaskGroup() as group:
            for gateway in cluster.gateways:
                group.create_task(_first_answer(cluster, gateway.url, observed))
            await asyncio.to_thread(worker.wait)
            worker.args = [*worker.args, *args]
            worker.start()
            await asyncio.to_thread(_wait_ready, cluster, worker, old)


async def observe(cluster: Cluster, *rollouts: Sequence[str], number: int = signal.SIGTERM) -> Observed:
    """Roll out one after the other under load. Return what was seen."""
    observed, stopping = Observed(), asyncio.Event()
    async with asyncio.TaskGroup() as group:
        for client in range(NUM_CLIENTS):
            group.create_task(_chat(cluster, client, observed, stopping))
        group.create_task(_watch(cluster, observed, stopping))
        try:
            await until(lambda: len(observed.outcomes) > 2 * NUM_CLIENTS)
            for args in rollouts:
                await roll(cluster, args, number, observed)
                num_before = len(observed.outcomes)
                await until(lambda num=num_before: len(observed.outcomes) > num + 4 * NUM_CLIENTS)  # type: ignore[misc]
        finally:
            stopping.set()
    return observed
