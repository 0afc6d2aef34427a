"""With a cluster secret, whoever writes to Redis without it costs prefix hits and nothing else: the short form."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.faults.client import ask_all, completion
from tests.faults.forged_redis import besieged, hits, secret_cluster, with_a_forger
from tests.faults.part import metrics, wait_until

pytestmark = pytest.mark.e2e


def displaced(url: str) -> float:
    """How often a worker has put its entry back."""
    return metrics(url).get("headstart_worker_index_events_total{displaced}", 0.0)


async def test_a_moment_with_a_forger(tmp_path: Path, tiny_model: Path) -> None:
    with besieged(tmp_path, tiny_model, static_workers=False) as (cluster, proxies):
        await with_a_forger(cluster, proxies, random.Random(1), 5.0, 40)


async def test_two_fleets_with_equal_names_share_a_redis(tmp_path: Path, tiny_model: Path) -> None:
    """Their secrets differ: each worker restores its own entry, and each gateway takes entries of its own secret."""
    prompts = [f"Conversation {number}. " + "One two three four five six seven. " * 12 for number in range(3)]
    with secret_cluster(tmp_path / "one", tiny_model, b"one", num_workers=1, static_workers=False) as one:
        ports = (one.redis_port, one.redis_port)
        topology = {"num_workers": 1, "static_workers": False, "redis": False, "redis_ports": ports}
        with secret_cluster(tmp_path / "two", tiny_model, b"two", **topology) as two:
            for fleet in (one, two):
                await hits(fleet, prompts)
            for fleet in (one, two):
                outcomes = await ask_all(fleet.gateway.url, [completion(p, max_tokens=4) for p in prompts * 5])
                assert all(outcome.ok for outcome in outcomes), outcomes
                assert min(await hits(fleet, prompts)) >= 64
            for fleet in (one, two):
                wait_until(lambda fleet=fleet: displaced(fleet.workers[0].url) > 0, 60, "both have written")  # type: ignore[misc]
