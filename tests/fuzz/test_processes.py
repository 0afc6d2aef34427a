"""A real gateway process while Redis holds and answers garbage: it goes on, and every request is served."""

from __future__ import annotations

import asyncio
import json
import random
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Final

import pytest
import redis
from tokenizers import Tokenizer

from cache.records import WorkerLoad
from cache.redis_index import WriterSettings
from tests.fuzz.garbage import attack
from tests.fuzz.harness import SEED
from tests.fuzz.redis_proxy import Proxy, random_fault
from tests.fuzz.rig import PUBLISHER, SECRET, Parts, keys_of
from tests.redis_server import RedisServer, redis_binaries, until
from tests.server.conftest import ANSWER
from tests.server.scripted_worker import ProvenWorker, listening
from tests.server.test_app import chat, post
from tests.server.test_gateway import gateway_process
from worker.publisher import Publisher, PublisherInbox
from worker.wire import TokenizerBundle

NUM_ROUNDS: Final = 150
NUM_DEEP_ROUNDS: Final = 5_000


async def _besiege(bundle: TokenizerBundle, reply: list[int], folder: Path, num_rounds: int) -> None:
    rng = random.Random(SEED)
    workers = [ProvenWorker(bundle, f"w{number}", reply=reply, secret=SECRET) for number in range(2)]
    secret = folder / "secret"
    secret.write_bytes(SECRET)
    binary = next(iter(redis_binaries().values()))
    parts, answers, ended = Parts(), list[tuple[int, bytes]](), asyncio.Event()
    async with AsyncExitStack() as stack:
        server = stack.enter_context(RedisServer(folder, binary))
        store = redis.Redis(unix_socket_path=str(server.socket))
        stack.callback(store.close)
        read, write = Proxy(server.socket, folder / "read"), Proxy(server.socket, folder / "write")
        for proxy in (read, write):
            await stack.enter_async_context(proxy.listening())
        stack.push_async_callback(parts.stop)
        for worker in workers:
            worker.url = await stack.enter_async_context(listening(worker.app()))
            settings = WriterSettings(cluster_secret=SECRET, timeout_s=1.0)
            publisher = Publisher(
                f"unix://{write.path}", worker.member(), PublisherInbox(), settings=PUBLISHER, writer_settings=settings
            )
            publisher.inbox.offer([], WorkerLoad())
            parts.add(f"the publisher of {worker.worker_id}", publisher.run())
        arguments = ("--redis", f"unix://{read.path}", "--cluster-secret-file", str(secret))
        gateway = await stack.enter_async_context(gateway_process(*arguments))
        await gateway.until_ready()

        async def client() -> None:
            while not ended.is_set():
                status, _, body = await post(gateway.url, chat())
                answers.append((status, body[:200]))
                await asyncio.sleep(0.005)

        async def listed() -> bool:
            """By GET /index: every worker, with a lease."""
            status, text = await gateway.get(f"{gateway.ops}/index")
            return status == 200 and sum(entry["live"] for entry in json.loads(text)["workers"]) == len(workers)

        await until(listed)
        async with asyncio.TaskGroup() as clients:
            for _ in range(2):
                clients.create_task(client())
            for _ in range(num_rounds):
                attack(rng, store, keys_of("headstart"), ["w0", "w1"])
                if rng.random() < 0.3:
                    rng.choice([read, write]).faults = [random_fault(rng)]
                await asyncio.sleep(0.01)
            ended.set()
        failed = [answer for answer in answers if answer[0] != 200]
        assert not failed, f"{len(failed)} of {len(answers)} requests failed: {failed[:3]}"
        parts.check()
        read.faults, write.faults = [], []
        store.delete(*(b"{headstart:0}:" + name for name in (b"members", b"states", b"version")))
        assert gateway.process.returncode is None
        await until(listed)
        assert len(answers) > num_rounds / 20, "too few requests to prove anything"
        _, metrics = await gateway.get(f"{gateway.ops}/metrics")
        assert "headstart_index_events_total{" in metrics, "nothing was counted"


async def test_a_gateway_serves_while_redis_holds_garbage(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await _besiege(bundle, raw_tokenizer.encode(ANSWER).ids, Path(folder), NUM_ROUNDS)


@pytest.mark.deep
async def test_a_gateway_serves_while_redis_holds_much_garbage(
    bundle: TokenizerBundle, raw_tokenizer: Tokenizer
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        await _besiege(bundle, raw_tokenizer.encode(ANSWER).ids, Path(folder), NUM_DEEP_ROUNDS)
