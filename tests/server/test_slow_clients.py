"""Clients that do not read hold up their own stream at the worker, and nothing else."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

from tests.server.conftest import ANSWER
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.sse_grammar import check_chat
from tests.server.test_app import chat, post
from tests.waiting import HANG_S, until
from worker.common.http_client import HIGH_WATER_BYTES
from worker.wire import Frame, GenerateRequest, Started, Tokens

NUM_SLOW = 3


def connected(port: int) -> socket.socket:
    """With a small window, so that little is on its way unseen."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.connect(("127.0.0.1", port))
    return client


def stream_request() -> bytes:
    body = json.dumps(chat(stream=True, max_tokens=7)).encode()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    return head + b"content-length: %d\r\n\r\n" % len(body) + body


async def test_slow_reader_stops_only_its_own_stream(worker: ScriptedWorker) -> None:
    sent: dict[str, int] = {}

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        if request.sampling.max_tokens == 7:
            yield Started(0)
            while True:
                sent[request.request_id] = sent.get(request.request_id, 0) + 1000
                yield Tokens(0, tuple(worker.reply[:1]) * 1000)
                await asyncio.sleep(0)
        else:
            async for frame in worker.answer(request):
                yield frame

    worker.behave = behave
    async with gateway(worker) as target:
        port = int(target.url.rpartition(":")[2])
        slow = [connected(port) for _ in range(NUM_SLOW)]
        for client in slow:
            client.sendall(stream_request())
        await until(lambda: len(sent) == NUM_SLOW)
        before: dict[str, int] = {}
        async with asyncio.timeout(HANG_S):
            while before != sent:
                before = dict(sent)
                await asyncio.sleep(0.3)
        bound = 3 * HIGH_WATER_BYTES + 16 * 1024 * 1024  # our buffers, and the kernel's
        assert all(count < bound for count in sent.values()), "the worker's stream is stopped, not stored"
        for _ in range(3):
            _, _, raw = await post(target.url, chat(stream=True))
            assert check_chat(raw) == [ANSWER]
        for client in slow:
            client.close()
        await until(lambda: worker.num_running == 0)
        assert len(worker.aborted) == NUM_SLOW


async def test_a_flood_in_one_stream_delays_no_other(worker: ScriptedWorker) -> None:
    """It never ends, and is read at once."""
    num_read = 0

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        if request.sampling.max_tokens != 7:
            async for frame in worker.answer(request):
                yield frame
            return
        yield Started(0)
        while True:
            yield Tokens(0, tuple(worker.reply[:1]) * 1000)
            await asyncio.sleep(0)

    async def read(url: str) -> None:
        nonlocal num_read
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        writer.write(stream_request())
        try:
            while part := await reader.read(1 << 20):
                num_read += len(part)
        finally:
            writer.close()

    worker.behave = behave
    async with gateway(worker) as target:
        flood = asyncio.create_task(read(target.url))
        await until(lambda: num_read > HIGH_WATER_BYTES)
        for _ in range(3):
            before = num_read
            _, _, raw = await post(target.url, chat(stream=True))
            assert check_chat(raw) == [ANSWER]
            assert before < num_read
        assert not flood.done()
        flood.cancel()
