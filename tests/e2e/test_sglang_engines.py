"""SGLang's fake behind adapters behind a gateway, all real processes: tenants apart, EAGLE, text by it, no index."""

from __future__ import annotations

import json
import secrets
from pathlib import Path

import httpx
import pytest

from server.auth.identity import digest_text
from tests.e2e.engine_fleet import EngineFleet
from tests.e2e.test_other_engines import MODEL, bearer
from tests.faults.part import get

pytestmark = pytest.mark.e2e
KEY, OTHER_KEY = (f"sk-{secrets.token_hex(16)}" for _ in range(2))


CHAT_BODY = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Tell me of dragons, and of knights. " * 8}],
    "max_tokens": 6,
    "temperature": 0,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("engines")
    entries = [
        f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "{tenant}"\n'
        for key, tenant in ((KEY, "first"), (OTHER_KEY, "second"))
    ]
    (folder / "keys.toml").write_text("\n".join(entries))
    return folder


def fleet_of(model: Path, folder: Path, keys: Path, *options: str) -> EngineFleet:
    fleet = EngineFleet(folder, "--api-keys", str(keys))
    fleet.headers = bearer(KEY)
    fleet.add_sglang("sglang", model, *options)
    return fleet


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
        for _ in range(2):
            answer = fleet.post(CHAT_BODY, "/v1/chat/completions")
            assert answer.status_code == 200, answer.text
            fleet.wait_settled()
        usage = answer.json()["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0, "the engine itself reuses it"
        [worker] = fleet.gateway.workers()
        assert problem in worker["index_problem"]
        [adapter] = fleet.adapters
        assert problem in json.loads(get(f"{adapter.url}/health/ready"))["index"]
        said = adapter.log.read_text()
        assert "no prefix index, requests are routed only by load" in said
        assert problem in said


@pytest.mark.parametrize("streams", [False, True])
def test_the_engine_writes_chats_for_ready_ids(tiny_model: Path, folder: Path, streams: bool) -> None:
    with fleet_of(tiny_model, folder / f"text-{streams}", folder / "keys.toml") as fleet:
        body = CHAT_BODY | {"stream": streams}
        texts = []
        for _ in range(2):
            answer = fleet.post(body, "/v1/chat/completions")
            assert answer.status_code == 200, answer.text
            texts.append(text_of(answer, streams))
            fleet.wait_settled()
        assert texts[0] == texts[1] != ""
        refused = fleet.post(body | {"lora_path": "pirate"}, "/v1/chat/completions")
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_path")
        for path, fields in (
            ("/v1/completions", {"prompt": "a"}),
            ("/v1/messages", {}),
            ("/v1/responses", {"input": "a"}),
        ):
            other = fleet.post(body | fields, path)
            assert (other.status_code, f"not {path}" in other.text) == (400, True), other.text


def text_of(answer: httpx.Response, streams: bool) -> str:
    if not streams:
        return str(answer.json()["choices"][0]["message"]["content"])
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])
