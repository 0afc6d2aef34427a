"""A fleet of one own worker and one other engine under one model's name: one side serves."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.e2e.engine_fleet import EngineFleet
from tests.e2e.serving import SMALL_POOL
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.e2e
SHORT = ("--max-model-len", "512")
ALIASES = ("gpt-6-astra", "gpt-3.5-turbo-instruct")


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


def test_they_do_not_share_requests(fleet: EngineFleet) -> None:
    """The revision whose worker started last serves: the first that was ready serves until both are learnt."""

    def states() -> list[str]:
        workers = sorted(fleet.gateway.workers(), key=lambda worker: worker["epoch_started_ms"])
        assert {worker["worker_id"] for worker in workers} == {"own", "other-0"}
        return [worker["state"] for worker in workers]

    wait_until(lambda: states() == ["standby", "serving"])
    answers = [fleet.post(completion(number)) for number in range(12)]
    assert {answer.status_code for answer in answers} == {200}
    assert len({answer.headers["x-headstart-worker"] for answer in answers}) == 1


def test_the_sdk_of_openai_gets_answers(fleet: EngineFleet) -> None:
    """Models, chats and completions, plain and streamed, by their own names and by aliases."""
    client = OpenAI(base_url=f"{fleet.url}/v1", api_key="unused", max_retries=0, timeout=HANG_S)
    assert {"tiny", *ALIASES} <= {model.id for model in client.models.list()}
    assert client.models.retrieve("tiny").id == "tiny"
    for number in range(12):
        asked: Any = {"model": ("tiny", *ALIASES)[number % 3], "max_tokens": 4, "extra_body": {"ignore_eos": True}}
        messages: Any = [{"role": "user", "content": f"Number {number * 97}"}]
        chat = client.chat.completions.create(messages=messages, **asked)
        assert (chat.choices[0].finish_reason, chat.usage and chat.usage.completion_tokens) == ("length", 4)
        *_, last = client.chat.completions.create(messages=messages, stream=True, **asked)
        assert last.choices[0].finish_reason == "length"
        raw = client.completions.with_raw_response.create(prompt=completion(number)["prompt"], **asked)
        assert raw.headers["x-headstart-worker"] in ("own", "other-0")
        assert raw.parse().choices[0].finish_reason == "length"
        *_, end = client.completions.create(prompt=f"Number {number}", stream=True, **asked)
        assert end.choices[0].finish_reason == "length"
