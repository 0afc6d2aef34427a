"""`headstart batch`: what it reads, in which order, what it writes, and where it goes on."""

from __future__ import annotations

import asyncio
import fcntl
import io
import json
from collections.abc import Sequence
from itertools import pairwise, takewhile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from server.cli import batch
from server.cli.common import BAD_USAGE
from tests.server.cli.commands import status_of
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.server.test_app import chat

CHATS = "/v1/chat/completions"


def line(custom_id: str, body: object = None, **fields: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": "POST", "url": CHATS, "body": chat() if body is None else body, **fields}


class Files:
    """The two files of a batch."""

    def __init__(self, folder: Path) -> None:
        self.requests, self.answers = folder / "in.jsonl", folder / "out.jsonl"

    def ask(self, *lines: object) -> None:
        self.requests.write_text("".join(json.dumps(each) + "\n" for each in lines))

    async def run(self, url: str, *options: str) -> int:
        return await asyncio.to_thread(
            status_of, "batch", str(self.requests), str(self.answers), "--url", url, *options
        )

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the answers by custom_id, each of which is there once."""
        answers = [json.loads(text) for text in self.answers.read_text().splitlines()]
        assert len({answer["custom_id"] for answer in answers}) == len(answers)
        return {answer["custom_id"]: answer for answer in answers}


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


async def test_a_second_run_answers_only_the_lines_that_are_left(
    worker: ScriptedWorker, files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every line gets its answer; a second run asks only for those that are missing."""
    lines = [line(f"r{i}", chat(max_tokens=i + 1)) for i in range(5)]
    completion = line("c", {"model": "tiny", "prompt": "x"}, url="/v1/completions")
    files.ask(*lines, line("bad", {"model": "tiny"}), line("none", chat(model="none")), completion)
    async with gateway(worker) as target:
        assert await files.run(target.url) == 0
        answers = files.read()
        for i in range(5):
            answer = answers[f"r{i}"]
            assert set(answer) == {"id", "custom_id", "response", "error"}
            assert answer["error"] is None
            assert answer["response"]["status_code"] == 200
            assert answer["response"]["request_id"].startswith("req_")
            assert answer["response"]["body"]["usage"]["completion_tokens"] == i + 1
        assert (answers["bad"]["response"]["status_code"], answers["none"]["response"]["status_code"]) == (400, 404)
        assert answers["bad"]["response"]["body"]["error"]["param"] == "messages"
        assert answers["c"]["response"]["body"]["object"] == "text_completion"
        assert "8 of 8 lines have an answer (0 from before, 2 refused)" in capsys.readouterr().out
        num_received = len(worker.received)

        before = files.answers.read_bytes()
        kept = b"".join(before.splitlines(keepends=True)[:-2])
        last, later = before[len(kept) :].splitlines(keepends=True)
        edited = json.dumps(json.loads(last)).encode()  # without a last newline
        for torn in (b"", last[:5], last[:-1], edited, last + later[:40]):
            files.answers.write_bytes(kept + torn)
            assert await files.run(target.url + "/v1/") == 0, "with or without /v1"
            assert files.read().keys() == answers.keys()
            assert files.answers.read_bytes().startswith(kept)
        assert "8 of 8 lines have an answer (7 from before" in capsys.readouterr().out
        assert len(worker.received) <= num_received + 4 * 2


PIECES = st.sampled_from(["You are a careful assistant. ", "x" * 100, "Answer in one word. " * 20, "y", "z" * 64])


def shared(texts: Sequence[str]) -> int:
    """Count the characters that lines find done by the line before."""
    pairs = [zip(before, text, strict=False) for before, text in pairwise(texts)]
    return sum([sum(1 for _ in takewhile(lambda each: each[0] == each[1], pair)) for pair in pairs])


@given(st.lists(st.lists(PIECES, max_size=5).map("".join), max_size=30))
def test_lines_with_a_common_prefix_follow_each_other(texts: list[str]) -> None:
    """They share what lines sorted by text do, but for the last piece of each."""
    lines = [line(str(i), {"prompt": text}, url="/v1/completions") for i, text in enumerate(texts)]
    file = io.BytesIO(b"".join(json.dumps(each).encode() + b"\n" for each in lines))
    places = batch.read_requests(file, "in", by_prefix=True)
    order = [texts[int(custom_id)] for custom_id in sorted(places, key=lambda each: places[each])]
    assert sorted(order) == sorted(texts)
    assert shared(order) >= shared(sorted(texts)) - batch.CHUNK_BYTES * len(texts)


def test_the_order_of_the_file_is_kept_on_request(files: Files) -> None:
    files.ask(*(line(str(i), {"prompt": str(i * 7919 % 10)}) for i in range(10)))
    with files.requests.open("rb") as file:
        places = batch.read_requests(file, "in", by_prefix=False)
    assert sorted(places, key=lambda each: places[each]) == [str(i) for i in range(10)]


@pytest.mark.parametrize(
    ("second", "what"),
    [
        ("{", "line 3: "),
        ("[]", "line 3: "),
        (json.dumps({"custom_id": "x"}), "line 3: Object missing required field `method`"),
        (json.dumps(line("")), "`$.custom_id`"),
        (json.dumps(line("a")), "an earlier line has the custom_id 'a' too"),
        (json.dumps(line("b", method="GET")), "`$.method`"),
        (json.dumps(line("b", url="/metrics")), "`$.url`"),
        (json.dumps(line("b", [])), "`$.body`"),
        (json.dumps(line("b", chat(stream=True))), "leave body.stream out"),
    ],
)
def test_a_bad_line_is_named_before_anything_is_sent(
    files: Files, capsys: pytest.CaptureFixture[str], second: str, what: str
) -> None:
    files.requests.write_text(f"{json.dumps(line('a'))}\n\n{second}\n")
    assert status_of("batch", str(files.requests), str(files.answers), "--url", "http://127.0.0.1:1") == BAD_USAGE
    error = capsys.readouterr().err
    assert what in error
    assert f"{files.requests}, line 3: " in error
    assert not files.answers.exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--url", "localhost:8000"),
        ("--url", "http://h:99999"),
        ("--timeout-s", "inf"),
        ("--api-key-file", "{empty}"),
        ("--api-key-file", "{lines}"),
        ("--api-key-file", "{bytes}"),
        ("--ca-file", "{empty}"),
        ("--ca-file", "{nothing}"),
    ],
)
def test_an_option_that_cannot_work_is_named(
    files: Files, tmp_path: Path, option: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    files.ask(line("a"))
    contents = {"empty": b"", "lines": b"one\ntwo", "bytes": b"\xff"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    given = value.format(**{name: tmp_path / name for name in (*contents, "nothing")})
    arguments = (str(files.requests), str(files.answers), "--url", "http://127.0.0.1:1", "--retry-s", "0")
    assert status_of("batch", *arguments, option, given) == BAD_USAGE
    error = capsys.readouterr().err
    assert (option in error, given in error) == (True, True), error


def test_a_server_that_is_not_there_is_named_at_once(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.ask(line("a"))
    url = "http://127.0.0.1:1"
    assert status_of("batch", str(files.requests), str(files.answers), "--url", url, "--retry-s", "0") == 1
    assert f"{url}: Connect call failed" in (error := capsys.readouterr().err.splitlines()[0])
    assert error.endswith("trying again for 0 s")


def test_a_file_of_something_else_is_left_as_it_is(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.ask(line("a"))
    answer = {"id": "batch_req_1", "custom_id": "b", "response": {"status_code": 200, "request_id": "", "body": {}}}
    for text, what in (
        ("my notes", "line 1 is no answer"),
        ('{"id":"x"}\nmy notes', "line 1 is no answer"),
        (files.requests.read_text(), "line 1 is no answer"),
        (json.dumps(answer) + "\n", "has an answer to 'b', which"),
    ):
        files.answers.write_text(text)
        assert status_of("batch", str(files.requests), str(files.answers)) == BAD_USAGE
        assert what in capsys.readouterr().err
        assert files.answers.read_text() == text
    with files.answers.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert status_of("batch", str(files.requests), str(files.answers)) == 1
        assert "another run writes to" in capsys.readouterr().err


class Moody:
    """A server that answers each request by a script, found by its custom text."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.script: dict[str, list[Response]] = {}
        self.delays_s: dict[str, float] = {}

    def app(self) -> Starlette:
        app = Starlette()
        app.add_route(CHATS, self.answer, methods=["POST"])
        return app

    async def answer(self, request: Request) -> Response:
        name = (await request.json())["name"]
        self.asked.append(name)
        await asyncio.sleep(self.delays_s.get(name, 0.0))
        script = self.script.get(name, [])
        return script.pop(0) if len(script) > 1 else script[0] if script else JSONResponse({"ok": name})


async def test_failures_are_tried_again_and_written_only_when_final(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Moody()
    server.script = {
        "busy": [JSONResponse({"error": {}}, 429, {"retry-after": "0"}), JSONResponse({"a": 1.50, "b": "\n"})],
        "broken": [PlainTextResponse("boom", 500)],
        "poison": [JSONResponse({}, 500, {"x-should-retry": "false"})],
        "down": [Response(status_code=503), JSONResponse({"usage": None})],
    }
    files.ask(*(line(name, {"name": name}) for name in ("busy", "broken", "down", "well", "poison")))
    async with listening(server.app()) as url:
        assert await files.run(url, "--retry-s", "2") == 1
        error = capsys.readouterr().err
        assert "no answer to broken: 500 boom" in error
        assert "2 lines are left; run it again" in error
        assert files.read().keys() == {"busy", "down", "well"}
        assert server.asked.count("broken") >= 2
        assert server.asked.count("poison") == 1, "each try may kill workers"

        server.asked.clear()
        del server.script["broken"], server.script["poison"]
        assert await files.run(url) == 0
        assert sorted(server.asked) == ["broken", "poison"]
        assert files.read()["broken"]["response"]["body"] == {"ok": "broken"}


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (JSONResponse({"error": {"message": "wrong key"}}, 401), "answered 401"),
        (PlainTextResponse("<html>\n not here", 404), "answered 404: <html> not here; check --url"),
        (PlainTextResponse("hello"), "answered 200: hello; check --url"),
    ],
)
async def test_what_no_line_would_survive_ends_the_run(
    files: Files, capsys: pytest.CaptureFixture[str], answer: Response, what: str
) -> None:
    server = Moody()
    server.script = {"a": [answer]}
    files.ask(*(line(str(i), {"name": "a"}) for i in range(200)))
    async with listening(server.app()) as url:
        assert await files.run(url, "--concurrency", "2") == 1
    assert what in capsys.readouterr().err
    assert len(server.asked) <= 4
    assert files.read() == {}


async def test_a_server_that_is_gone_ends_the_run(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    files.ask(line("a"))
    assert await files.run("http://127.0.0.1:1", "--retry-s", "0") == 1
    assert "run it again to go on" in capsys.readouterr().err


async def test_a_slow_line_ends_no_others(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    """While the server answers them, it is not gone."""
    server = Moody()
    server.delays_s = {"slow": 60.0, "steady": 0.25}
    files.ask(line("slow", {"name": "slow"}), *(line(str(i), {"name": "steady"}) for i in range(16)))
    options = ("--order", "file", "--concurrency", "2", "--timeout-s", "1", "--retry-s", "1")
    async with listening(server.app()) as url:
        assert await files.run(url, *options) == 1
    assert "no answer to slow: " in capsys.readouterr().err
    assert len(files.read()) == 16


async def test_the_key_is_sent_and_bodies_arrive_as_written(files: Files, tmp_path: Path) -> None:
    got: list[tuple[str, bytes]] = []

    async def answer(request: Request) -> Response:
        got.append((request.headers["authorization"], await request.body()))
        return JSONResponse({})

    app = Starlette()
    app.add_route(CHATS, answer, methods=["POST"])
    body = '{"name":"ü","top_p":0.10000000000000000001,"logit_bias":{"1":1e2},"n":12345678901234567890}'
    files.requests.write_text(f'{{"custom_id":"a","method":"POST","url":"{CHATS}","body":{body}}}')
    key = tmp_path / "key"
    key.write_text("secret\n")
    async with listening(app) as url:
        assert await files.run(url, "--api-key-file", str(key)) == 0
    assert got == [("Bearer secret", body.encode())]
