"""Pure ASGI around an app: a context, an id and one shape of errors for every request, and a limit on bodies."""

from __future__ import annotations

import codecs
import logging
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Final

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import (
    RESPONSES_PATH,
    ApiError,
    BodyTooLargeError,
    ForbiddenError,
    anthropic_error,
    forget,
    is_for_anthropic,
    responses_error,
)
from server.http.compressed import checked_coding, unpacked
from server.metrics import GatewayMetrics
from server.request_context import CURRENT, RequestContext
from server.usage.account import CLIENT_LEFT, Account
from worker.common.sockets import HostNames

log = logging.getLogger(__name__)
access = logging.getLogger("server.access")

_REQUEST_ID: Final = re.compile(rb"[A-Za-z0-9._-]{1,128}")
REPAIRED_HEADER: Final = b"x-headstart-repaired"
"""Names the changes to the messages for their template."""
IGNORED_HEADER: Final = b"x-headstart-ignored"
"""Names what is left out of the request or changes nothing, at most `_MAX_NAMED` parts."""
_MAX_NAMED: Final = 32
ALWAYS_TAKEN_BYTES: Final = 1 << 20
"""Bodies up to this size are not compared with the needs of the models."""


class Application(Starlette):
    """A Starlette application without Starlette's own middleware: `with_context` handles every error."""

    def __init__(self, routes: Sequence[BaseRoute], middleware: Sequence[Middleware]) -> None:
        super().__init__(routes=routes, middleware=middleware)
        self.router.redirect_slashes = False

    def build_middleware_stack(self) -> ASGIApp:
        app: ASGIApp = self.router
        for kind, arguments, options in reversed(self.user_middleware):
            app = kind(app, *arguments, **options)
        return app


def with_context(
    app: ASGIApp,
    metrics: GatewayMetrics,
    *,
    access_log: bool = False,
    count_usage: Callable[[RequestContext], None] = lambda context: None,
) -> ASGIApp:
    """Give each request a context, and each exception an error object. Count and time the answer, and add headers.

    It is the outermost middleware. `count_usage` receives each request to a model's route, and each other POST that
    ended with an error.
    """

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        context = RequestContext(_client_id(scope), time.perf_counter())
        CURRENT.set(context)
        if scope["path"].endswith("/") and scope["path"] != "/":  # a redirect would lose a POST's body
            scope = {**scope, "path": scope["path"].rstrip("/") or "/"}
        anthropic = is_for_anthropic(scope)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *_headers(context, anthropic=anthropic)]
            await send(message)

        metrics.num_in_flight += 1
        try:
            await app(scope, receive, send_with_headers)
        except ClientDisconnect as error:
            forget(error)
            context.status = CLIENT_LEFT
            metrics.disconnects.inc()
            log.info("%s: the client has gone (%d)", context.request_id, CLIENT_LEFT)
        except Exception as error:
            failure = context.fail(error)
            forget(error)
            if context.status:  # the answer has begun
                raise
            answer = anthropic_error(failure, context.request_id) if anthropic else None
            said = responses_error(failure) if scope["path"] == RESPONSES_PATH else failure
            await send_error(said, send_with_headers, answer)
            del said, failure
        finally:
            metrics.num_in_flight -= 1
            elapsed_s = time.perf_counter() - context.started_s
            _count(metrics, context, elapsed_s)
            context.end(elapsed_s)
            if context.account is not None or (context.error and scope["method"] == "POST"):  # no probe of health
                count_usage(context)
            if access_log and (context.route != "other" or context.status >= 400):
                _log_answer(context, elapsed_s, scope)

    return call


def _count(metrics: GatewayMetrics, context: RequestContext, elapsed_s: float) -> None:
    """Count a request of any route that has ended."""
    metrics.answers.inc(context.route, context.status)
    metrics.request_s.observe(elapsed_s, context.route)
    for repair in context.repairs:
        metrics.repairs.inc(repair)
    if context.removal_rule:
        metrics.removed_lines.inc(context.removal_rule)
    if context.error:
        metrics.drops.inc(context.error)


def _headers(context: RequestContext, *, anthropic: bool) -> list[tuple[bytes, bytes]]:
    """Return the headers that every answer gets."""
    id_, elapsed_ms = context.request_id.encode(), (time.perf_counter() - context.started_s) * 1e3
    headers = [(b"x-request-id", id_), (b"openai-processing-ms", b"%d" % elapsed_ms), *context.limit_headers()]
    if context.repairs:
        headers.append((REPAIRED_HEADER, ", ".join(context.repairs).encode()))
    if context.ignored and context.status < 400:
        headers.append((IGNORED_HEADER, ", ".join(context.ignored[:_MAX_NAMED]).encode()))
    return [*headers, (b"request-id", id_)] if anthropic else headers


async def send_error(error: ApiError, send: Send, answer: tuple[int, bytes] | None = None) -> None:
    """Send an error; `answer`: its status and body in the shape of another API."""
    status, body = answer or (error.status, error.body())
    headers = [*error.headers(), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _log_answer(context: RequestContext, elapsed_s: float, scope: Scope) -> None:
    """Log a line for a finished request: the client's address, status, seconds, tokens."""
    account = context.account or Account(tenant="", key="", route=context.route)
    fields = {
        "client": (scope.get("client") or ("unknown",))[0],
        "route": context.route,
        "status": context.status,
        "seconds": round(elapsed_s, 6),
        "worker": account.worker,
        "prompt_tokens": account.prompt_tokens,
        "cached_tokens": account.num_cached_tokens,
        "output_tokens": account.output_tokens,
    }
    line = " ".join(f"{name}={value}" for name, value in fields.items())
    access.info("%s: %s", context.request_id, line, extra=fields)


def _client_id(scope: Scope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return str(value, "ascii")
    return ""


def body_limit(app: ASGIApp, max_bytes: int, needed: Callable[[], int | None] = lambda: None) -> ASGIApp:
    """Refuse large bodies by their announced length, or else by counting. Unpack compressed ones before.

    `needed` returns the largest useful body; None: `max_bytes`.
    """

    def check(num_bytes: int) -> None:
        if num_bytes > max_bytes:
            raise BodyTooLargeError(f"The body must not be larger than {max_bytes} bytes.")
        useful = needed() if num_bytes > ALWAYS_TAKEN_BYTES else None
        if useful is not None and num_bytes > useful:
            message = f"The body has more than {useful} bytes, more than the context window of any model here can need"
            raise BodyTooLargeError(f"{message}: send less text.")

    def call(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        num_bytes, coding, source = 0, "", receive
        for name, value in scope["headers"]:
            if name == b"content-length":
                check(int(value))
            elif name == b"content-encoding":
                coding = checked_coding(value, coding)

        async def counted() -> Message:
            nonlocal num_bytes, source
            message = await source()
            if not message.get("more_body"):
                source = receive  # the answer holds nothing of the body
            body = message.get("body", b"")
            if not num_bytes and body.startswith(codecs.BOM_UTF8):  # PowerShell and .NET send one
                message["body"] = body[len(codecs.BOM_UTF8) :]
            num_bytes += len(body)
            check(num_bytes)
            return message

        if coding:
            end = {"type": "http.request", "body": b"", "more_body": False}
            source = partial(anext, unpacked(coding, receive), end)
        return app(scope, counted, send)

    return call


def known_hosts(app: ASGIApp, hosts: HostNames, option: str) -> ASGIApp:
    """Answer 403 to an unknown Host header, see `HostNames`. `option` adds names to the known ones."""

    def call(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        host = Headers(scope=scope).get("host")
        if host is None or host in hosts:  # HTTP/1.0 may name none, but no browser speaks it
            return app(scope, receive, send)
        advice = f"start the gateway with {option} to allow it"
        message = f"This port does not answer to the Host {host!r:.300}: {advice}."
        return send_error(ForbiddenError(message, code="unknown_host"), send)

    return call
