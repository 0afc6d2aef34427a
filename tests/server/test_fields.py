"""docs/api.md and the code agree on every field, and the code does what the page promises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from server.api.embeddings import EMBEDDING, EmbeddingRequest
from server.schema.field_table import IGNORED
from server.schema.fields import RequestFields
from server.schema.messages import MESSAGES
from server.schema.requests import (
    CHAT,
    COMPLETION,
    RESPONSES,
    ChatRequest,
    CompletionRequest,
    ResponsesRequest,
)
from tests.server.api.test_embeddings import SIZE, embeds
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import chat, post
from tests.server.test_wrong_bodies import SMALL, error_of

DOCUMENT = Path(__file__).parents[2] / "docs" / "api.md"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(),
    "/v1/completions": {"model": "tiny", "prompt": "x"},
    "/v1/responses": {"model": "tiny", "input": "x"},
    "/v1/embeddings": {"model": "tiny", "input": "x"},
}
REFUSED = {
    "/v1/chat/completions": CHAT.refused,
    "/v1/completions": COMPLETION.refused,
    "/v1/responses": RESPONSES.refused,
    "/v1/embeddings": EMBEDDING.refused,
    "/v1/messages": MESSAGES.refused,
}
KINDS: dict[str, type[RequestFields]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/embeddings": EmbeddingRequest,
}
HINTS: dict[str, Any] = {
    "include": ["reasoning.encrypted_content"],
    "metadata": {"a": "b"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_cache_options": {"mode": "x"},
    "service_tier": "flex",
    "store": True,
    "stream_options": {"include_obfuscation": False},
}
FIELD = re.compile(r"`([a-z0-9_]+)`")


def section(title: str) -> str:
    return DOCUMENT.read_text().split(f"## {title}\n")[1].split("\n## ")[0]


def honoured() -> set[str]:
    rows = [row.split("|")[1] for row in section("Honoured").splitlines() if row.startswith("| `")]
    return set(FIELD.findall(" ".join(rows)))


def hints(path: str) -> set[str]:
    documented = set(FIELD.findall(section("Accepted as hints"))) - {"default", "strict"}
    assert documented <= {field for kind in KINDS.values() for field in kind.__struct_fields__}
    if path != "/v1/responses":  # where stream_options is only a hint
        documented -= honoured()
    return documented & set(KINDS[path].__struct_fields__)


def test_the_document_lists_every_field() -> None:
    refused = {field for refused in REFUSED.values() for field in refused}
    page, _, ignored = DOCUMENT.with_name("api").joinpath("refused.md").read_text().partition("\n## Ignored\n")
    assert set(FIELD.findall(page)) == refused
    assert set(re.findall(r"`([a-z_.]+)`", ignored)) == set(IGNORED)
    for path, kind in KINDS.items():
        fields = set(kind.__struct_fields__)
        assert not fields & set(REFUSED[path])
        assert fields - hints(path) <= honoured()
    assert honoured() <= {field for kind in KINDS.values() for field in kind.__struct_fields__}


@pytest.fixture(autouse=True)
def _embeds(worker: ScriptedWorker, request: pytest.FixtureRequest) -> None:
    """Make the worker of the tests of /v1/embeddings answer with embeddings."""
    if "/v1/embeddings" in request.node.name:
        worker.behave, worker.embedding_size = embeds, SIZE


@pytest.mark.parametrize("path", REFUSED)
async def test_refused_fields_are_named(worker: ScriptedWorker, path: str) -> None:
    body = SMALL[path]
    async with gateway(worker) as target:
        for field in REFUSED[path]:
            status, _, raw = await post(target.url, {**body, field: {"x": 1}}, path)
            error = error_of(raw, path)
            assert (status, error.get("param", field), field in error["message"]) == (400, field, True)
            assert error.get("code", "unsupported_parameter") == "unsupported_parameter"
        assert worker.received == []
        for number in range(3):
            asks_nothing = {
                name: (None, *refusal.neutral)[number]
                for name, refusal in REFUSED[path].items()
                if number <= len(refusal.neutral)
            }
            status, _, raw = await post(target.url, {**body, **asks_nothing}, path)
            assert status == 200, raw


@pytest.mark.parametrize("path", BODIES)
async def test_hints_change_nothing(worker: ScriptedWorker, path: str) -> None:
    async with gateway(worker) as target:
        body = BODIES[path] if path == "/v1/embeddings" else {**BODIES[path], "seed": 1}
        for hint in ({}, *({field: HINTS.get(field, "low")} for field in sorted(hints(path)))):
            status, _, raw = await post(target.url, body | hint, path)
            assert status == 200, (hint, raw)
    first, *others = worker.received
    assert {(other.sampling, tuple(other.prompt_ids)) for other in others} == {
        (first.sampling, tuple(first.prompt_ids))
    }
