"""Fake engines behind adapters behind a gateway, all real processes: what is promised is there, whatever dies."""

from __future__ import annotations

import itertools
import json
import secrets
from collections.abc import Iterator
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from server.auth.identity import digest_text
from tests.e2e.engine_fleet import EngineFleet, FakeEngine
from tests.faults.part import get, metrics
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.e2e
MODEL = "tiny"
LORAS = ("--lora", "pirate", "--lora", "lawyer")
NUM_PROMPT_TOKENS = 330
"""Ten blocks of an engine, and a rest."""
KEY, OTHER_KEY, PIRATE_KEY = (f"sk-{secrets.token_hex(16)}" for _ in range(3))
_numbers = itertools.count(1)


@pytest.fixture(scope="module")
def fleet(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineFleet]:
    """An engine of two ranks with a key, and one of one rank without.

    Three API keys: of one tenant, of another, and of the first for only one LoRA adapter.
    """
    folder = tmp_path_factory.mktemp("engines")
    keys = {
        KEY: 'tenant = "first"',
        OTHER_KEY: 'tenant = "second"',
        PIRATE_KEY: 'tenant = "first"\nmodels = ["pirate"]',
    }
    entries = [f'[[keys]]\ndigest = "{digest_text(key.encode())}"\n{fields}\n' for key, fields in keys.items()]
    (folder / "keys.toml").write_text("\n".join(entries))
    fleet = EngineFleet(folder, "--api-keys", str(folder / "keys.toml"))
    fleet.headers = bearer(KEY)
    fleet.add_engine("ranks", tiny_model, "--api-key", "sk-secret", "--token-s", "0.003", *LORAS, num_ranks=2)
    fleet.add_engine("single", tiny_model, "--token-s", "0.003", *LORAS)
    with fleet:
        yield fleet


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def new_prompt(num_tokens: int = NUM_PROMPT_TOKENS) -> list[int]:
    """A prompt that shares nothing with any other."""
    start = next(_numbers)
    return [1000 + (start * 7919 + 31 * position) % 20_000 for position in range(num_tokens)]


def completion(prompt: list[int], **fields: Any) -> dict[str, Any]:
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    return body | {"return_token_ids": True} | fields


class Answer:
    """One completion: who gave it, what the header promised, what the usage counts."""

    def __init__(self, worker: str, promised: int, found: int, token_ids: list[int]) -> None:
        self.worker, self.promised, self.found, self.token_ids = worker, promised, found, token_ids


def stream(fleet: EngineFleet, body: dict[str, Any], key: str = KEY) -> AbstractContextManager[httpx.Response]:
    return httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, headers=bearer(key), timeout=HANG_S)


def ask(fleet: EngineFleet, body: dict[str, Any], key: str = KEY) -> Answer:
    """Stream, so that the header has the promise from before the engine's own lookup."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with stream(fleet, body | options, key) as response:
        assert response.status_code == 200, response.read()
        token_ids: list[int] = []
        found = -1
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                token_ids += choice.get("token_ids") or []
            if event.get("usage"):
                found = event["usage"]["prompt_tokens_details"]["cached_tokens"]
        headers = response.headers
    return Answer(headers["x-headstart-worker"], int(headers["x-headstart-cached-tokens"]), found, token_ids)


def promising(fleet: EngineFleet, prompt: list[int], num_tokens: int = 320) -> set[str]:
    """Return the workers of which the index promises that part of the prompt. Sends nothing to an engine."""
    url = f"{fleet.gateway.ops_url}/route/explain?tenant=first"
    answer = httpx.post(url, json=completion(prompt), timeout=HANG_S)
    return {view["worker"] for view in answer.json()["workers"] if view["index_tokens"] == num_tokens}


def promises(fleet: EngineFleet, worker: str, prompt: list[int], num_tokens: int) -> bool:
    """Return whether the index promises that part of the prompt at this worker, and at no other."""
    return promising(fleet, prompt, num_tokens) == {worker}


def test_chat_and_completions(fleet: EngineFleet) -> None:
    messages = [{"role": "user", "content": "Tell me of dragons."}]
    body = {"model": MODEL, "messages": messages, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    whole = fleet.post(body, "/v1/chat/completions")
    assert whole.status_code == 200, whole.text
    text = whole.json()["choices"][0]["message"]["content"]
    assert text
    streamed = fleet.post(body | {"stream": True}, "/v1/chat/completions").text
    parts = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    assert "".join(part["choices"][0]["delta"].get("content") or "" for part in parts) == text
    plain = fleet.post(completion(new_prompt(20), n=3, temperature=1.0, seed=5))
    assert plain.status_code == 200, plain.text
    assert len({tuple(choice["token_ids"]) for choice in plain.json()["choices"]}) == 3
    several = fleet.post(completion(new_prompt(20), n=200, max_tokens=1))
    assert len(several.json()["choices"]) == 200, "as many as the engine takes"


def test_four_turns_stay_on_one_engine(fleet: EngineFleet) -> None:
    """They find all the blocks that were promised."""
    prompt, workers, promised = new_prompt(), set(), []
    for _ in range(4):
        before = sum(engine.num_cached_tokens() for engine in fleet.engines.values())
        answer = ask(fleet, completion(prompt, max_tokens=40))
        by_engines = sum(engine.num_cached_tokens() for engine in fleet.engines.values()) - before
        assert answer.promised == answer.found == by_engines
        workers.add(answer.worker)
        promised.append(answer.promised)
        prompt = [*prompt, *answer.token_ids]
        num_whole = (len(prompt) - 1) // 32 * 32  # the engine has not computed the last token
        wait_until(partial(promises, fleet, answer.worker, prompt, num_whole))
        prompt = [*prompt, *new_prompt(60)]
    assert len(workers) == 1
    assert promised == [0, 352, 448, 544]
    salted = ask(fleet, completion(prompt, cache_salt="other"))
    assert (salted.promised, salted.found) == (0, 0)
    other = ask(fleet, completion(prompt), OTHER_KEY)
    assert (other.promised, other.found) == (0, 0), "another tenant's"


def models(fleet: EngineFleet, key: str) -> dict[str, str | None]:
    """Return each listed model's parent."""
    listed = httpx.get(f"{fleet.url}/v1/models", headers=bearer(key), timeout=HANG_S).json()["data"]
    return {card["id"]: card["parent"] for card in listed}


def test_a_key_for_one_adapter(fleet: EngineFleet) -> None:
    assert models(fleet, PIRATE_KEY) == {"pirate": MODEL}
    for model, status in (("pirate", 200), (MODEL, 403), ("lawyer", 403)):
        answer = httpx.post(
            f"{fleet.url}/v1/completions",
            json=completion(new_prompt(), model=model),
            headers=bearer(PIRATE_KEY),
            timeout=HANG_S,
        )
        assert answer.status_code == status, answer.text


def test_adapters_of_the_model(fleet: EngineFleet) -> None:
    assert models(fleet, KEY) == {MODEL: None, "lawyer": MODEL, "pirate": MODEL}
    prompt = new_prompt()
    ask(fleet, completion(prompt))
    assert ask(fleet, completion(prompt, model="pirate")).found == 0, "shares nothing with the model"
    assert ask(fleet, completion(prompt, model="lawyer")).found == 0
    wait_until(lambda: ask(fleet, completion(prompt, model="pirate")).promised == 320)
    assert fleet.post(completion(prompt, model="sailor")).status_code == 404


def test_an_engine_that_dies_in_mid_stream(fleet: EngineFleet) -> None:
    """Its stream goes on at the other engine. Its blocks are promised no longer, also after its return."""
    prompt = new_prompt()
    expected = ask(fleet, completion(prompt, max_tokens=400))
    wait_until(lambda: expected.worker in promising(fleet, prompt))
    body = completion(prompt, max_tokens=400, stream=True)
    with stream(fleet, body) as response:
        engine = fleet.engine_of(response.headers["x-headstart-worker"])
        token_ids: list[int] = []
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line[6:])
                assert "error" not in event, event
                token_ids += [id_ for choice in event["choices"] for id_ in choice.get("token_ids") or []]
                # A slow machine gets several tokens in one event, so no number of them is sure to be seen.
                if len(token_ids) >= 20 and engine.poll() is None:
                    engine.kill()
    assert engine.poll() is not None
    assert token_ids == expected.token_ids
    names = {adapter.name for adapter in engine.adapters}
    wait_until(lambda: all(is_draining(fleet, name) for name in names))
    other = ask(fleet, completion(prompt))
    assert other.worker not in names
    restart(fleet, engine)
    for adapter in engine.adapters:
        assert fleet.num_held(adapter) == 0


def is_draining(fleet: EngineFleet, name: str) -> bool:
    try:
        return not get(f"{fleet.adapter(name).url}/health/ready")
    except OSError:
        return True


def restart(fleet: EngineFleet, engine: FakeEngine) -> None:
    """Start the engine again. Its adapters end, and their supervisor starts them."""
    engine.start()
    wait_until(lambda: metrics(engine.url))
    for adapter in engine.adapters:
        assert adapter.wait(HANG_S) == 1
        adapter.start()
    wait_until(lambda: not any(is_draining(fleet, adapter.name) for adapter in engine.adapters))
