"""SGLang's fake behind adapters behind a gateway, all real processes: tenants apart, EAGLE, text by it, no index."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.auth.identity import digest_text
from tests.e2e.engine_fleet import EngineFleet
from tests.e2e.test_other_engines import MODEL, Answer, ask, bearer, completion, new_prompt
from tests.faults.part import get
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.e2e
KEY, OTHER_KEY = (f"sk-{secrets.token_hex(16)}" for _ in range(2))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    entries = [
        f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "{tenant}"\n'
        for key, tenant in ((KEY, "first"), (OTHER_KEY, "second"))
    ]
    (folder / "keys.toml").write_text("\n".join(entries))
    return folder


@pytest.fixture(scope="module", params=["plain", "eagle"])
def fleet(request: pytest.FixtureRequest, tiny_model: Path, folder: Path) -> Iterator[EngineFleet]:
    options = ["--lora", "pirate", *(["--eagle"] if request.param == "eagle" else [])]
    with fleet_of(tiny_model, folder / request.param, folder / "keys.toml", *options) as fleet:
        yield fleet


def fleet_of(model: Path, folder: Path, keys: Path, *options: str, text: str = "auto") -> EngineFleet:
    fleet = EngineFleet(folder, "--api-keys", str(keys), "--text", text)
    fleet.headers = bearer(KEY)
    fleet.add_sglang("sglang", model, *options)
    return fleet


def is_eagle(fleet: EngineFleet) -> bool:
    return "--eagle" in fleet.engines["sglang"].command


def explained(fleet: EngineFleet, prompt: list[int], tenant: str = "first") -> dict[str, Any]:
    url = f"{fleet.gateway.ops_url}/route/explain?tenant={tenant}"
    [worker] = httpx.post(url, json=completion(prompt), timeout=HANG_S).json()["workers"]
    return dict(worker)


def index_tokens(fleet: EngineFleet, prompt: list[int], tenant: str = "first") -> int:
    return int(explained(fleet, prompt, tenant)["index_tokens"])


def settled(fleet: EngineFleet, prompt: list[int], least: int) -> Answer:
    """Ask as soon as the index has the prompt. The promise is never more than the engine finds."""
    wait_until(lambda: index_tokens(fleet, prompt) >= least)
    answer = ask(fleet, completion(prompt), KEY)
    assert least <= answer.promised <= answer.found
    return answer


def test_four_turns_find_what_is_promised(fleet: EngineFleet) -> None:
    prompt = new_prompt()
    assert ask(fleet, completion(prompt), KEY).promised == 0
    for _ in range(3):
        dropped = 16 if is_eagle(fleet) else 0
        answer = settled(fleet, prompt, (len(prompt) - 1) // 16 * 16 - dropped)
        if not is_eagle(fleet):
            assert answer.promised == answer.found
        prompt = [*prompt, *answer.token_ids, *new_prompt(40)]
        ask(fleet, completion(prompt), KEY)
    assert explained(fleet, prompt)["ends"] == ("exact" if is_eagle(fleet) else "")
    assert explained(fleet, prompt)["index_problem"] == ""


def test_tenants_and_adapters_share_nothing(fleet: EngineFleet) -> None:
    prompt = new_prompt()
    ask(fleet, completion(prompt), KEY)
    settled(fleet, prompt, 304)
    assert index_tokens(fleet, prompt, "second") == 0
    other = ask(fleet, completion(prompt), OTHER_KEY)
    assert (other.promised, other.found) == (0, 0)
    wait_until(lambda: index_tokens(fleet, prompt, "second") >= 304)
    adapted = completion(prompt, model="pirate")
    first = ask(fleet, adapted, KEY)
    assert (first.promised, first.found) == (0, 0)


def test_a_flush_empties_the_index(fleet: EngineFleet) -> None:
    prompt = new_prompt()
    ask(fleet, completion(prompt), KEY)
    settled(fleet, prompt, 304)
    fleet.wait_settled()
    fleet.engines["sglang"].tell("/flush_cache")
    wait_until(lambda: index_tokens(fleet, prompt) == 0)
    assert ask(fleet, completion(prompt), KEY).found == 0


def test_evictions_leave_the_index(fleet: EngineFleet) -> None:
    prompts = [new_prompt() for _ in range(16)]
    """More than the 256 pages of the engine."""
    for prompt in prompts:
        ask(fleet, completion(prompt), KEY)
    wait_until(lambda: index_tokens(fleet, prompts[-1]) >= 304)
    assert index_tokens(fleet, prompts[0]) == 0
    for prompt in prompts:
        answer = ask(fleet, completion(prompt, max_tokens=1), KEY)
        assert answer.promised <= answer.found


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (("--version", "0.5.18", "--layout", "arrays", "--old-paths"), "carry no salt"),
        (("--windows",), "windows or states"),
    ],
)
def test_without_an_index_it_serves_and_says_why(
    tiny_model: Path, folder: Path, options: tuple[str, ...], problem: str
) -> None:
    with fleet_of(tiny_model, folder / options[0].strip("-"), folder / "keys.toml", *options) as fleet:
        prompt = new_prompt()
        for _ in range(2):
            answer = ask(fleet, completion(prompt), KEY)
            assert len(answer.token_ids) == 8
            assert answer.promised == 0
        assert answer.found == 320, "the engine itself reuses it"
        assert problem in explained(fleet, prompt)["index_problem"]
        [adapter] = fleet.adapters
        assert problem in json.loads(get(f"{adapter.url}/health/ready"))["index"]
        said = adapter.log.read_text()
        assert "no prefix index, requests are routed only by load" in said
        assert problem in said


@pytest.mark.parametrize("streams", [False, True])
def test_the_engine_writes_chats_for_ready_ids(tiny_model: Path, folder: Path, streams: bool) -> None:
    with fleet_of(tiny_model, folder / f"text-{streams}", folder / "keys.toml", text="engine") as fleet:
        messages = [{"role": "user", "content": "Tell me of dragons, and of knights. " * 8}]
        body = {"model": MODEL, "messages": messages, "max_tokens": 6, "temperature": 0, "stream": streams}
        texts = []
        for _ in range(2):
            answer = fleet.post(body, "/v1/chat/completions")
            assert answer.status_code == 200, answer.text
            texts.append(text_of(answer, streams))
            fleet.wait_settled()
        assert texts[0] == texts[1] != ""
        refused = fleet.post(body | {"lora_path": "pirate"}, "/v1/chat/completions")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")


def text_of(answer: httpx.Response, streams: bool) -> str:
    if not streams:
        return str(answer.json()["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
