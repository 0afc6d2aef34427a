"""Requests that an engine answers without text: the answer passes, and the tenant's tokens are those it counts."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from cache.records import WorkerMember
from tests.server.gateway_app import RunningGateway, gateway
from tests.server.scripted_worker import Die, ScriptedWorker
from tests.server.test_app import chat, post
from tests.waiting import until
from worker.wire import End, EngineText, Failed, Finished, Frame, GenerateRequest, Started, TokenizerBundle

PATHS = ("/rerank", "/score", "/v1/embeddings")
ANSWER = {"id": "score-1", "model": "engine-name", "results": [{"index": 0, "relevance_score": 0.5}]}
BODY = {"model": "tiny", "query": "cats", "documents": ["a dog", "a cat"], "top_n": 1, "cache_salt": "mine"}


@dataclass(eq=False)
class PoolingWorker(ScriptedWorker):
    """An adapter whose engine ranks and embeds."""

    dies: bool = False
    num_together: int = 1
    """It answers when that many requests have come."""
    refusal: Failed | None = None
    asked: list[GenerateRequest] = field(default_factory=list)

    def member(self) -> WorkerMember:
        return replace(super().member(), capabilities=PATHS)

    async def answer(self, request: GenerateRequest) -> AsyncIterator[Frame]:
        self.asked.append(request)
        yield Started(0)
        if self.dies:
            raise Die
        if self.refusal is not None:
            yield self.refusal
            return
        await until(lambda: len(self.asked) >= self.num_together)
        yield EngineText(json.dumps(ANSWER | {"usage": {"prompt_tokens": 9, "total_tokens": 9}}).encode())
        yield Finished(0, "stop")
        yield End(0.0, 0.0, 0.0)


@asynccontextmanager
async def pooling_gateway(*workers: PoolingWorker, **options: Any) -> AsyncIterator[RunningGateway]:
    async with gateway(*workers, **options) as target:
        await until(lambda: target.models.has_engine_text)
        yield target


@pytest.fixture
def engines(bundle: TokenizerBundle) -> list[PoolingWorker]:
    return [PoolingWorker(bundle, f"w{number}") for number in range(2)]


async def ask(target: RunningGateway, path: str, body: object) -> tuple[int, dict[str, Any]]:
    status, _, raw = await post(target.url, body, path)
    return status, json.loads(raw)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_an_answer_passes_under_the_asked_name(engines: list[PoolingWorker], path: str) -> None:
    async with pooling_gateway(engines[0]) as target:
        status, answer = await ask(target, path, BODY)
    assert answer.pop("id").startswith("pool-")
    rest = {name: value for name, value in ANSWER.items() if name != "id"}
    assert (status, answer) == (200, rest | {"model": "tiny", "usage": {"prompt_tokens": 9, "total_tokens": 9}})
    [request] = engines[0].asked
    assert request.call is not None
    assert request.call.path == "/rerank"
    assert json.loads(request.call.body) == {name: BODY[name] for name in BODY if name != "model"}
    assert (list(request.prompt_ids), request.call.streams) == ([], False)


async def test_the_engines_count_of_tokens_is_the_tenants(engines: list[PoolingWorker]) -> None:
    async with pooling_gateway(engines[0]) as target:
        await ask(target, "/score", {"model": "tiny", "text_1": "a", "text_2": "b"})
        counted = target.metrics.registry.get_sample_value
        for name in ("prompt_tokens_total", "request_prompt_tokens_sum"):
            assert counted(f"vllm:{name}", {"model_name": "tiny"}) == 9


async def test_a_tenants_requests_wait_side_by_side(engines: list[PoolingWorker]) -> None:
    """Their tokens are not counted yet: an estimate counts among those that wait."""
    engines[0].num_together = 3
    async with pooling_gateway(engines[0]) as target:
        answers = await asyncio.gather(*(ask(target, "/rerank", BODY) for _ in range(3)))
        assert target.queue.num_tokens == 0
    assert [status for status, _ in answers] == [200] * 3


async def test_a_lost_engine_is_replaced(engines: list[PoolingWorker]) -> None:
    engines[0].dies = True
    async with pooling_gateway(*engines) as target:
        for _ in range(3):
            assert (await ask(target, "/rerank", BODY))[0] == 200


async def test_refusals(engines: list[PoolingWorker]) -> None:
    engines[0].refusal = Failed("invalid_request", "documents: too many", retryable=False)
    async with pooling_gateway(engines[0]) as target:
        for path, body, status, words in (
            ("/rerank", BODY, 400, "documents: too many"),
            ("/classify", {"model": "tiny", "input": "a"}, 400, "not served at this route"),
            ("/rerank", BODY | {"model": "other"}, 404, "does not exist"),
            ("/v1/embeddings", {"model": "tiny", "input": "a", "encoding_format": "bytes"}, 400, "encoding_format"),
            ("/v1/chat/completions", chat(), 400, "generates no text: use /rerank, /score, /v1/embeddings"),
        ):
            found, answer = await ask(target, path, body)
            assert (found, words in answer["error"]["message"]) == (status, True), answer


@pytest.mark.parametrize(
    ("path", "field", "param"),
    [
        ("/rerank", "query", "query.content[0]"),
        ("/v2/rerank", "documents", "documents[1].content[0]"),
        ("/score", "text_2", "text_2[1].content[0]"),
        ("/score", "data_1", "data_1.content[0]"),
        ("/score", "items", "items[1].content[0]"),
    ],
)
async def test_no_engine_fetches_images_to_rank(
    engines: list[PoolingWorker], path: str, field: str, param: str
) -> None:
    """An engine would fetch them from any host."""
    part = {"type": "image_url", "image_url": {"url": "http://10.0.0.1/admin"}}
    value: Any = {"content": [part]}
    value = ["a", value] if "[1]" in param else value
    async with pooling_gateway(engines[0]) as target:
        status, answer = await ask(target, path, {"model": "tiny", "query": "a", "documents": ["b"], field: value})
    assert (status, answer["error"]["param"], engines[0].asked) == (400, param, [])


async def test_models_of_other_workers_have_no_such_route(bundle: TokenizerBundle) -> None:
    async with gateway(ScriptedWorker(bundle, "w0")) as target:
        status, answer = await ask(target, "/rerank", BODY)
    needed = "an engine with a model for it is needed"
    assert (status, answer["error"]["message"]) == (400, f"The model 'tiny' is not served at this route: {needed}.")
