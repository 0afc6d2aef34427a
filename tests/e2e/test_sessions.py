"""Agents name their conversation in a header: it stays at one worker while that one lives."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.faults.cluster import Cluster, Topology
from tests.waiting import HANG_S

pytestmark = pytest.mark.e2e

AGENTS = ("x-claude-code-session-id", "session-id", "x-session-affinity")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("sessions"), tiny_model, Topology(num_workers=3)) as running:
        yield running


def worker_of(fleet: Cluster, prompt: str, headers: dict[str, str]) -> str:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
    answer = httpx.post(f"{fleet.gateway.url}/v1/completions", json=body, headers=headers, timeout=HANG_S)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-headstart-worker"]


def turns(session: str) -> list[str]:
    """Return prompts that share no prefix: only the header joins them to a session."""
    return [f"{number} {session} " + "to and fro " * 20 for number in range(8)]


@pytest.mark.parametrize("header", AGENTS)
def test_a_growing_conversation_stays_at_its_worker(fleet: Cluster, header: str) -> None:
    history, homes = f"{header} begins. " + "Once upon a time " * 200, set()
    for turn in range(6):
        homes.add(worker_of(fleet, history, {header: f"conversation of {header}"}))
        history += f"Turn {turn}: and then they went on. "
    assert len(homes) == 1


def test_hard_affinity_holds_each_session_until_its_worker_dies(fleet: Cluster) -> None:
    homes = {}
    for header in AGENTS:
        session = {header: f"hard {header}", "x-headstart-affinity": "hard"}
        places = {worker_of(fleet, prompt, session) for prompt in turns(header)}
        assert len(places) == 1, f"{header}: {places}"
        homes[header] = places.pop()
    victim = next(worker for worker in fleet.workers if worker.name == homes[AGENTS[0]])
    victim.send(signal.SIGKILL)
    victim.wait(HANG_S)
    for header in AGENTS:
        session = {header: f"hard {header}", "x-headstart-affinity": "hard"}
        places = {worker_of(fleet, prompt, session) for prompt in turns(header)}
        assert victim.name not in places
        assert len(places) == 1, f"{header}: {places}"
        if homes[header] != victim.name:
            assert places == {homes[header]}, "a death elsewhere moves no session"
