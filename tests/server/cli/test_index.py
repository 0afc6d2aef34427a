"""`headstart index` over a real gateway process, with a real Redis."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cache.records import WorkerLoad
from cache.redis_index import IndexWriter, WriterSettings
from cache.types import Epoch, IndexEntry, WorkerId
from server import cli
from server.cli.common import plain_console
from server.cli.index import COUNTS, shown
from tests.redis_server import RedisServer, newest_redis
from tests.running import running
from tests.server.cli.commands import status_of
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.server.test_app import chat, post
from tests.server.test_gateway import gateway_process
from tests.waiting import until
from worker.wire import Failed

WRITER = WriterSettings(prefix="team-a", num_shards=2, lease_s=600.0)


@pytest.fixture
def redis() -> Iterator[RedisServer]:
    binary = newest_redis()
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder), binary) as server:
        yield server


@asynccontextmanager
async def published(redis: RedisServer, worker: ScriptedWorker) -> AsyncIterator[None]:
    """`worker` holds 20 blocks; `w1` holds 3, as many on disk, and its lease has ended."""
    other = replace(worker.member(), worker_id=WorkerId("w1"), epoch=Epoch("epoch-w1"), tiers=("disk",))
    writers = [
        IndexWriter(redis.url, worker.member(), WRITER),
        IndexWriter(redis.url, other, replace(WRITER, lease_s=0.0)),
    ]
    async with running(*writers):
        for writer, count in zip(writers, (20, 3), strict=True):
            held = [IndexEntry(os.urandom(8)) for _ in range(count)]

            async def stands(writer: IndexWriter = writer, held: list[IndexEntry] = held) -> bool:
                below = [held] * len(writer.member.tiers)
                return writer.client.up and await writer.rewrite(held, WorkerLoad(num_running=2), below)

            await until(stands)
        yield


async def headstart(*arguments: str) -> int:
    return await asyncio.to_thread(cli.main, ["index", *arguments])


async def test_it_reads_a_gateway_and_a_redis_and_empties_a_worker(
    redis: RedisServer, worker: ScriptedWorker, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "ops.key"
    key.write_text("an ops key\n")
    layout = ("--redis", redis.url, "--redis-prefix", "team-a", "--redis-shards", "2")
    async with (
        listening(worker.app()) as worker.url,
        published(redis, worker),
        gateway_process("--workers", worker.url, *layout, "--ops-key-file", str(key)) as gateway,
    ):
        await gateway.until_ready()

        async def answer(*arguments: str) -> Any:
            assert await headstart(*arguments, "--json") == 0
            return json.loads(capsys.readouterr().out)

        live, lapsed = (await answer("--ops", gateway.ops))["workers"]
        assert (live["worker_id"], live["blocks"], live["tokens"], live["live"]) == ("w0", 20, 320, True)
        assert 0 < live["lease_left_s"] <= WRITER.lease_s
        assert 0 <= live["lease_age_s"] < WRITER.lease_s
        assert (lapsed["worker_id"], lapsed["blocks"], lapsed["live"]) == ("w1", 3, False)
        assert (live["tier_blocks"], lapsed["tier_blocks"]) == ({}, {"disk": 3})
        assert (await answer("--ops", gateway.ops, "--model", "another"))["workers"] == []
        assert await headstart("--ops", gateway.ops) == 0
        heading, first, second = capsys.readouterr().out.splitlines()
        assert heading.split()[:4] == ["worker", "model", "blocks", "tokens"]
        assert first.split()[:3] + first.split()[-2:] == ["w0", "tiny", "20", "epoch-w0", "live"]
        assert second.split()[-4:] == ["disk", "3", "epoch-w1", "lapsed"]

        for worker.num_cached_tokens in (16, 16, 32):
            await post(gateway.url, chat(messages=[{"role": "user", "content": "the cat sat " * 20}]))
        system, turn = (await answer("prefixes", "--ops", gateway.ops))["prefixes"]
        assert (system["num_hits"], system["num_tokens"], turn["num_hits"], turn["num_tokens"]) == (3, 16, 1, 32)
        assert turn["path"] == [system["hash"], turn["hash"]]
        assert len((await answer("prefixes", "--limit", "1", "--ops", gateway.ops))["prefixes"]) == 1
        assert (await answer("prefixes", "--model", "another", "--ops", gateway.ops))["prefixes"] == []
        assert await headstart("prefixes", "--ops", gateway.ops) == 0
        assert f"{system['hash']} .. {turn['hash']}" in capsys.readouterr().out

        assert await headstart("purge", "w0", "--ops", gateway.ops) == 1
        assert "answered 401: The ops key is needed" in capsys.readouterr().err
        keyed = ("--ops", gateway.ops, "--ops-key-file", str(key))
        assert await answer("purge", "w0", *keyed) == {"worker": "w0", "epoch": "epoch-after-purge"}
        worker.refuses_purge = Failed("invalid_request", "no /reset_prefix_cache", retryable=False)
        assert await headstart("purge", "w0", *keyed) == 1
        assert "Worker w0 did not purge: 400 invalid_request: no /reset_prefix_cache." in capsys.readouterr().err
        assert await headstart("purge", "w9", *keyed) == 1
        assert "There is no worker 'w9'" in capsys.readouterr().err

        redis.kill()
        assert await headstart("--ops", gateway.ops) == 1
        assert "answered 503: Redis does not answer" in capsys.readouterr().err


def test_a_model_cannot_command_the_terminal() -> None:
    """Whoever can write to Redis names it."""
    row = {"worker_id": "w", "model": "m\x1b[2J", "epoch": "e", "tier_blocks": {}, "live": True, "draining": False}
    row |= dict.fromkeys((*COUNTS, "lease_left_s", "lease_age_s"), 1)
    with (console := plain_console(200)).capture() as captured:
        console.print(shown("workers", {"workers": [row]}))
    assert r"'m\x1b[2J'" in captured.get()
    assert "\x1b" not in captured.get()


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--ops", "http://127.0.0.1:1"], 1, "no gateway's ops port at http://127.0.0.1:1"),
        (["purge"], 2, "name the worker: headstart index purge WORKER"),
        (["workers", "w0"], 2, "only `purge` takes a worker, got 'w0'"),
        (["purge", "w0", "--ops-key-file", "/nowhere"], 2, "--ops-key-file: the file /nowhere: No such file or"),
    ],
)
def test_errors_are_reported(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert status_of("index", *arguments) == status
    assert message in capsys.readouterr().err
