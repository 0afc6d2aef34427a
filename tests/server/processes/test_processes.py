"""`headstart gateway --processes N`, real processes: one port, one page of metrics, one budget a key, one drain."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
import psutil
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families
from tokenizers import Tokenizer

from server.auth.api_keys import digest_text
from tests.server.ops.test_console import events
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.server.sse_grammar import check_chat
from tests.server.test_app import ANSWER, chat
from tests.server.test_gateway import Process, gateway_process
from tests.waiting import HANG_S, until
from worker.wire import TokenizerBundle

NUM_PROCESSES = 2
LIMITED, FREE = "limited-key", "free-key"
PER_MINUTE = 10


pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def worker(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> ScriptedWorker:
    return ScriptedWorker(bundle, reply=raw_tokenizer.encode(ANSWER).ids)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(worker: ScriptedWorker, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Process]:
    """One for all: the last test ends it."""
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    limit = f"requests_per_minute = {PER_MINUTE}"
    keys.write_text(
        "\n".join(
            f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "one"\n{extra}\n'
            for key, extra in ((LIMITED, limit), (FREE, ""))
        )
    )
    options = ("--processes", str(NUM_PROCESSES), "--api-keys", str(keys), "--drain-grace-s", "10")
    async with (
        listening(worker.app()) as worker.url,
        gateway_process("--workers", worker.url, *options) as running,
    ):
        await running.until_ready()
        yield running


def children(gateway: Process) -> list[psutil.Process]:
    found = psutil.Process(gateway.process.pid).children()
    return [child for child in found if "server.processes.process" in child.cmdline()]


async def ask(gateway: Process, key: str, count: int) -> list[int]:
    """The statuses of so many requests, each on a connection of its own."""

    async def one() -> int:
        headers = {"authorization": f"Bearer {key}"}
        async with (
            aiohttp.ClientSession() as session,
            session.post(gateway.url + "/v1/chat/completions", json=chat(), headers=headers) as response,
        ):
            await response.read()
            return response.status

    return list(await asyncio.gather(*(one() for _ in range(count))))


async def answered(gateway: Process) -> float:
    """The chat requests that were answered with 200, of the whole."""
    _, page = await gateway.get(gateway.ops + "/metrics")
    return sum(
        sample.value
        for family in text_string_to_metric_families(page)
        for sample in family.samples
        if sample.name == "headstart_requests_total" and sample.labels == {"route": "chat", "status": "200"}
    )


async def test_what_processes_count_is_one(gateway: Process, worker: ScriptedWorker) -> None:
    before = await answered(gateway)
    async with (
        asyncio.timeout(HANG_S),
        aiohttp.ClientSession() as session,
        session.get(gateway.ops + "/events") as response,
    ):
        feed = events(response)
        name, _ = await anext(feed)
        assert name == "hello"
        assert await ask(gateway, FREE, 40) == [200] * 40
        served = {request.gateway_id for request in worker.received}
        assert len(served) == NUM_PROCESSES, "requests reach every process"
        assert await answered(gateway) == before + 40
        assert Counter(await ask(gateway, LIMITED, 2 * PER_MINUTE)) == {200: PER_MINUTE, 429: PER_MINUTE}
        while name != "decisions":  # the feed follows the processes from its second look on
            await ask(gateway, FREE, 4)
            name, news = await anext(feed)
        assert news["decisions"][0]["worker"] == "w0"
    _, page = await gateway.get(gateway.ops + "/metrics")
    assert 'headstart_workers{model="tiny",state="serving"} 1.0' in page, "what all see is not added up"
    status, _ = await gateway.get(gateway.ops + "/workers")
    assert status == 200


async def test_a_killed_process_is_replaced_and_its_counts_stay(gateway: Process, worker: ScriptedWorker) -> None:
    await ask(gateway, FREE, 20)
    before = await answered(gateway)
    killed = children(gateway)[0]
    killed.kill()
    statuses = await ask(gateway, FREE, 20)
    assert statuses == [200] * 20, "what comes to its socket waits for the next process"
    await until(lambda: len(children(gateway)) == NUM_PROCESSES and killed not in children(gateway))
    assert await answered(gateway) == before + 20


async def test_one_signal_drains_all(gateway: Process, worker: ScriptedWorker) -> None:
    worker.pace_s = 0.1
    worker.received.clear()
    headers = {"authorization": f"Bearer {FREE}"}
    processes = children(gateway)

    async def stream() -> bytes:
        async with (
            aiohttp.ClientSession() as session,
            session.post(gateway.url + "/v1/chat/completions", json=chat(stream=True), headers=headers) as response,
        ):
            return await response.read()

    streams = [asyncio.create_task(stream()) for _ in range(12)]
    await until(lambda: worker.num_running == 12)
    assert len({request.gateway_id for request in worker.received}) == NUM_PROCESSES
    gateway.process.send_signal(signal.SIGTERM)
    for raw in await asyncio.gather(*streams):
        assert check_chat(raw) == [ANSWER]
    async with asyncio.timeout(HANG_S):
        assert await gateway.process.wait() == 0
    assert not any(process.is_running() for process in processes)


async def test_a_process_that_cannot_start_ends_the_whole(tmp_path: Path) -> None:
    options = ("--workers", "http://127.0.0.1:9", "--processes", "2", "--api-keys", str(tmp_path / "none.toml"))
    async with asyncio.timeout(HANG_S), gateway_process(*options) as gateway:
        assert await gateway.process.wait() == 2
