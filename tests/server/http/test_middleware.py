"""The path, headers, account and log line of every request, and the limit of its body."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from server.errors import BodyTooLargeError, InvalidRequestError
from server.http.middleware import ALWAYS_TAKEN_BYTES, body_limit, with_context
from server.metrics import GatewayMetrics
from server.request_context import CURRENT, RequestContext
from server.usage.account import Account

MAX_BYTES = 4 * ALWAYS_TAKEN_BYTES
NEEDED_BYTES = 2 * ALWAYS_TAKEN_BYTES


class Served:
    """Sends requests to an app behind `with_context`."""

    def __init__(self, error: Exception | None = None, account: Account | None = None) -> None:
        self.paths: list[str] = []
        self.counted: list[RequestContext] = []
        self._error, self._account = error, account
        self._app = with_context(self._answer, GatewayMetrics(), access_log=True, count_usage=self.counted.append)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.paths.append(scope["path"])
        context = CURRENT.get()
        context.route = scope["path"] if scope["path"] == "/v1/models" else "other"
        context.account = self._account
        if self._error is not None:
            raise self._error
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"ok"})

    async def ask(self, path: str = "/v1/models", method: str = "GET") -> dict[str, str]:
        """Return the headers of the answer."""
        sent: list[Message] = []

        async def send(message: Message) -> None:
            sent.append(message)

        scope = {"type": "http", "path": path, "method": method, "headers": [], "client": ("10.0.0.7", 1)}
        await self._app(scope, body_of(b""), send)
        return {name.decode(): value.decode() for name, value in sent[0]["headers"]}


def body_of(*parts: bytes) -> Receive:
    left = list(parts)

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    return receive


@pytest.mark.parametrize(
    ("path", "expected"), [("/v1/models", "/v1/models"), ("/v1/models//", "/v1/models"), ("/", "/"), ("//", "/")]
)
async def test_a_slash_at_the_end_is_ignored(path: str, expected: str) -> None:
    served = Served()
    await served.ask(path)
    assert served.paths == [expected]


async def test_the_headers_say_how_long_it_took() -> None:
    begun_s = time.perf_counter()
    headers = await Served().ask()
    assert 0 <= int(headers["openai-processing-ms"]) <= 1e3 * (time.perf_counter() - begun_s)
    assert headers["x-request-id"]
    assert "request-id" not in headers, "it is Anthropic's"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("has_account", [False, True])
async def test_what_is_counted(method: str, fails: bool, has_account: bool) -> None:
    """Each request with an account, and each other POST that fails: no probe of health."""
    account = Account(tenant="t", key="k", route="/v1/models") if has_account else None
    served = Served(InvalidRequestError("no") if fails else None, account)
    await served.ask(method=method)
    assert len(served.counted) == (has_account or (fails and method == "POST"))
    if account is not None:
        assert account.status == (400 if fails else 200)


async def test_the_log_has_a_line_with_the_answers_counts(caplog: pytest.LogCaptureFixture) -> None:
    account = Account(tenant="t", key="k", route="/v1/models", prompt_tokens=7, output_tokens=3, worker="w0")
    account.cached_tokens["pool"] = 5
    with caplog.at_level(logging.INFO, "server.access"):
        await Served(account=account).ask()
        await Served().ask("/none")
        await Served(InvalidRequestError("no")).ask("/none")
    [line, refused] = [record.getMessage() for record in caplog.records if record.name == "server.access"]
    for part in ("client=10.0.0.7", "route=/v1/models", "status=200", "worker=w0", "prompt_tokens=7"):
        assert part in line.split(), line
    assert "status=400" in refused.split()
    assert {"cached_tokens=5", "output_tokens=3"} <= set(line.split())


async def send_body(parts: Sequence[bytes], headers: Mapping[str, str], needed: int | None) -> int:
    """Send a body through the limit. Return the bytes that the app got."""
    got = 0

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        nonlocal got
        more: Any = True
        while more:
            message = await receive()
            got, more = got + len(message["body"]), message["more_body"]

    async def send(message: Message) -> None:
        raise AssertionError

    scope = {"headers": [(name.encode(), value.encode()) for name, value in headers.items()]}
    await body_limit(app, MAX_BYTES, lambda: needed)(scope, body_of(*parts), send)
    return got


@pytest.mark.parametrize("is_announced", [False, True])
@pytest.mark.parametrize(
    ("num_bytes", "needed", "refusal"),
    [
        (MAX_BYTES, None, ""),
        (MAX_BYTES + 1, None, f"must not be larger than {MAX_BYTES} bytes"),
        (NEEDED_BYTES, NEEDED_BYTES, ""),
        (NEEDED_BYTES + 1, NEEDED_BYTES, "more than the context window of any model here can need: send less text"),
        (ALWAYS_TAKEN_BYTES, 10, ""),
    ],
)
async def test_a_body_is_bounded(num_bytes: int, needed: int | None, refusal: str, is_announced: bool) -> None:
    headers = {"content-length": str(num_bytes)} if is_announced else {}
    parts = [b"x" * (num_bytes - 5), b"x" * 5]
    if refusal:
        with pytest.raises(BodyTooLargeError, match=refusal):
            await send_body(parts, headers, needed)
    else:
        assert await send_body(parts, headers, needed) == num_bytes


async def test_an_announced_length_is_refused_before_the_body_is_read() -> None:
    async def never(*_: object) -> Any:
        raise AssertionError

    scope = {"headers": [(b"content-length", b"%d" % (MAX_BYTES + 1))]}
    with pytest.raises(BodyTooLargeError):
        await body_limit(never, MAX_BYTES)(scope, never, never)
