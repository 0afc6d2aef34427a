"""Something else listens where a worker was: requests are answered elsewhere, and it learns nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from tests.running import listening as listening_socket
from tests.server.gateway_app import gateway
from tests.server.request.failing_workers import MakeWorker
from tests.server.scripted_worker import ProvenWorker, ScriptedWorker, listening
from tests.server.test_app import chat, post
from worker.common.proof import PROVE_PATH, gateway_token, new_challenge, new_instance, prove
from worker.http.app import STATUS_OF
from worker.wire import End, Failed, Finished, Started, Tokens, pack

SECRET: Final = b"of this fleet"
TOKEN: Final = gateway_token(SECRET)
NUM_REQUESTS: Final = 20
MANY_REQUESTS: Final = 200
STATUSES: Final = (*range(100, 104), *range(200, 209), *range(300, 309), *range(400, 432), 451, *range(500, 512), 999)
Answer = Callable[[asyncio.StreamWriter], Awaitable[None]]


def http(status: int, body: bytes, *headers: str) -> bytes:
    lines = (f"HTTP/1.1 {status} X", *headers, f"content-length: {len(body)}", "", "")
    return "\r\n".join(lines).encode() + body


def sends(*parts: bytes) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(parts))
        await writer.drain()

    return answer


def repeats(start: bytes, part: bytes, pause_s: float = 0.0) -> Answer:
    async def answer(writer: asyncio.StreamWriter) -> None:
        writer.write(start)
        while True:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause_s)

    return answer


CHUNKED: Final = b"HTTP/1.1 %d X\r\ntransfer-encoding: chunked\r\n\r\n"
PAGE: Final = b"<!doctype html><title>hello</title>" * 100
PLAIN: Final = {
    "closes": sends(),
    "garbage": sends(b"\0\1\2\3 nonsense\r\n\r\n"),
    "a page": sends(http(200, PAGE, "content-type: text/html")),
    "JSON": sends(http(200, b'{"status": "ok"}', "content-type: application/json")),
    "empty": sends(http(200, b"")),
    "other msgpack": sends(http(200, pack({"a": [1, 2.5, None]}))),
    "unknown frames alone": sends(http(200, pack([99, 1]))),
    "redirect": sends(http(307, b"", "location: http://127.0.0.1:1/generate")),
    "HTTP/2": sends(b"\0\0\x12\4\0\0\0\0\0\0\3\0\0\0d\0\4\0\0\xff\xff"),
    "TLS alert": sends(b"\x15\3\1\0\2\2\x46"),
    "upgrade": sends(b"HTTP/1.1 101 X\r\nconnection: upgrade\r\nupgrade: h2c\r\n\r\n"),
    "endless head": repeats(b"HTTP/1.1 200 X\r\n", b"x: " + b"y" * 8000 + b"\r\n"),
    "huge refusal": repeats(CHUNKED % 503, b"10000\r\n" + b"x" * 65536 + b"\r\n"),
    "huge page": repeats(CHUNKED % 200, b"10000\r\n" + b"x" * 65536 + b"\r\n"),
    "another fleet's worker": sends(http(401, pack(Failed("unauthorized", "no", retryable=True)))),
    "another host's worker": sends(http(403, pack(Failed("forbidden", "no", retryable=True)))),
    "another epoch": sends(http(409, pack(Failed("wrong_epoch", "no", retryable=True)))),
    "another version": sends(http(409, pack(Failed("wrong_protocol", "no", retryable=True)))),
    "loads another model": sends(http(503, pack(Failed("not_ready", "no", retryable=True)))),
}
SLOW: Final = {
    "silent": repeats(b"", b"", 60.0),
    "drips its head": repeats(b"HTTP/1.1 200 X\r\n", b"x", 0.05),
    "drips a refusal": repeats(CHUNKED % 500, b"1\r\nx\r\n", 0.05),
    "drips a page": repeats(CHUNKED % 200 + b"2\r\n\xc6\x7f\r\n", b"1\r\nx\r\n", 0.05),
}


@dataclass
class Stranger:
    url: str
    seen: bytearray = field(default_factory=bytearray)


@asynccontextmanager
async def stranger(answer: Answer) -> AsyncIterator[Stranger]:
    """Give this answer to each request, and keep all that comes."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
            there.seen += head + await reader.readexactly(int(length or 0))
            await answer(writer)
            if answer is PLAIN["closes"]:
                return

    async with listening_socket(serve) as port:
        there = Stranger(f"http://127.0.0.1:{port}")
        yield there


async def all_answered(
    there: Stranger,
    lost: ScriptedWorker,
    healthy: ScriptedWorker,
    num: int,
    *,
    num_at_once: int | None = None,
    **options: Any,
) -> None:
    """Send the requests one by one, then `num_at_once` (half) together. The router sends each to the lost one first."""
    num_at_once = num // 2 if num_at_once is None else num_at_once
    async with gateway(lost, healthy, **options) as target:
        target.router.members[0] = replace(target.router.members[0], url=there.url)
        statuses = [(await post(target.url, chat()))[0] for _ in range(num - num_at_once)]
        statuses += [each[0] for each in await asyncio.gather(*(post(target.url, chat()) for _ in range(num_at_once)))]
        assert statuses == [200] * num
        assert len(healthy.received) == num


@pytest.mark.parametrize("num", [NUM_REQUESTS, pytest.param(MANY_REQUESTS, marks=pytest.mark.deep)])
@pytest.mark.parametrize("kind", PLAIN)
async def test_every_request_is_answered_elsewhere(make: MakeWorker, kind: str, num: int) -> None:
    async with stranger(PLAIN[kind]) as there:
        await all_answered(there, make(), make(), num)


@pytest.mark.parametrize("body", [b"", PAGE, b"\x95\4"])
async def test_whatever_its_status(make: MakeWorker, body: bytes) -> None:
    statuses = iter(STATUSES * 2)

    async def answer(writer: asyncio.StreamWriter) -> None:
        status = next(statuses, 404)
        writer.write(http(status, b"" if status < 200 or status in (204, 304) else body))
        await writer.drain()

    async with stranger(answer) as there:
        await all_answered(there, make(), make(), len(STATUSES))


async def left_in_time(make: MakeWorker, kind: str, num: int) -> None:
    async with stranger(SLOW[kind]) as there:
        await all_answered(there, make(), make(), num, num_at_once=num, silent_s=0.2, no_successor_timeout_s=0.2)


async def test_those_that_are_slow_are_left(make: MakeWorker) -> None:
    """All at once: each takes the time of two probes."""
    async with asyncio.TaskGroup() as group:
        for kind in SLOW:
            group.create_task(left_in_time(make, kind, 4), name=kind)


@pytest.mark.deep
@pytest.mark.parametrize("kind", SLOW)
async def test_hundreds_of_requests_leave_one_that_is_slow(make: MakeWorker, kind: str) -> None:
    await left_in_time(make, kind, MANY_REQUESTS)


async def test_many_strangers_cost_no_answer(make: MakeWorker) -> None:
    """No worker has had the request: the bound on lost workers is for requests that kill them."""
    workers = [make() for _ in range(12)]
    async with stranger(PLAIN["a page"]) as there, gateway(*workers) as target:
        target.router.members[:-1] = [replace(each, url=there.url) for each in target.router.members[:-1]]
        assert [(await post(target.url, chat()))[0] for _ in range(3)] == [200] * 3
        assert [each.is_suspect for each in workers[-1].received] == [False] * 3


# --- with a cluster secret -----------------------------------------------------------------------------------------


@pytest.fixture
def proven(worker: ScriptedWorker, tmp_path: Path) -> tuple[ProvenWorker, ProvenWorker, str]:
    """A worker that will be lost, a healthy one, and the file of their secret."""
    file = tmp_path / "secret"
    file.write_bytes(SECRET)
    lost, healthy = (
        ProvenWorker(worker.bundle, worker_id=name, reply=worker.reply, secret=SECRET) for name in ("lost", "healthy")
    )
    return lost, healthy, str(file)


def frames() -> bytes:
    """A whole answer, as another worker gives it."""
    made = (Started(0), Tokens(0, (1,)), Finished(0, "length"), End(0.0, 0.0, 0.0))
    return b"".join(map(pack, made))


def old_proof() -> bytes:
    """A proof for a challenge of before."""
    return pack(prove(TOKEN, new_challenge(), "http://127.0.0.1:9", new_instance()))


@pytest.mark.parametrize("kind", [*PLAIN, "well-formed frames", "an old proof", "another secret"])
async def test_a_stranger_sees_no_token_and_no_prompt(
    proven: tuple[ProvenWorker, ProvenWorker, str], kind: str
) -> None:
    lost, healthy, file = proven
    other = pack(prove(gateway_token(b"of another"), new_challenge(), "http://127.0.0.1:9", new_instance()))
    answers = PLAIN | {
        "well-formed frames": sends(http(200, frames())),
        "an old proof": sends(http(200, old_proof())),
        "another secret": sends(http(200, other)),
    }
    async with stranger(answers[kind]) as there:
        await all_answered(there, lost, healthy, NUM_REQUESTS, cluster_secret_file=file)
    assert there.seen.startswith(b"POST /prove HTTP/1.1")
    assert b"authorization" not in there.seen.lower()
    assert TOKEN.encode() not in there.seen
    assert b"/generate" not in there.seen


async def test_a_proof_of_another_worker_is_of_no_use(proven: tuple[ProvenWorker, ProvenWorker, str]) -> None:
    """The impostor relays the challenge to a worker of the fleet, and its proof back."""
    lost, healthy, file = proven
    seen: list[str] = []

    async def pass_on(request: Request) -> Response:
        seen.append(request.url.path)
        assert "authorization" not in request.headers
        return Response(pack(prove(TOKEN, await request.body(), healthy.url, new_instance())))

    app = Starlette(routes=[Route("/{path:path}", pass_on, methods=["GET", "POST"])])
    async with listening(app) as url, stranger(sends()) as there:
        there.url = url
        await all_answered(there, lost, healthy, NUM_REQUESTS, cluster_secret_file=file)
    assert set(seen) == {PROVE_PATH}


async def test_the_statuses_of_workers_are_refusals_all_the_same(make: MakeWorker) -> None:
    """A client's mistake stays a client's mistake."""
    refusal = http(400, pack(Failed("invalid_request", "top_k", retryable=False)))
    async with stranger(sends(refusal)) as there, gateway(make(), make()) as target:
        target.router.members[0] = replace(target.router.members[0], url=there.url)
        assert (await post(target.url, chat()))[0] == STATUS_OF["invalid_request"]
