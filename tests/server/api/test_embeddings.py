"""/v1/embeddings at the gateway: what reaches the worker, what comes back, and who is refused."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import AsyncIterator
from typing import Any

import pytest
from tokenizers import Tokenizer, processors

from server.api.embeddings import MAX_INPUTS
from tests.server.conftest import bundle_of
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import Die, ScriptedWorker, script_of
from tests.server.test_app import chat, client, post
from worker.common.capabilities import EMBEDDINGS
from worker.wire import Embed, Embedding, End, Finished, Frame, GenerateRequest, SamplingParams, Started

PATH = "/v1/embeddings"
TEXT = "What is the capital of France?"
SIZE = 8


def numbers(request: GenerateRequest) -> list[float]:
    """Return the scripted embedding: multiples of the number of tokens, exact in float32."""
    assert request.embed is not None
    return [len(request.prompt_ids) * (0.5 + i) for i in range(request.embed.dimensions or SIZE)]


async def embeds(request: GenerateRequest) -> AsyncIterator[Frame]:
    yield Started(16)
    yield Embedding(array("f", numbers(request)).tobytes())
    yield Finished(0, "length")
    yield End(0.0, 0.0, 0.0)


@pytest.fixture
def embedder(worker: ScriptedWorker) -> ScriptedWorker:
    worker.embedding_size, worker.behave = SIZE, embeds
    return worker


async def ask(url: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    status, _, raw = await post(url, {"model": "tiny", "input": TEXT, **fields}, PATH)
    return status, json.loads(raw)


async def refused(url: str, **fields: Any) -> tuple[int, str, str | None]:
    """Return status, param and code of an error."""
    status, answer = await ask(url, **fields)
    return status, answer["error"]["param"], answer["error"]["code"]


async def test_the_worker_is_asked_for_an_embedding_and_no_token(
    embedder: ScriptedWorker, raw_tokenizer: Tokenizer
) -> None:
    ids = raw_tokenizer.encode(TEXT).ids
    async with gateway(embedder) as target:
        status, answer = await ask(target.url, user="u", dimensions=3)
    [request] = embedder.received
    assert (request.prompt_ids, request.embed) == (ids, Embed(3))
    assert request.sampling == SamplingParams(max_tokens=0)
    assert status == 200
    assert answer == {
        "object": "list",
        "data": [{"object": "embedding", "index": 0, "embedding": numbers(request)}],
        "model": "tiny",
        "usage": {
            "prompt_tokens": len(ids),
            "total_tokens": len(ids),
            "prompt_tokens_details": {"cached_tokens": 16, "audio_tokens": 0},
        },
    }
    assert target.router.placements[0].calls == ["started 16", "first token", "close"]
    asked = target.router.placements[0].request
    assert asked.needs == {EMBEDDINGS}
    assert str(asked.affinity_key).endswith("/u")


async def test_base64_is_little_endian_float32(embedder: ScriptedWorker) -> None:
    async with gateway(embedder) as target:
        _, plain = await ask(target.url, encoding_format="float")
        _, encoded = await ask(target.url, encoding_format="base64")
    raw = base64.b64decode(encoded["data"][0]["embedding"])
    assert len(raw) == 4 * SIZE
    assert array("f", raw).tolist() == plain["data"][0]["embedding"]


async def test_the_sdk_decodes_what_it_asks_for(embedder: ScriptedWorker) -> None:
    async with gateway(embedder) as target, client(target) as sdk:
        answer = await sdk.embeddings.create(model="tiny", input=[TEXT, "Paris"])
    assert [item.embedding for item in answer.data] == [numbers(request) for request in by_id(embedder)]
    assert answer.usage.total_tokens == sum(len(request.prompt_ids) for request in embedder.received)


def by_id(worker: ScriptedWorker) -> list[GenerateRequest]:
    return sorted(worker.received, key=lambda request: int(request.request_id.rpartition("-")[2]))


@pytest.mark.parametrize("as_ids", [False, True])
async def test_every_input_has_its_place(embedder: ScriptedWorker, raw_tokenizer: Tokenizer, as_ids: bool) -> None:
    """More than are at workers at a time."""
    texts = [TEXT * (1 + i % 7) for i in range(100)]
    ids = [raw_tokenizer.encode(text).ids for text in texts]
    async with gateway(embedder) as target:
        status, answer = await ask(target.url, input=ids if as_ids else texts)
    assert status == 200
    assert [item["index"] for item in answer["data"]] == list(range(100))
    assert [item["embedding"][0] for item in answer["data"]] == [0.5 * len(each) for each in ids]
    assert [request.prompt_ids for request in by_id(embedder)] == ids


async def test_what_is_wrong_is_named(embedder: ScriptedWorker) -> None:
    async with gateway(embedder) as target:
        for value in ("", [], [""], [[]], [1, "x"], {"a": 1}, None, [[-1]]):
            status, param, _ = await refused(target.url, input=value)
            assert (status, param.partition("[")[0]) == (400, "input"), value
        assert await refused(target.url, input=[100_000]) == (400, "input", None)
        assert await refused(target.url, input=["a"] * (MAX_INPUTS + 1)) == (400, "input", None)
        assert await refused(target.url, encoding_format="int8") == (400, "encoding_format", None)
        assert await refused(target.url, dimensions=0) == (400, "dimensions", None)
        assert await refused(target.url, dimensions=SIZE + 1) == (400, "dimensions", None)
        too_long = (400, "input", "context_length_exceeded")
        assert await refused(target.url, input="word " * 3000) == too_long
        assert await refused(target.url, input=["x", [5] * 2049]) == too_long
        assert await refused(target.url, model="none") == (404, "model", "model_not_found")
        assert embedder.received == []
        assert (await ask(target.url, input=[5] * 2048, dimensions=SIZE))[0] == 200


async def test_a_model_that_generates_is_refused_by_name(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        assert await refused(target.url) == (400, "model", None)
    assert worker.received == []


async def test_an_embedding_model_generates_nothing(embedder: ScriptedWorker) -> None:
    bodies = {
        "/v1/chat/completions": chat(),
        "/v1/completions": {"model": "tiny", "prompt": "x"},
        "/v1/responses": {"model": "tiny", "input": "x"},
    }
    async with gateway(embedder) as target:
        for path, body in bodies.items():
            status, _, raw = await post(target.url, body, path)
            error = json.loads(raw)["error"]
            assert (status, error["param"]) == (400, "model"), path
            assert PATH in error["message"]
    assert embedder.received == []


async def test_a_lost_worker_is_replaced(embedder: ScriptedWorker, bundle: Any) -> None:
    spare = ScriptedWorker(bundle, worker_id="w1", behave=embeds, embedding_size=SIZE)
    embedder.behave = script_of(Started(0), then=Die())
    async with gateway(embedder, spare) as target:
        status, answer = await ask(target.url)
    assert (len(embedder.received), len(spare.received)) == (1, 1)
    assert (status, answer["data"][0]["embedding"]) == (200, numbers(spare.received[0]))


@pytest.mark.parametrize(
    "vector", [b"1234567", *(pytest.param(each, marks=pytest.mark.e2e) for each in (None, b"", bytes(4 * SIZE + 4)))]
)
async def test_an_answer_without_a_sound_embedding_is_none(embedder: ScriptedWorker, vector: bytes | None) -> None:
    embedding = [] if vector is None else [Embedding(vector)]
    embedder.behave = script_of(Started(0), *embedding, Finished(0, "length"), End(0.0, 0.0, 0.0))
    async with gateway(embedder) as target:
        status, answer = await ask(target.url)
    assert (status, answer["error"]["code"]) == (503, "worker_lost")


async def test_a_text_gets_the_tokens_that_its_tokenizer_puts_around(raw_tokenizer: Tokenizer) -> None:
    """Ids are taken as they are."""
    tokenizer = Tokenizer.from_str(raw_tokenizer.to_str())
    special = [("<|im_start|>", 1), ("<|endoftext|>", 0)]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|endoftext|> <|endoftext|>", special_tokens=special
    )
    worker = ScriptedWorker(bundle_of(tokenizer, max_model_len=64), behave=embeds, embedding_size=SIZE)
    ids = raw_tokenizer.encode(TEXT).ids
    async with gateway(worker) as target:
        for value in (TEXT, [TEXT], ids):
            assert (await ask(target.url, input=value))[0] == 200
        assert [request.prompt_ids for request in worker.received] == [tokenizer.encode(TEXT).ids] * 2 + [ids]
        assert tokenizer.encode(TEXT).ids == [1, *ids, 0, 0]
        for adds, expected in ((None, [1, *ids, 0, 0]), (False, ids)):
            _, _, raw = await post(target.url, {"prompt": TEXT, "add_special_tokens": adds}, "/tokenize")
            assert json.loads(raw)["tokens"] == expected
        (letter,) = raw_tokenizer.encode("Q").ids
        assert (await ask(target.url, input=[letter] * 64))[0] == 200
        text = raw_tokenizer.decode([letter] * 62)
        assert len(raw_tokenizer.encode(text).ids) == 62
        assert await refused(target.url, input=text) == (400, "input", "context_length_exceeded")
