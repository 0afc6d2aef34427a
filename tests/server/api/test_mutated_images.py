"""A thousand bodies with wrong images: each gets an answer or a 400, and the gateway connects to nothing."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.server.api.engine_worker import engine_gateway
from tests.server.api.mutated_images import mutated
from tests.server.api.seeing_engine import SeeingWorker
from tests.server.test_app import post
from worker.wire import TokenizerBundle

NUM_BODIES = 1000


@pytest.mark.e2e
async def test_mutated_images_are_refused(
    bundle: TokenizerBundle, raw_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = SeeingWorker(bundle, tokenizer=raw_tokenizer)
    rng, statuses, named = random.Random(34), dict[int, int](), 0
    connected: set[str] = set()
    async with engine_gateway(engine, max_images=8, max_image_bytes=40_000, image_hosts={"images.example"}) as target:
        watch(connected, monkeypatch)
        for _ in range(NUM_BODIES):
            path, body = mutated(rng)
            status, _, raw = await post(target.url, body, path)
            statuses[status] = statuses.get(status, 0) + 1
            assert status in (200, 400), (status, body[:500], raw)
            if status == 400:
                message = json.loads(raw)["error"]["message"]
                named += message.startswith(("messages[0].content[", "input[0].content["))
        assert connected == {target.url.rpartition(":")[2], engine.url.rpartition(":")[2]}
    print(f"{statuses}, of which {named} name the part")
    assert statuses[200] > 100
    assert named > 500


def watch(connected: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note the port of each connection, and each look-up of a name."""
    loop, resolve = type(asyncio.get_running_loop()), socket.getaddrinfo
    connect = loop.sock_connect

    def getaddrinfo(host: Any, port: Any, *args: Any, **kwargs: Any) -> Any:
        connected.add(str(port))
        return resolve(host, port, *args, **kwargs)

    async def sock_connect(self: Any, sock: socket.socket, address: Any) -> None:
        connected.add(str(address[1]))
        await connect(self, sock, address)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(loop, "sock_connect", sock_connect)
