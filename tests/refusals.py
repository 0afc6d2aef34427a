"""Large requests for every route and every reason to refuse one, from clients that read the answer and that leave."""

from __future__ import annotations

import asyncio
import gc
import json
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

from server.auth.identity import digest_text

GOOD_KEY: Final = "good"
SLOW_KEY: Final = "slow"
"""May send one request a minute."""
KEYS: Final = "".join(
    f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "{key}"\n{limit}\n'
    for key, limit in ((GOOD_KEY, ""), (SLOW_KEY, "requests_per_minute = 1"))
)
WORD: Final = "needle "
MESSAGES: Final = [{"role": "user", "content": "Hi"}]

Port = Literal["public", "ops", "empty"]
"""`empty` is the public port of a gateway without workers."""
Body = Callable[[int], bytes]
"""Makes a body of about this number of bytes."""
Leaves = Literal["never", "in the body", "in the answer"]


@dataclass(frozen=True, slots=True)
class Case:
    route: str
    reason: str
    statuses: tuple[int, ...]
    """One of these answers it; none for a client that leaves."""
    body: Body
    method: str = "POST"
    key: str = GOOD_KEY
    port: Port = "public"
    leaves: Leaves = "never"

    def __str__(self) -> str:
        return f"{self.port} {self.method} {self.route}: {self.reason}"


@dataclass(frozen=True, slots=True)
class JsonRoute:
    """A route that takes a JSON object, and what is wrong with it in each way."""

    path: str
    fields: dict[str, Any]
    """A small valid body."""
    prompt: Callable[[str], dict[str, Any]]
    """The fields that hold a text."""
    wrong_type: dict[str, Any]
    wrong_value: dict[str, Any]
    streams: bool = False

    def text(self, num_bytes: int, **changes: Any) -> bytes:
        """A body with one long text, then `changes`."""
        fields = {**self.fields, **self.prompt(WORD * (num_bytes // len(WORD)))}
        return json.dumps({**fields, **changes}).encode()

    def padded(self, num_bytes: int, **changes: Any) -> bytes:
        """A valid body, with white space between its fields."""
        start, rest = json.dumps({**self.fields, **changes}).encode().split(b",", 1)
        return b"%b,%b%b" % (start, b" " * num_bytes, rest)


def _messages(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}]}


JSON_ROUTES: Final = (
    JsonRoute(
        "/v1/chat/completions",
        {"model": "tiny", "messages": MESSAGES},
        _messages,
        {"max_tokens": "many"},
        {"tool_choice": "sometimes"},
        streams=True,
    ),
    JsonRoute(
        "/v1/completions",
        {"model": "tiny", "prompt": "Hi"},
        lambda text: {"prompt": text},
        {"temperature": "hot"},
        {"response_format": {"type": "poem"}},
        streams=True,
    ),
    JsonRoute(
        "/v1/responses",
        {"model": "tiny", "input": "Hi"},
        lambda text: {"input": text},
        {"max_output_tokens": "many"},
        {"truncation": "often"},
        streams=True,
    ),
    JsonRoute(
        "/v1/messages",
        {"model": "tiny", "max_tokens": 500, "messages": MESSAGES},
        _messages,
        {"max_tokens": "many"},
        {"tool_choice": {"type": "sometimes"}},
        streams=True,
    ),
    JsonRoute(
        "/v1/messages/count_tokens",
        {"model": "tiny", "messages": MESSAGES},
        _messages,
        {"system": 5},
        {"tool_choice": {"type": "sometimes"}},
    ),
    JsonRoute(
        "/v1/embeddings",
        {"model": "tiny", "input": "Hi"},
        lambda text: {"input": text},
        {"dimensions": "many"},
        {"encoding_format": "words"},
    ),
    JsonRoute(
        "/tokenize", {"model": "tiny", "prompt": "Hi"}, lambda text: {"prompt": text}, {"model": 5}, {"prompt": None}
    ),
    JsonRoute(
        "/detokenize",
        {"model": "tiny", "tokens": [5]},
        lambda text: {"note": text},
        {"tokens": "five"},
        {"tokens": [10**8]},
    ),
)
OTHER_ROUTES: Final = (
    ("GET", "/v1/models", 200),
    ("GET", "/v1/models/none", 404),
    ("GET", "/tokenizer_info", 200),
    ("GET", "/version", 200),
    ("GET", "/health/live", 200),
    ("POST", "/health/ready", 405),
    ("POST", "/v1/models", 405),
    ("POST", "/v1/unknown", 404),
    ("PUT", "/v1/chat/completions", 405),
)
OPS_ROUTES: Final = (
    ("POST", "/drain", 401),
    ("POST", "/workers/w0/drain", 401),
    ("POST", "/workers/none/purge", 404),
    ("POST", "/unknown", 404),
    ("POST", "/metrics", 405),
    ("GET", "/prefixes?limit=0", 400),
)


def _cut(body: Body, num_bytes: int) -> bytes:
    return body(num_bytes)[:-3]


def _tripled(body: Body, num_bytes: int) -> bytes:
    return body(3 * num_bytes)


def cases() -> list[Case]:
    return [*_json_cases(), *_other_cases()]


def _json_cases() -> Iterator[Case]:
    for route in JSON_ROUTES:
        path, text, padded = route.path, route.text, route.padded
        yield Case(path, "broken JSON", (400,), partial(_cut, padded))
        yield Case(path, "wrong type", (400,), partial(padded, **route.wrong_type))
        yield Case(path, "unknown value", (400,), partial(padded, **route.wrong_value))
        if path != "/detokenize":
            yield Case(path, "too long", (400,), text)
        yield Case(path, "no key", (401, 429), text, key="")
        yield Case(path, "no model", (404,), partial(padded, model="none"))
        yield Case(path, "too large", (413,), partial(_tripled, text))
        yield Case(path, "over the key's limit", (429, 400), text, key=SLOW_KEY)
        yield Case(path, "no worker", (404, 503, 529), padded, port="empty")
        yield Case(path, "no JSON", (415,), lambda size: b"")
        yield Case(path, "client leaves in the body", (), text, leaves="in the body")
        yield Case(path, "accepted", (200, 400), padded)
        if route.streams:
            stream = partial(padded, stream=True)
            yield Case(path, "accepted stream", (200,), stream)
            yield Case(path, "client leaves in the answer", (), stream, leaves="in the answer")


def _other_cases() -> Iterator[Case]:
    def body(size: int) -> bytes:
        return JSON_ROUTES[0].text(size)

    for method, path, status in OTHER_ROUTES:
        yield Case(path, str(status), (status,), body, method)
    for method, path, status in OPS_ROUTES:
        yield Case(path, str(status), (status,), body, method, key="" if status == 401 else GOOD_KEY, port="ops")
    chat = JSON_ROUTES[0]
    for path in ("/route/explain", "/chat/api/v1/chat/completions"):
        yield Case(path, "too long", (400,), body, port="ops")
        yield Case(path, "broken JSON", (400,), partial(_cut, body), port="ops")
        yield Case(path, "no model", (404,), partial(chat.padded, model="none"), port="ops")
        yield Case(path, "client leaves in the body", (), body, port="ops", leaves="in the body")


@asynccontextmanager
async def sent(case: Case, port: int, make_body: Callable[[], bytes]) -> AsyncIterator[int]:
    """Send one request. Yield its status, 0 for a client that leaves; the connection stays open until the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield await _answered(case, make_body(), reader, writer)
    finally:
        writer.transport.abort()


async def _answered(case: Case, body: bytes, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> int:
    kind = b"text/plain" if case.reason == "no JSON" else b"application/json"
    head = f"{case.method} {case.route} HTTP/1.1\r\nhost: 127.0.0.1\r\n"
    head += f"authorization: Bearer {case.key}\r\n" if case.key else ""
    writer.write(head.encode() + b"content-type: %b\r\ncontent-length: %d\r\n\r\n" % (kind, len(body)))
    if case.leaves == "in the body":
        writer.write(body[: len(body) // 2])
        await writer.drain()
        writer.transport.abort()
        return 0
    writer.write(body)
    answer = await reader.readuntil(b"\r\n\r\n")
    if case.leaves == "in the answer":
        await reader.readuntil(b"data: ")
        writer.transport.abort()
        return 0
    if length := re.search(rb"content-length: (\d+)", answer):
        await reader.readexactly(int(length[1]))
    else:
        await reader.readuntil(b"\r\n0\r\n\r\n")
    return int(answer.split()[1])


@contextmanager
def frozen() -> Iterator[None]:
    """Collect only by hand, and skip earlier objects: the modules, and those of earlier tests."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.enable()


@contextmanager
def no_collections() -> Iterator[None]:
    """Keep what only the collector would free in `gc.garbage`."""
    gc.collect()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        yield
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
