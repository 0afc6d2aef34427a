"""Another revision is rolled out over two real engines under load, and back: no request fails."""

from __future__ import annotations

import json
import shutil
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import httpx

from tests.server.sse_grammar import events
from tests.vllm.engines import MODEL, write_model
from tests.vllm.fleet import LONG_S, VllmFleet
from tests.waiting import wait_until

NUM_CLIENTS: Final = 4
NUM_BETWEEN: Final = 4 * NUM_CLIENTS
"""Requests before and after each step."""


class Clients:
    """Ask for chats and completions, streamed and not, until the block ends."""

    def __init__(self, fleet: VllmFleet) -> None:
        self._fleet = fleet
        self._stopping = threading.Event()
        self.outcomes: Counter[str] = Counter()
        self._pool = ThreadPoolExecutor(NUM_CLIENTS)

    def __enter__(self) -> Clients:
        self._asking = [self._pool.submit(self._ask, number) for number in range(NUM_CLIENTS)]
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._pool.shutdown()
        for each in self._asking:
            each.result()

    def wait(self) -> None:
        """Wait for some more answers."""
        most = self.outcomes.total() + NUM_BETWEEN
        wait_until(lambda: self.outcomes.total() >= most, LONG_S, "answers during a rollout")

    def _ask(self, number: int) -> None:
        turn = 0
        with httpx.Client(base_url=self._fleet.gateway.url, headers=self._fleet.headers("red"), timeout=LONG_S) as http:
            while not self._stopping.is_set():
                turn += 1
                text = f"client {number} asks for the {turn}th time " * (1 + turn % 5)
                is_chat, streams = bool(turn % 3), bool((turn + number) % 2)
                body: dict[str, Any] = {"model": MODEL, "max_tokens": 24, "stream": streams, "ignore_eos": True}
                body |= {"messages": [{"role": "user", "content": text}]} if is_chat else {"prompt": text}
                answer = http.post("/v1/chat/completions" if is_chat else "/v1/completions", json=body)
                self.outcomes[outcome_of(answer)] += 1


def outcome_of(answer: httpx.Response) -> str:
    if answer.status_code != 200 or not answer.content.startswith(b"data:"):
        return "ok" if answer.status_code == 200 else answer.text
    *chunks, last = events(answer.content)
    errors = [json.dumps(chunk["error"]) for chunk in chunks if "error" in chunk]
    return errors[0] if errors else "ok" if last == "[DONE]" else f"ends with {last}"


def other_revision(folder: Path) -> Path:
    """Return the model with another template."""
    model = write_model()
    folder.mkdir()
    for file in model.iterdir():
        (folder / file.name).symlink_to(file)
    config = folder / "tokenizer_config.json"
    config.unlink()
    shutil.copy(model / config.name, config)
    content = json.loads(config.read_text())
    content["chat_template"] = "Answer briefly. " + content["chat_template"]
    config.write_text(json.dumps(content))
    return folder


def test_a_rollout_and_back(fleet: VllmFleet, tmp_path: Path) -> None:
    with Clients(fleet) as clients:
        clients.wait()
        for model in (other_revision(tmp_path / "next"), write_model()):
            for engine, adapter in reversed([*zip(fleet.engines, fleet.adapters, strict=True)]):
                adapter.send(signal.SIGTERM)
                wait_until(lambda adapter=adapter: adapter.poll() is not None, LONG_S)  # type: ignore[misc]
                clients.wait()
                engine.stop()
                engine.options = replace(engine.options, model=model)
                engine.start()
                engine.wait_ready()
                adapter.start()
                fleet.wait_ready()
                clients.wait()
    print(dict(clients.outcomes))
    assert clients.outcomes.keys() == {"ok"}
