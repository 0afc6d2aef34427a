"""docs/api.md and the code say the same of every field, and the code does what it says."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from server.api.responses.types import ResponsesRequest
from server.schema.fields import ModelFields
from server.schema.types import ChatRequest, CompletionRequest
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import chat, post
from worker.wire import TokenizerBundle

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
ROUTES: list[tuple[str, type[ModelFields], dict[str, Any]]] = [
    ("/v1/chat/completions", ChatRequest, chat()),
    ("/v1/completions", CompletionRequest, {"model": "tiny", "prompt": "x"}),
    ("/v1/responses", ResponsesRequest, {"model": "tiny", "input": "x"}),
]
HINTS: dict[str, Any] = {
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_options": {"mode": "x"},
    "service_tier": "flex",
    "store": True,
    "stream_options": {"include_obfuscation": False},
}
FIELD = re.compile(r"`([a-z_]+)`")


@pytest.fixture
def worker(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> ScriptedWorker:
    return ScriptedWorker(bundle, reply=raw_tokenizer.encode("Paris").ids)


def section(title: str) -> str:
    return DOCUMENT.read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def test_the_document_lists_every_field() -> None:
    kinds = [kind for _, kind, _ in ROUTES]
    refused = {field for kind in kinds for field in kind.refused}
    hints = {field for kind in kinds for field in kind.hints}
    honoured = {
        field
        for kind in kinds
        for field in kind.__struct_fields__
        if field not in kind.refused and field not in kind.hints
    }
    rows = [row.split("|")[1] for row in section("Honoured").splitlines() if row.startswith("| `")]
    assert set(FIELD.findall(" ".join(rows))) == honoured
    assert set(FIELD.findall(section("Accepted as hints"))) - {"default", "strict"} == hints
    assert set(FIELD.findall(section("Refused"))) - {"false", "structured_outputs", "tools"} == refused


@pytest.mark.parametrize("kind", [kind for _, kind, _ in ROUTES])
def test_every_refused_field_and_hint_is_a_field(kind: type[ModelFields]) -> None:
    assert set(kind.refused) | kind.hints <= set(kind.__struct_fields__)


@pytest.mark.parametrize(("path", "kind", "body"), ROUTES)
async def test_refused_fields_are_named(
    worker: ScriptedWorker, path: str, kind: type[ModelFields], body: dict[str, Any]
) -> None:
    async with gateway(worker) as target:
        for field in kind.refused:
            status, _, raw = await post(target.url, {**body, field: {"x": 1}}, path)
            error = json.loads(raw)["error"]
            assert (status, error["param"], error["code"]) == (400, field, "unsupported_parameter")
            assert set(error) == {"message", "type", "param", "code"}
    assert worker.received == []


@pytest.mark.parametrize(("path", "kind", "body"), ROUTES)
async def test_hints_change_nothing(
    worker: ScriptedWorker, path: str, kind: type[ModelFields], body: dict[str, Any]
) -> None:
    async with gateway(worker) as target:
        for field in sorted(kind.hints):
            status, _, raw = await post(target.url, {**body, "seed": 1, field: HINTS.get(field, "low")}, path)
            assert status == 200, (field, raw)
    first, *others = worker.received
    assert {(other.sampling, tuple(other.prompt_ids)) for other in others} == {
        (first.sampling, tuple(first.prompt_ids))
    }


async def test_stored_objects_are_not_kept(worker: ScriptedWorker) -> None:
    import aiohttp

    async with gateway(worker) as target, aiohttp.ClientSession() as session:
        for method, path, status in (
            ("GET", "/v1/responses/resp_1", 404),
            ("DELETE", "/v1/responses/resp_1", 404),
            ("POST", "/v1/responses/resp_1/cancel", 404),
            ("GET", "/v1/responses/resp_1/input_items", 404),
            ("GET", "/v1/chat/completions/chatcmpl-1", 404),
            ("DELETE", "/v1/chat/completions/chatcmpl-1", 404),
            ("DELETE", "/v1/models/tiny", 405),
            ("POST", "/v1/embeddings", 404),
            ("POST", "/v1/images/generations", 404),
        ):
            async with session.request(method, target.url + path) as response:
                error = (await response.json())["error"]
                assert (response.status, set(error)) == (status, {"message", "type", "param", "code"}), path
                assert status == 405 or "/v1/chat/completions" in error["message"]
