"""A bundle that cannot be used costs its worker alone: the models of others are learnt all the same."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from cache.records import WorkerMember
from cache.types import Epoch, WorkerId
from server import models as models_module
from server.config import GatewayConfig
from server.models import Models, namespace_of
from server.workers.connection import WorkerError
from tests.server.scripted_worker import ScriptedWorker
from worker.wire import PROTOCOL_VERSION, TokenizerBundle


def fingerprint(bundle: TokenizerBundle) -> str:
    try:
        return namespace_of(bundle).fingerprint
    except (ValueError, OverflowError):
        return "n"


class Client:
    """Gives each worker's bundle."""

    def __init__(self, bundles: dict[str, TokenizerBundle]) -> None:
        self.bundles = bundles

    async def bundle(self, url: str) -> TokenizerBundle:
        return self.bundles[url]


@pytest.mark.parametrize(
    "odd",
    [
        {"block_size": 0},
        {"block_size": -3},
        {"max_model_len": 0},
        {"vocab_size": 0},
        {"tokenizer_json": b"[" * 10_000},
        {"tokenizer_json": b"\xff"},
        {"tokenizer_json": b"{}"},
        {"chat_template": "{{"},
        {"revision": "\ud800"},
    ],
)
async def test_an_unusable_bundle_costs_only_its_worker(bundle: TokenizerBundle, odd: dict[str, object]) -> None:
    strange = replace(bundle, model="odd", **odd)  # type: ignore[arg-type]
    client = Client({"http://odd": strange, "http://good": bundle})
    members = [
        WorkerMember(WorkerId(name), Epoch("e"), f"http://{name}", model, namespace, "cpu", 16, 64, PROTOCOL_VERSION)
        for name, model, namespace in (
            ("odd", "odd", fingerprint(strange)),
            ("good", bundle.model, fingerprint(bundle)),
        )
    ]
    with ThreadPoolExecutor(1) as executor:
        models = Models(client, executor, GatewayConfig(workers=("http://127.0.0.1:9",)))  # type: ignore[arg-type]
        for member in members:
            await models.admit(member)
    assert [name for name, _ in models.names()] == [bundle.model]


async def test_failed_bundles_are_forgotten(bundle: TokenizerBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each restart is a new epoch, and a fleet may restart for weeks."""
    now_s = 1000.0
    monkeypatch.setattr(models_module.time, "monotonic", lambda: now_s)
    asked: list[str] = []

    class Client:
        async def bundle(self, url: str) -> Any:
            asked.append(url)
            raise WorkerError("no")

    member = ScriptedWorker(bundle).member()
    with ThreadPoolExecutor(1) as executor:
        models = Models(Client(), executor, GatewayConfig(workers=("http://127.0.0.1:9",)))  # type: ignore[arg-type]
        for number in range(200):
            now_s += 1.0
            assert await models.admit(replace(member, epoch=f"e{number}")) is None
            assert await models.admit(replace(member, epoch=f"e{number}")) is None
    assert len(asked) == 200, "it is asked again too soon"
    assert len(models._failed_until_s) <= 5
