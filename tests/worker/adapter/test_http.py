"""The adapter's HTTP client: events cut anywhere, the engine's error messages, and answers that end early."""

from __future__ import annotations

import asyncio
import errno
import json
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

from tests.certificates import Authority
from tests.e2e.serving import free_ports
from tests.running import listening as raw_listening
from tests.worker.adapter.scripted_http import ScriptedHttp, scripted_http, sse
from worker.adapter.api import EngineLostError, EngineRefusedError
from worker.adapter.http import EngineServer

GENERATE = "POST /generate"


@pytest.fixture
def server() -> ScriptedHttp:
    return ScriptedHttp()


@pytest.fixture
async def http(server: ScriptedHttp) -> AsyncIterator[EngineServer]:
    async with scripted_http(server) as url:
        client = EngineServer(f"{url}/", key="sk-secret")
        client._headers["x-data-parallel-rank"] = "1"
        yield client
        await client.close()


async def read(http: EngineServer) -> list[bytes]:
    found: list[bytes] = []
    await http.events("/generate", {"prompt": 1}, found.append)
    return found


async def test_an_unknown_authority_names_the_option(tmp_path: Path) -> None:
    authority = Authority(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*authority.issue("engine", "127.0.0.1"))
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    client = EngineServer(f"https://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    with pytest.raises(EngineLostError, match=r"certificate verify failed.*give its authority as --engine-ca"):
        await client.model()
    await client.close()
    server.close()


async def test_events(server: ScriptedHttp, http: EngineServer) -> None:
    server.answers[GENERATE] = sse({"a": 1}, b": a comment\n\nevent: x\ndata:{}\n\n", b"data: {}\r\n\r\n")
    assert await read(http) == [b'{"a": 1}', b"{}", b"{}"]
    assert server.bodies == [{"prompt": 1}]
    assert server.headers[0]["authorization"] == "Bearer sk-secret"
    assert server.headers[0]["x-data-parallel-rank"] == "1"


@given(cuts=st.lists(st.integers(0, 60), max_size=5))
@settings(max_examples=30)
def test_events_cut_anywhere(cuts: list[int]) -> None:
    whole = b"".join(b"data: " + json.dumps({"n": number}).encode() + b"\n\n" for number in range(4))
    ends = sorted({*cuts, len(whole)})
    parts = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]

    async def run() -> list[bytes]:
        server = ScriptedHttp()
        server.answers[GENERATE] = sse(*parts)
        async with scripted_http(server) as url:
            http = EngineServer(url)
            try:
                return await read(http)
            finally:
                await http.close()

    assert [json.loads(data)["n"] for data in asyncio.run(run())] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (JSONResponse({"error": {"message": "too long", "code": 400}}, 400), "too long"),
        (JSONResponse({"error": "Unauthorized"}, 401), "Unauthorized"),
        (JSONResponse({"message": "flat"}, 404), "flat"),
        (JSONResponse({"object": "error"}, 429), "object"),
        (JSONResponse([1], 500), "[1]"),
        (PlainTextResponse("x" * 5000, 503), "x" * 300),
        (Response(b"\xff\xfe", 502), "��"),
        (JSONResponse({"error": {"message": "y" * 5000}}, 400), "y" * 1000),
    ],
)
async def test_errors_are_in_the_engines_words(
    server: ScriptedHttp, http: EngineServer, answer: Response, message: str
) -> None:
    server.answers[GENERATE] = server.answers["GET /state"] = answer
    with pytest.raises(EngineRefusedError) as caught:
        await read(http)
    assert (caught.value.status, caught.value.message) == (answer.status_code, message) or message in str(caught.value)
    with pytest.raises(EngineRefusedError) as caught:
        await http.json("GET", "/state")
    assert caught.value.status == answer.status_code


async def test_json(server: ScriptedHttp, http: EngineServer) -> None:
    server.answers |= {"GET /empty": Response(), "GET /none": Response(b"<html>"), "GET /one": JSONResponse([1])}
    assert await http.json("GET", "/empty") is None
    assert await http.json("GET", "/one") == [1]
    with pytest.raises(EngineLostError, match="JSON"):
        await http.json("GET", "/none")


async def test_a_stream_without_an_end(server: ScriptedHttp, http: EngineServer) -> None:
    server.answers[GENERATE] = sse({"a": 1}, done=False)
    with pytest.raises(EngineLostError, match="ended early"):
        await read(http)


@pytest.mark.parametrize(
    "said", [b"", b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndat", b"garbage\r\n\r\n"]
)
async def test_a_connection_that_breaks(said: bytes) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(said)

    async with raw_listening(serve) as port:
        http = EngineServer(f"http://127.0.0.1:{port}")
        with pytest.raises(EngineLostError) as caught:
            await read(http)
        assert not caught.value.gone, "something listens"
        with pytest.raises(EngineLostError):
            await http.json("GET", "/state")
        await http.close()


async def test_a_kept_connection_that_the_engine_closes() -> None:
    num_asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal num_asked
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")
        await reader.readuntil(b"\r\n\r\n")
        num_asked += 1

    async with raw_listening(serve) as port:
        http = EngineServer(f"http://127.0.0.1:{port}")
        for _ in range(3):
            assert await http.json("GET", "/state") == {}
        assert num_asked == 2
        with pytest.raises(EngineLostError):
            await http.json("POST", "/generate")
        await http.close()


@pytest.mark.parametrize("form", ["unix:{}", "unix://{}", "unix:{}/v1"])
async def test_a_unix_socket(tmp_path: Path, form: str) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 2\r\n\r\n{}")
        writer.close()

    path = tmp_path / "s"
    listening = await asyncio.start_unix_server(serve, path)
    http = EngineServer(form.format(path))
    assert await http.json("GET", "/state") == {}
    listening.close()
    await http.close()
    path.unlink(missing_ok=True)
    http = EngineServer(form.format(path))
    with pytest.raises(EngineLostError, match=str(path)) as caught:
        await http.json("GET", "/state")
    assert caught.value.gone
    await http.close()


async def test_nothing_listens() -> None:
    [port] = free_ports(1)
    http = EngineServer(f"http://127.0.0.1:{port}")
    with pytest.raises(EngineLostError) as caught:
        await http.json("GET", "/state")
    assert caught.value.gone
    assert caught.value.unsent
    await http.close()


@pytest.mark.parametrize(
    ("where", "number", "is_gone"),
    [
        ("getaddrinfo", socket.EAI_AGAIN, False),
        ("sock_connect", errno.EMFILE, False),
        ("sock_connect", errno.EADDRNOTAVAIL, False),
        ("sock_connect", errno.EHOSTUNREACH, True),
    ],
)
async def test_a_fault_of_this_side_is_no_lost_engine(
    monkeypatch: pytest.MonkeyPatch, where: str, number: int, is_gone: bool
) -> None:
    """Its streams run on, and its blocks stay known."""

    async def fail(*args: object, **options: object) -> None:
        raise socket.gaierror(number, "try again") if where == "getaddrinfo" else OSError(number, "no")

    host = "vllm-0.invalid" if where == "getaddrinfo" else "127.0.0.1"
    http = EngineServer(f"http://{host}:9")
    monkeypatch.setattr(asyncio.get_running_loop(), where, fail)
    with pytest.raises(EngineLostError) as caught:
        await http.json("GET", "/state")
    assert (caught.value.gone, caught.value.closed, caught.value.unsent) == (is_gone, False, True)
    await http.close()


async def test_a_call_that_takes_too_long() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.Event().wait()

    async with raw_listening(serve) as port:
        http = EngineServer(f"http://127.0.0.1:{port}")
        with pytest.raises(EngineLostError, match="Timeout") as caught:
            await http.json("GET", "/state", timeout_s=0.05)
        assert not caught.value.gone
        await http.close()


async def test_a_redirect_is_a_refusal(server: ScriptedHttp, http: EngineServer) -> None:
    """The engine's key and prompts go only to the engine."""
    elsewhere = ScriptedHttp()
    elsewhere.answers["GET /health"] = elsewhere.answers["POST /x"] = JSONResponse({})
    async with scripted_http(elsewhere) as url:
        for status in (301, 302, 303, 307, 308):
            to = Response(status_code=status, headers={"location": f"{url}/x"})
            server.answers |= {"GET /health": to, GENERATE: to}
            assert not await http.is_healthy()
            with pytest.raises(EngineRefusedError, match=str(status)):
                await read(http)
            with pytest.raises(EngineRefusedError, match=str(status)):
                await http.json("POST", "/generate", {"prompt": 1})
    assert elsewhere.headers == []


def endless(part: bytes, status: int = 200) -> Callable[[], Response]:
    async def body() -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(0)  # so that the server sees its reader leave
            yield part

    return lambda: StreamingResponse(body(), status)


async def test_an_answer_without_an_end_is_given_up(server: ScriptedHttp, http: EngineServer) -> None:
    server.answers |= {"GET /metrics": endless(b"x" * 65536), GENERATE: endless(b"data: " + b"x" * 65536)}
    with pytest.raises(EngineLostError, match="more than 16 MiB"):
        await http.call("GET", "/metrics", timeout_s=None)
    with pytest.raises(EngineLostError, match="more than 16 MiB"):
        await read(http)
    long = {"prompt_token_ids": [123_456] * 700_000}
    server.answers[GENERATE] = sse(long)
    assert len(await read(http)) == 1, "the ids of a long prompt are one event"
    server.answers[GENERATE] = endless(b"x" * 65536, 500)
    with pytest.raises(EngineRefusedError, match="xxx"):
        await read(http)


@pytest.mark.parametrize(
    "answer",
    [
        PlainTextResponse("<html>"),
        PlainTextResponse("[" * 100_000),
        JSONResponse([]),
        JSONResponse({"data": 1}),
        JSONResponse({"data": [1]}),
        JSONResponse({"data": [{"id": "m"}]}),
        JSONResponse({"data": [{"id": "m", "max_model_len": "long"}]}),
        JSONResponse({"tokens": "x"}),
        JSONResponse({"tokens": [None]}),
    ],
)
async def test_what_answers_as_no_engine_is_a_lost_one(
    server: ScriptedHttp, http: EngineServer, answer: Response
) -> None:
    server.answers |= {"GET /v1/models": answer, "POST /tokenize": answer}
    with pytest.raises(EngineLostError):
        await http.model()
    with pytest.raises(EngineLostError):
        await http.tokenize("x")
