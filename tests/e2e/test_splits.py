"""Prefill and decode apart between real processes: the same tokens, whoever dies."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.client import Outcome, ask_all, completion
from tests.faults.part import metrics
from tests.faults.splits import SplitCluster, bodies, text
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[SplitCluster]:
    with SplitCluster(tmp_path_factory.mktemp("splits"), tiny_model, num_mixed=2) as running:
        yield running


def split_of(fleet: SplitCluster, body: dict[str, Any]) -> dict[str, Any]:
    url = f"{fleet.gateway.ops_url}/route/explain?path=/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=HANG_S) as answer:
        found: dict[str, Any] = json.load(answer)["split"]
        return found


async def test_splits_and_deaths_change_no_token(fleet: SplitCluster) -> None:
    prefill, mixed, other = fleet.workers
    split = split_of(fleet, completion(text(random.Random(0))))
    assert split["prefill"] == prefill.name
    assert split["decode"] in (mixed.name, other.name)
    assert 0.0 < split["handover_s"] < split["split_s"]

    asked = bodies(random.Random(1))
    expected = await fleet.unsplit(asked)
    assert fleet.num_splits == 0
    answers = await ask_all(fleet.gateway.url, asked)
    assert differing(answers, expected) == []
    counts = fleet.gateway.metrics()
    assert 0 < fleet.num_splits <= len(asked)
    assert counts["headstart_resumed_total"] == counts["headstart_workers_lost_total"] == 0
    assert metrics(prefill.url)["headstart_worker_output_tokens_total"] <= 2 * fleet.num_splits
    assert metrics(prefill.url)["headstart_worker_kv_served_bytes_total"] > 0
    assert sum(answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers if answer.usage) < 200

    for victim in (prefill, mixed):  # the others compute everything
        asked = bodies(random.Random(victim.name))
        expected, epochs = await fleet.unsplit(asked), known_epochs(fleet)
        answers = await ask_all(fleet.gateway.url, asked, on_tokens=lambda _, victim=victim: victim.kill())
        assert differing(answers, expected) == [], victim.name
        victim.start()
        wait_until(lambda epochs=epochs: len(known_epochs(fleet) - epochs) == len(fleet.gateways))
        fleet.wait_ready()
    fleet.assert_quiet(within_s=HANG_S)


def known_epochs(fleet: SplitCluster) -> set[tuple[str, str]]:
    """Return what each gateway takes for a live worker."""
    return {(gateway.name, worker["epoch"]) for gateway in fleet.gateways for worker in gateway.workers()}


def differing(answers: list[Outcome], expected: list[Outcome]) -> list[str]:
    pairs = enumerate(zip(answers, expected, strict=True))
    return [f"{number}: {got.error} {got.choices}" for number, (got, want) in pairs if not got.same_as(want)]
