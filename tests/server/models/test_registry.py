"""A bundle that cannot be used affects only its worker: the models of others are learnt."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest

from cache.records import WorkerMember
from server.config import GatewayConfig
from server.errors import NotFoundError, UnavailableError
from server.models import registry as registry
from server.models.registry import Models
from server.workers.connection import WorkerError
from tests.members import make_member
from tests.server.scripted_worker import ScriptedWorker
from tests.waiting import until
from worker.wire import TokenizerBundle


def fingerprint(bundle: TokenizerBundle) -> str:
    try:
        return bundle.namespace.fingerprint
    except (ValueError, OverflowError):
        return "n"


class Client:
    """Gives each worker's bundle."""

    def __init__(self, bundles: dict[str, TokenizerBundle]) -> None:
        self.bundles = bundles

    async def bundle(self, url: str) -> TokenizerBundle:
        return self.bundles[url]


@contextmanager
def models_of(client: Any) -> Iterator[Models]:
    with ThreadPoolExecutor(1) as executor:
        yield Models(client, executor, GatewayConfig(workers=("http://127.0.0.1:9",)), lambda name: name == "loading")


@asynccontextmanager
async def following(client: Any, members: list[WorkerMember]) -> AsyncIterator[Models]:
    """Models that are learnt from these workers while this context is open."""
    with models_of(client) as models:
        task = asyncio.create_task(models.follow(lambda: [(member, True) for member in members], 0.0))
        yield models
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


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
        make_member("odd", model="odd", namespace=fingerprint(strange)),
        make_member("good", model=bundle.model, namespace=fingerprint(bundle)),
    ]
    with models_of(client) as models:
        for member in members:
            await models.admit(member)
    assert [name for name, _ in models.names()] == [bundle.model]


@pytest.mark.parametrize(
    ("num_dripping", "others"),
    [
        (1, [("slow", "another")]),
        (1, [("slow", "tiny")]),
        (3, [("slow1", "tiny"), ("slow2", "x"), ("slow3", "y")]),
        (0, [(f"slow{number}", f"m{number}") for number in range(20)]),
    ],
)
async def test_workers_that_drip_their_bundles_delay_no_other(
    bundle: TokenizerBundle, num_dripping: int, others: list[tuple[str, str]]
) -> None:
    """They may be of the same model. Those that have failed are asked again after those that have not."""
    asked: list[str] = []

    class Client:
        async def bundle(self, url: str) -> TokenizerBundle:
            asked.append(url)
            if "slow" not in url:
                return bundle
            if len(asked) <= num_dripping:
                await asyncio.Event().wait()
            raise WorkerError("it has dripped for too long")

    good = replace(ScriptedWorker(bundle).member(), url="http://good")
    assert good.model == "tiny"
    members = [replace(good, url=f"http://{name}", model=model) for name, model in others] + [good]
    async with following(Client(), members) as models:
        await until(lambda: [name for name, _ in models.names()] == ["tiny"])


async def test_few_bundles_are_fetched_at_a_time_and_one_of_a_model(bundle: TokenizerBundle) -> None:
    open_now: Counter[str] = Counter()
    seen: list[tuple[int, int]] = []

    class Client:
        async def bundle(self, url: str) -> TokenizerBundle:
            model = url.partition("//")[2].partition(".")[0]
            open_now[model] += 1
            seen.append((open_now.total(), max(open_now.values())))
            await asyncio.sleep(0.01)
            open_now[model] -= 1
            raise WorkerError("no")

    good = ScriptedWorker(bundle).member()
    members = [replace(good, url=f"http://m{n % 9}.{n}", model=f"m{n % 9}") for n in range(50)]
    async with following(Client(), members):
        await until(lambda: len(seen) == len(members))
    assert max(seen)[0] == registry.MAX_LEARNING
    assert max(num for _, num in seen) <= registry.MAX_LEARNING_OF_ONE


async def test_failed_bundles_are_forgotten(bundle: TokenizerBundle, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each restart is a new epoch, and a fleet may restart for weeks."""
    now_s = 1000.0
    monkeypatch.setattr(registry.time, "monotonic", lambda: now_s)
    asked: list[str] = []

    class Client:
        async def bundle(self, url: str) -> Any:
            asked.append(url)
            raise WorkerError("no")

    member = ScriptedWorker(bundle).member()
    with models_of(Client()) as models:
        for number in range(200):
            now_s += 1.0
            assert await models.admit(replace(member, epoch=f"e{number}")) is None
            assert await models.admit(replace(member, epoch=f"e{number}")) is None
    assert len(asked) == 200, "it is asked again too soon"
    assert len(models._failed) <= 10


def test_a_refusal_of_a_name_lists_the_models_there_are() -> None:
    with models_of(Client({})) as models:
        for name, error in (("loading", UnavailableError), ("other", NotFoundError)):
            with pytest.raises(error, match=f"'{name}'.*GET /v1/models lists: none"):
                models.get(name)
