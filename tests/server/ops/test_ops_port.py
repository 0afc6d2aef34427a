"""The pages, the live feed and the operator's actions, over a real gateway process and a scripted worker."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import product
from types import SimpleNamespace
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from server.ops.app import FOLDER
from server.ops.feed import Feed, FrameQueue
from tests.server.conftest import ANSWER
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.server.sse_grammar import check_chat
from tests.server.test_app import chat, post
from tests.server.test_gateway import Process, gateway_process
from tests.waiting import HANG_S
from worker.wire import TokenizerBundle

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> AsyncIterator[Process]:
    async with started(bundle, raw_tokenizer) as running:
        yield running


@asynccontextmanager
async def started(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> AsyncIterator[Process]:
    worker = ScriptedWorker(bundle, reply=raw_tokenizer.encode(ANSWER).ids, num_cached_tokens=16)
    async with listening(worker.app()) as worker.url, gateway_process("--workers", worker.url) as running:
        await running.until_ready()
        yield running


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[str, Any]]:
    name = ""
    async for line in response.content:
        if line.startswith(b"event: "):
            name = line[7:].strip().decode()
        elif line.startswith(b"data: "):
            yield name, json.loads(line[6:])


async def test_the_feed_has_workers_prefixes_and_decisions(gateway: Process) -> None:
    async with (
        asyncio.timeout(HANG_S),
        aiohttp.ClientSession() as session,
        session.get(gateway.ops + "/events") as response,
    ):
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        name, hello = await anext(stream)
        assert (name, hello["policy"], hello["decisions"]) == ("hello", "headstart", [])
        while name != "snapshot":
            name, snapshot = await anext(stream)
        assert [(row["worker"], row["state"]) for row in snapshot["workers"]] == [("w0", "serving")]
        assert snapshot["index"]["shards"] == []
        while name != "prefixes":
            name, tree = await anext(stream)
        assert tree == {"prefixes": [], "usage": []}
        await post(gateway.url, chat(stream=True))
        while name != "decisions":
            name, news = await anext(stream)
        (decision,) = news["decisions"]
        assert (decision["worker"], decision["num_candidates"]) == ("w0", 1)
        assert decision["candidates"][0]["cost"] > 0
        if decision["found_tokens"] is None:
            while name != "decisions" or not news["found"]:
                name, news = await anext(stream)
        while name != "prefixes":
            name, tree = await anext(stream)
        (row,) = tree["prefixes"]
        assert (row["level"], row["num_tokens"], row["num_hits"], row["workers"]) == (1, 16, 1, ["w0"])
        async with session.get(gateway.ops + "/events") as late:
            _, hello = await anext(events(late))
            assert [each["found_tokens"] for each in hello["decisions"]] == [16]
            (times,) = [each["times"] for each in hello["decisions"]]
            assert 0.0 <= times["prefill"] <= times["first_token"] <= times["end"]


async def test_a_later_viewer_sees_each_decision_once(gateway: Process) -> None:
    async with (
        asyncio.timeout(HANG_S),
        aiohttp.ClientSession() as session,
        session.get(gateway.ops + "/events") as first,
    ):
        await anext(events(first))
        for _ in range(3):
            await post(gateway.url, chat())
            async with session.get(gateway.ops + "/events") as later:
                stream = events(later)
                _, hello = await anext(stream)
                await post(gateway.url, chat())
                name = ""
                while name != "decisions":
                    name, news = await anext(stream)
                shown, new = ({each["request"] for each in frame["decisions"]} for frame in (hello, news))
                assert not shown & new


async def test_a_closed_feed_ends_also_where_a_viewer_is_slow() -> None:
    latency = SimpleNamespace(bounds=())
    overview: Any = SimpleNamespace(decisions=None, metrics=SimpleNamespace(ttft_s=latency))
    feed, queue = Feed(overview), FrameQueue(2)
    feed._viewers.add(queue)
    feed.close()
    for _ in range(3):
        feed._send(b"late")
    assert queue.get_nowait() is None


async def test_a_decision_is_found_by_the_ids_of_its_request(gateway: Process) -> None:
    """Also when no dashboard was open."""
    _, headers, raw = await post(gateway.url, chat())
    ids = [headers["x-request-id"], json.loads(raw)["id"]]
    assert ids[0].removeprefix("req_") == ids[1].removeprefix("chatcmpl-")
    _, headers, raw = await post(gateway.url, chat(), **{"x-request-id": "mine"})
    ids.append(json.loads(raw)["id"])
    assert headers["x-request-id"] == "mine"
    for id_ in (*ids, "mine"):
        status, raw = await gateway.get(f"{gateway.ops}/decisions/{id_}")
        (decision,) = json.loads(raw)["decisions"]
        assert (status, decision["worker"], decision["found_tokens"]) == (200, "w0", 16)
    status, raw = await gateway.get(f"{gateway.ops}/decisions/another")
    assert (status, "usage log" in json.loads(raw)["error"]["message"]) == (404, True)


async def test_the_gateway_stops_while_a_viewer_reads_the_feed(
    bundle: TokenizerBundle, raw_tokenizer: Tokenizer
) -> None:
    async with (
        started(bundle, raw_tokenizer) as gateway,
        asyncio.timeout(HANG_S),
        aiohttp.ClientSession() as session,
        session.get(gateway.ops + "/events") as response,
    ):
        await response.content.readline()
        gateway.process.terminate()
        await response.read()
        assert await gateway.process.wait() == 0


async def test_pages_load_nothing_from_elsewhere(gateway: Process) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/dashboard", "/chat", *(f"/pages/{file.name}" for file in FOLDER.iterdir())):
            async with session.get(gateway.ops + path) as response:
                assert response.status == 200, path
                policy = response.headers["content-security-policy"]
                assert "default-src 'none'" in policy
                assert "unsafe" not in policy
                etag = response.headers["etag"]
            async with session.get(gateway.ops + path, headers={"if-none-match": etag}) as response:
                assert response.status == 304, path
        async with session.get(gateway.ops + "/pages/..%2fops.py") as response:
            assert response.status == 404


async def test_the_chat_page_reaches_the_public_api(gateway: Process) -> None:
    """The public port itself allows no other origin."""
    _, _, raw = await post(gateway.ops, chat(stream=True), "/chat/api/v1/chat/completions")
    assert check_chat(raw) == [ANSWER]
    async with (
        aiohttp.ClientSession(headers={"origin": gateway.ops}) as session,
        session.get(gateway.url + "/v1/models") as response,
    ):
        assert "access-control-allow-origin" not in response.headers


async def test_another_sites_page_cannot_act(gateway: Process) -> None:
    paths = ("/workers/w0/drain", "/drain", "/chat/api/v1/chat/completions")
    foreign = ({"origin": "https://elsewhere.example"}, {"sec-fetch-site": "cross-site"})
    async with aiohttp.ClientSession() as session:
        for path, headers in product(paths, foreign):
            async with session.post(gateway.ops + path, headers=headers) as response:
                assert response.status == 403, (path, headers)
                assert (await response.json())["error"]["code"] == "cross_origin"
