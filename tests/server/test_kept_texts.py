"""Nothing that outlives a request has a text of its client without a bound, whatever fields the client fills."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from typing import Any, Final

import msgspec
import pytest
from tokenizers import Tokenizer

from cache.records import WorkerMember
from server.request.hints import SESSION_HEADERS
from server.router.short_list import ShortList
from server.router.types import MAX_KEY_CHARS, RouteRequest, short_key
from server.schema.fields import RequestFields
from tests.server.api.engine_worker import EngineWorker
from tests.server.api.test_pooling import BODY
from tests.server.gateway_app import gateway
from tests.server.router.test_short_list import fleet
from tests.server.test_app import post
from tests.server.test_field_sweep import BODIES, KINDS
from tests.waiting import until
from worker.wire import TokenizerBundle

LONG: Final = "k" * 200_000
"""Longer than any bound; some fields have one of their own, and refuse it."""
ROUTE_TEXTS: Final = [name for name, kind in RouteRequest.__annotations__.items() if "str" in kind or "Key" in kind]


def texts_of(kind: type[msgspec.Struct]) -> list[str]:
    """Return the fields that take a text, by their types."""
    found = []
    for field in msgspec.inspect.type_info(kind).fields:  # type: ignore[attr-defined]
        kinds = field.type.types if isinstance(field.type, msgspec.inspect.UnionType) else (field.type,)
        if any(isinstance(each, msgspec.inspect.StrType) for each in kinds):
            found.append(field.name)
    return found


def kept(request: RouteRequest) -> int:
    """Return the characters of the longest text that the router gets."""
    texts = [getattr(request, name) for name in ROUTE_TEXTS]
    return max(len(text) for text in texts if isinstance(text, str))


def test_the_router_gets_the_known_texts() -> None:
    """A new one needs a bound: only `short_key` makes a Key."""
    plain = {name for name in ROUTE_TEXTS if "Key" not in str(RouteRequest.__annotations__[name])}
    assert plain == {"request_id", "model", "numerics", "namespace", "needs", "tenant"}, "all are the gateway's"


@pytest.mark.parametrize("text", ["", "k", "k" * MAX_KEY_CHARS, "k" * (MAX_KEY_CHARS + 1), LONG, "\ud800" * 999])
def test_a_short_key_has_a_bound(text: str) -> None:
    assert len(short_key(text)) <= MAX_KEY_CHARS
    assert short_key(text) == short_key(text) != short_key(text + "x")
    assert (short_key(text) == text) == (len(text) <= MAX_KEY_CHARS)


def test_keys_of_a_large_fleet_take_bounded_memory() -> None:
    short_list, candidates = ShortList(0.03, lambda worker_id: 0.0), fleet(65)
    tracemalloc.start()
    try:
        for number in range(50):
            key = short_key(f"{number}{LONG}")
            short_list.choose(RouteRequest("r", "m", 17, [], affinity_key=key), candidates, (), index_answered=False)
        assert tracemalloc.get_traced_memory()[0] < 1 << 20
    finally:
        tracemalloc.stop()


class TextsOfEngines(EngineWorker):
    """A worker whose engine writes the text, and ranks too."""

    def member(self) -> WorkerMember:
        member = super().member()
        return replace(member, capabilities=(*member.capabilities, "/v1/embeddings", "/rerank", "/score"))


@pytest.mark.parametrize("text", ["gateway", "engine"])
async def test_fields_and_headers_of_any_length(bundle: TokenizerBundle, raw_tokenizer: Tokenizer, text: str) -> None:
    """Each field that takes a text, on every route, and each header."""
    worker = TextsOfEngines(bundle, "w0", tokenizer=raw_tokenizer, apis=() if text == "gateway" else None)
    num_sent = 0
    async with gateway(worker) as target:
        await until(lambda: target.models.has_engine_text)
        bodies: dict[str, dict[str, Any]] = {**BODIES, "/rerank": BODY, "/score": {"model": "tiny", "text_1": "a"}}
        for path, body in bodies.items():
            for name in texts_of(KINDS.get(path, RequestFields)):
                if name not in body:
                    num_sent += (await post(target.url, {**body, name: LONG}, path))[0] == 200
            for name in (*SESSION_HEADERS, "x-request-id", "user-agent"):
                num_sent += (await post(target.url, body, path, **{name: "h" * 8000}))[0] == 200
        assert num_sent > 20
        assert target.router.placements
        assert max(kept(placement.request) for placement in target.router.placements) <= MAX_KEY_CHARS
