"""A fleet of one own worker and one other engine under one model's name."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.engine_fleet import EngineFleet
from tests.e2e.serving import SMALL_POOL
from tests.faults.part import ROOT
from tests.waiting import HANG_S

pytestmark = pytest.mark.e2e
SHORT = ("--max-model-len", "512")
"""The suite asks for answers of any length, and a random model writes to the end of its context."""
ALIASES = ("gpt-6-astra", "gpt-3.5-turbo-instruct")
OPENAI_SUITE = ROOT / "tests/third_party/openai_python"


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    aliases = [word for alias in ALIASES for word in ("--alias", f"{alias}=tiny")]
    fleet = EngineFleet(tmp_path_factory.mktemp("mixed"), *aliases)
    fleet.add_engine("other", tiny_model, *SHORT)
    fleet.add_worker("own", "--model", str(tiny_model), "--served-model-name", "tiny", *SHORT, *SMALL_POOL.split())
    with fleet:
        yield fleet


def completion(number: int, **fields: Any) -> dict[str, Any]:
    prompt = [1000 + number * 97 + position for position in range(100)]
    return {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0} | fields


def test_both_are_of_one_model(fleet: EngineFleet) -> None:
    workers = {worker["worker_id"]: worker for worker in fleet.gateway.workers()}
    assert set(workers) == {"own", "other-0"}
    answers = [fleet.post(completion(number)) for number in range(12)]
    assert {answer.status_code for answer in answers} == {200}
    assert {answer.headers["x-headstart-worker"] for answer in answers} == set(workers)


@pytest.mark.parametrize("fields", [{"typical_p": 0.5, "temperature": 1.0}, {"bad_words": ["no"]}])
def test_what_one_lacks_goes_to_the_other(fleet: EngineFleet, fields: dict[str, Any]) -> None:
    for number in range(20, 24):
        answer = fleet.post(completion(number, **fields))
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-headstart-worker"] == "own"


def test_the_openai_suite(fleet: EngineFleet) -> None:
    """The suite of openai-python passes. It gets only the URL of the fleet."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=5", str(OPENAI_SUITE)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HEADSTART_TEST_BASE_URL": f"{fleet.url}/v1"}
    environment.pop("PYTEST_XDIST_WORKER", None)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * HANG_S)
    assert done.returncode == 0, done.stdout[-4000:]
    assert " passed" in done.stdout
