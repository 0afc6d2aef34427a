"""`headstart doctor --engine-url` before a fake engine, set up well and wrong."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from server import cli
from server.cli import doctor
from server.cli.doctor import verdict
from tests import smollm2
from tests.e2e.serving import free_ports
from tests.fake_engine.server import FakeEngine, parse
from tests.fake_engine.sglang import FakeSglang
from tests.fake_engine.sglang import parse as parse_sglang
from tests.server.conftest import CHATML
from tests.server.scripted_worker import listening
from worker.common.checks import Check

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The parts of a model that the fake engine needs: its tokenizer and template."""
    path = tmp_path_factory.mktemp("model")
    smollm2.tokenizer().save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML, "eos_token": "<|im_end|>"}))
    (path / "config.json").write_text(json.dumps({"vocab_size": 49152, "eos_token_id": 2}))
    return path


@asynccontextmanager
async def engine(folder: Path, *options: str) -> AsyncIterator[str]:
    """The URL of a fake engine. E and R in its options stand for ports of events and replay."""
    ports = dict(zip("ER", map(str, free_ports(2)), strict=True))
    argv = [option.replace(":E", f":{ports['E']}").replace(":R", f":{ports['R']}") for option in options]
    fake = FakeEngine(parse([str(folder), "--port", "0", *argv]))
    try:
        async with listening(fake.app) as url:
            yield url
    finally:
        fake.close()


DOCTOR = ("doctor", "--json", "--port", "0", "--ops-port", "0")
EVENTS = ("--events", "tcp://127.0.0.1:E", "--replay", "tcp://127.0.0.1:R")


async def checks_of(url: str, *options: str) -> dict[str, Check]:
    args = doctor.parser().parse_args(["--engine-url", url, *options])
    return {check.name: check for check in await doctor.engine_checks(args, url)}


async def test_a_healthy_engine_passes_and_the_command_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_text("k1")
    async with engine(folder, *EVENTS, "--api-key", "k1", "--lora", "poet") as url:
        options = ["--engine-url", url, "--engine-key-file", str(key)]
        assert await asyncio.to_thread(cli.main, [*DOCTOR, *options]) == 0
        found = json.loads(capsys.readouterr().out)
        refused = await checks_of(url)
    names = ["engine", "model", "blocks", "tokenizer", "caching", "salt", "stream", "events", "replay"]
    assert [check["name"] for check in found["checks"]][-len(names) :] == names
    assert {check["status"] for check in found["checks"] if check["name"] in names} == {"ok"}, found
    assert (refused["model"].status, "--engine-key-file" in refused["model"].fix) == ("fail", True)


async def test_each_of_several_engines_is_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An engine that is down fails the command, whichever place it has."""
    gone = f"http://127.0.0.1:{free_ports(1)[0]}"
    async with engine(folder, *EVENTS) as first, engine(folder, *EVENTS) as second:
        for urls in ([first, gone, second], [gone, first], [first, second]):
            options = [word for url in urls for word in ("--engine-url", url)]
            status = await asyncio.to_thread(cli.main, [*DOCTOR, *options])
            found = [check for check in json.loads(capsys.readouterr().out)["checks"] if check["name"] == "engine"]
            assert status == (gone in urls)
            assert [check["found"].partition(": ")[0] for check in found] == urls
            assert [check["status"] == "fail" for check in found] == [url == gone for url in urls]


async def test_an_engine_that_is_not_there() -> None:
    checks = await checks_of(f"http://127.0.0.1:{free_ports(1)[0]}")
    assert [(check.name, check.status) for check in checks.values()] == [("engine", "fail")]
    assert "start the engine" in checks["engine"].fix


@pytest.mark.parametrize(
    ("options", "asked", "wrong", "fix"),
    [
        ([*EVENTS, "--no-prefix-caching"], [], {"caching": "fail"}, "--enable-prefix-caching"),
        ([*EVENTS, "--ignore-salt"], [], {"salt": "fail", "events": "fail"}, "tenants see each other's cache"),
        ([*EVENTS, "--tokenizer-shift", "1"], [], {"tokenizer": "fail"}, "--tokenizer FOLDER"),
        (EVENTS, ["--block-size", "24"], {"blocks": "warn"}, "--block-size 32"),
        ([], [], {"events": "fail"}, "--kv-events-config"),
        ([], ["--events", "none"], {"events": "warn"}, "--kv-events-config"),
        (["--events", "tcp://*:E", *EVENTS[2:]], [], {"events": "fail"}, "tcp://127.0.0.1"),
        (EVENTS[:2], [], {"replay": "warn"}, "replay_endpoint"),
    ],
)
async def test_what_is_set_up_wrong_is_named(
    folder: Path, options: list[str], asked: list[str], wrong: dict[str, str], fix: str
) -> None:
    await check_is_named(folder, options, asked, wrong, fix)


async def check_is_named(
    folder: Path, options: Sequence[str], asked: list[str], wrong: dict[str, str], fix: str
) -> None:
    async with engine(folder, *options) as url:
        checks = await checks_of(url, *asked)
    assert {name: check.status for name, check in checks.items() if check.status != "ok"} == wrong, checks
    assert fix in checks[next(iter(wrong))].fix
    assert verdict([*checks.values()])[0] == ("fail" in wrong.values())


async def test_events_that_never_come_are_missed(folder: Path) -> None:
    """All at once: each listens for seconds."""
    silent, both = {"events": "fail"}, {"events": "fail", "replay": "warn"}
    await asyncio.gather(
        check_is_named(folder, [*EVENTS, "--said-events", "tcp://127.0.0.1:1997"], [], silent, "network namespace"),
        check_is_named(folder, EVENTS, ["--events", "tcp://127.0.0.1:1998"], both, "leave out --events"),
        check_is_named(folder, EVENTS, ["--events-exposed", "--events", "tcp://*:1999"], both, "leave out"),
    )


async def test_the_replay_is_checked_even_if_the_port_is_taken(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as worker:
        events = f"tcp://127.0.0.1:{worker.getsockname()[1]}"
        async with engine(folder, "--events", events, *EVENTS[2:]) as url:
            checks = await checks_of(url)
    assert (checks["events"].status, checks["replay"].status) == ("warn", "ok")
    assert "end the worker" in checks["events"].fix


async def test_a_model_without_text_needs_no_cache(folder: Path) -> None:
    """Neither caching nor events: requests for it are routed by load."""
    fake = FakeEngine(parse([str(folder), "--port", "0", "--no-prefix-caching"]))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if path == "/v1/embeddings":
            await JSONResponse({"error": {"message": "field required"}}, 400)(scope, receive, send)
        elif path.startswith("/v1/") and path != "/v1/models":
            await JSONResponse({}, 404)(scope, receive, send)
        else:
            await fake.app(scope, receive, send)

    try:
        async with listening(app) as url:
            checks = await checks_of(url)
    finally:
        fake.close()
    assert [name for name, check in checks.items() if check.status != "ok"] == [], checks
    assert "routed by load" in checks["events"].found
    assert "caching" not in checks


@asynccontextmanager
async def sglang(folder: Path, *options: str) -> AsyncIterator[str]:
    events, replay = (f"tcp://127.0.0.1:{port}" for port in free_ports(2))
    fake = FakeSglang(parse_sglang([str(folder), "--port", "0", "--events", events, "--replay", replay, *options]))
    try:
        async with listening(fake.app) as url:
            yield url
    finally:
        fake.close()


@pytest.mark.parametrize("options", [(), ("--eagle",)])
async def test_sglang_passes(folder: Path, options: tuple[str, ...]) -> None:
    async with sglang(folder, *options) as url:
        checks = await checks_of(url, "--engine", "sglang", "--block-size", "16")
    assert {check.status for check in checks.values()} == {"ok"}, checks


async def test_an_old_sglang_has_no_index(folder: Path) -> None:
    async with sglang(folder, "--version", "0.5.18", "--layout", "arrays", "--old-paths") as url:
        checks = await checks_of(url, "--engine", "sglang", "--block-size", "16")
        asked = await checks_of(url, "--engine", "sglang", "--block-size", "16", "--events", "none")
    assert "no prefix index: the cache events of SGLang 0.5.18 carry no salt" in checks["events"].found
    assert (checks["events"].status, asked["events"].status) == ("fail", "warn")
    assert checks["salt"].status == "ok"
