"""A thousand bodies with wrong images: each gets an answer or a 400, and the gateway connects to nothing."""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
from typing import Any

import pytest
from tokenizers import Tokenizer

from server.schema.decoding import LARGE_BODY_BYTES
from tests.server.api.engine_worker import engine_gateway
from tests.server.api.mutated_images import mutated
from tests.server.api.seeing_engine import CHAT, MESSAGES, RESPONSES, SeeingWorker, body_of, data_url, part_of, png
from tests.server.api.test_blocks import DOCUMENT
from tests.server.test_app import post
from worker.wire import TokenizerBundle

NUM_BODIES = 1000
STRING = re.compile(rb'"[^"]*"')
TEXT, URL = {"type": "text", "text": "a"}, data_url(png())
SCHEMA = {"type": "object", "properties": {"city": {"type": "string", "description": "a name"}}}
TOOL = {"name": "look", "parameters": SCHEMA}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
BODIES = (
    (
        CHAT,
        body_of(CHAT, part_of(CHAT, URL), TEXT, tools=[{"type": "function", "function": TOOL}], metadata={"c": "d"}),
    ),
    (CHAT, body_of(CHAT, TEXT, response_format=FORMAT)),
    (MESSAGES, body_of(MESSAGES, part_of(MESSAGES, URL), DOCUMENT, tools=[{"name": "look", "input_schema": SCHEMA}])),
    (RESPONSES, body_of(RESPONSES, part_of(RESPONSES, URL), tools=[{"type": "function"} | TOOL])),
)


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


@pytest.mark.parametrize("wrong", [b"\xff", b"\\ud800"])
async def test_bytes_that_are_no_text_are_refused_anywhere(
    bundle: TokenizerBundle, raw_tokenizer: Tokenizer, wrong: bytes
) -> None:
    """Also in what is read later than the body, and in bodies that are measured in slices."""
    engine = SeeingWorker(bundle, tokenizer=raw_tokenizer)
    async with engine_gateway(engine, max_images=8) as target:
        for path, body in BODIES:
            raw = json.dumps(body).encode()
            assert (await post(target.url, raw, path))[0] == 200, path
            for string in STRING.finditer(raw):
                at = string.end() - 1
                changed = raw[:at] + wrong + raw[at:]
                for space in (b"", b" " * LARGE_BODY_BYTES):
                    status, _, answer = await post(target.url, changed + space, path)
                    if wrong == b"\xff":
                        assert (status, b"byte 0xff is not UTF-8" in answer) == (400, True), (changed, answer)
                    assert status in (200, 400), (changed, answer)
