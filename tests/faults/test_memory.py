"""The memory of a gateway process that gets long texts: those that it keeps, and those that it reads."""

from __future__ import annotations

import io
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import aiohttp
import pytest

from server.api.engine.text import ENGINE_PATHS
from server.request.hints import SESSION_HEADERS
from server.schema.fields import RequestFields
from tests import smollm2
from tests.faults.large_fleet import LARGE, fleet, forget_peak, peak_bytes
from tests.server.conftest import bundle_of
from tests.server.test_app import chat
from tests.server.test_field_sweep import BODIES, KINDS
from tests.server.test_kept_texts import texts_of

MIB: Final = 1 << 20
NUM_REQUESTS: Final = 200
SIZE: Final = 1_000_000
LONG: Final = "LONG"
MAX_HEADER_CHARS: Final = 60_000
"""The head of a request has at most 64 KiB."""
MAX_GROWN_BYTES: Final = 64 * MIB
HEADERS: Final = (*SESSION_HEADERS, "x-request-id", "user-agent", "x-client-request-id", "traceparent")
PROMPTS: Final = ("prompt", "input", "instructions", "system")
"""The router keeps hashes of their blocks, within a bound of its own."""
NESTED: Final[tuple[dict[str, Any], ...]] = (
    {"metadata": {"user_id": LONG}},
    {"metadata": {LONG: "x"}},
    {"tools": [{"type": "function", "function": {"name": LONG, "parameters": {}}}]},
    {"messages": [{"role": "user", "content": "x", "name": LONG}]},
    {"messages": [{"role": "tool", "content": "x", "tool_call_id": LONG}]},
    {"stop": [LONG]},
    {"vllm_xargs": {LONG: 1}},
    {LONG: 1},
)
ROUTES: Final[dict[str, dict[str, Any]]] = {
    **BODIES,
    "/v1/messages/count_tokens": chat(),
    "/tokenize": {"model": "tiny", "prompt": "x"},
    "/detokenize": {"model": "tiny", "tokens": [5]},
    **{path: {"model": "tiny", "input": "x"} for path in ENGINE_PATHS if path not in BODIES},
    **{path: {"model": "tiny", "query": "x", "documents": ["y"]} for path in ENGINE_PATHS if "rerank" in path},
    **{path: {"model": "tiny", "text_1": "x", "text_2": "y"} for path in ENGINE_PATHS if "score" in path},
}

POOLING: Final = ("/v1/embeddings", "/pooling", "/classify", "/rerank", "/score")
GENERATION: Final = [path for path in BODIES if path not in POOLING]


def requests(path: str, size: int) -> Iterator[tuple[bytes, dict[str, str]]]:
    """Yield bodies and headers of one route without end: each has one text of `size` characters, and none is equal."""
    kind: Any = KINDS.get(path, RequestFields)
    fields = [*({name: LONG} for name in texts_of(kind) if name not in PROMPTS), *NESTED]
    plain = json.dumps(ROUTES[path]).encode()
    bodies = [json.dumps({**ROUTES[path], **each}).encode() for each in fields]
    numbers = itertools.count()
    while True:
        for body in bodies:
            yield body.replace(LONG.encode(), b"%09d" % next(numbers) + b"k" * (size - 9)), {}
        for name in HEADERS:
            yield plain, {name: f"{next(numbers):09}" + "k" * (min(size, MAX_HEADER_CHARS) - 9)}


async def ask_all(url: str, size: int, num_requests: int) -> dict[str, Counter[int]]:
    """Send requests to each route; return how many got which status."""
    statuses = {}
    async with aiohttp.ClientSession(headers={"content-type": "application/json"}) as session:
        for path in ROUTES:
            statuses[path] = Counter[int]()
            for body, headers in itertools.islice(requests(path, size), num_requests):
                async with session.post(url + path, data=body, headers=headers) as answer:
                    await answer.read()
                    statuses[path][answer.status] += 1
    return statuses


@pytest.mark.parametrize("text", ["gateway", "engine", "pooling"])
async def test_long_fields_are_not_kept(tmp_path: Path, text: str) -> None:
    """200 requests with texts of 1 MB on every route and header: the router keeps keys in a fleet of that size."""
    bundle = bundle_of(smollm2.tokenizer(), bos_token="<|im_start|>", max_model_len=1 << 20)
    pools = text == "pooling"
    async with fleet(tmp_path, bundle, LARGE, text=text) as gateway:
        await ask_all(gateway.url, 9, NUM_REQUESTS)
        before = gateway.process.memory_info().rss
        statuses = await ask_all(gateway.url, SIZE, NUM_REQUESTS)
        grown = gateway.process.memory_info().rss - before
        for path, counts in statuses.items():
            print(f"{text:8} {path:28} {dict(counts)}")
        print(f"{text}: {before / MIB:.0f} MiB before, {grown / MIB:+.1f} MiB after")
        assert gateway.num_ready() == LARGE
    assert all(status < 500 for counts in statuses.values() for status in counts), statuses
    assert all(statuses[path][200] > NUM_REQUESTS // 10 for path in (POOLING if pools else GENERATION)), statuses
    assert grown <= MAX_GROWN_BYTES


def bodies_of(text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield a text by every route that reads one."""
    messages, hello = [{"role": "user", "content": text}], [{"role": "user", "content": "x"}]
    yield "/v1/chat/completions", {"messages": messages}
    yield "/v1/chat/completions", {"messages": [{"role": "system", "content": text}, *hello]}
    yield "/v1/completions", {"prompt": text}
    yield "/v1/messages", {"messages": messages, "max_tokens": 2}
    yield "/v1/messages", {"system": text, "messages": hello, "max_tokens": 2}
    yield "/v1/messages/count_tokens", {"messages": messages}
    yield "/v1/responses", {"input": text}
    yield "/v1/responses", {"input": "x", "instructions": text}
    yield "/tokenize", {"prompt": text}
    yield "/tokenize", {"messages": messages}


@pytest.mark.parametrize("unit", ["<", "<|", "<|x|>", "<|im_", "<|im_end|>"])
async def test_texts_like_control_tokens_take_twice_the_body(tmp_path: Path, unit: str) -> None:
    """8 MB of them, for a model of a million tokens: at most twice the body and 64 MB at any time."""
    bundle = bundle_of(smollm2.tokenizer(), bos_token="<|im_start|>", max_model_len=1 << 20)
    text, above = unit * (8 * MIB // len(unit)), []
    session = aiohttp.ClientSession(headers={"content-type": "application/json"})
    async with fleet(tmp_path, bundle, 1) as gateway, session as http:
        for path, fields in [*bodies_of("hello"), *bodies_of(text)]:
            body = json.dumps({"model": "tiny", **fields}).encode()
            before = gateway.process.memory_info().rss
            forget_peak(gateway)
            async with http.post(gateway.url + path, data=io.BytesIO(body)) as answer:
                await answer.read()
            grown = peak_bytes(gateway) - before
            print(f"{unit:10} {path:28} {'/'.join(fields):24} {answer.status} {grown / MIB:+7.1f} MiB")
            if grown > 2 * len(body) + MAX_GROWN_BYTES:
                above.append((path, grown / MIB))
            assert answer.status in (200, 400)
    assert not above
