"""The ops port of a real gateway shows no text of a prompt, but to those who send it themselves."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import AsyncIterator, Iterator
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from tests.server.conftest import ANSWER
from tests.server.ops.test_ops_port import events
from tests.server.ops.test_prefix import chat, completion, messages, responses
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.server.test_app import post
from tests.server.test_gateway import Process, gateway_process
from tests.waiting import until
from worker.wire import TokenizerBundle

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
LONG = "You are a careful agent who answers in short sentences and says what is not known. " * 4


@pytest.fixture
async def gateway(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> AsyncIterator[Process]:
    worker = ScriptedWorker(bundle, reply=raw_tokenizer.encode(ANSWER).ids, num_cached_tokens=16)
    worker.prefill_tokens_per_s = 500.0
    async with listening(worker.app()) as worker.url, gateway_process("--workers", worker.url) as running:
        await running.until_ready()
        yield running


def words(rng: random.Random) -> Iterator[str]:
    """Yield words that no program has."""
    while True:
        yield "zq" + "".join(rng.choices(string.ascii_lowercase, k=12))


def marked(value: Any, fresh: Iterator[str], used: set[str]) -> Any:
    """Return a body with a fresh word in every text that may be any."""
    if isinstance(value, dict):
        fixed = {"role", "type", "model", "id", "tool_use_id", "tool_call_id", "arguments"}
        return {key: item if key in fixed else marked(item, fresh, used) for key, item in value.items()}
    if isinstance(value, list):
        return [marked(item, fresh, used) for item in value]
    if not isinstance(value, str) or value in ("path", "string", "object", "integer"):
        return value
    used.add(word := next(fresh))
    return word if value.isidentifier() else f"{word} {value} {word}"


async def test_no_text_of_a_prompt_leaves_the_ops_port(gateway: Process) -> None:
    rng = random.Random(5)
    fresh, used = words(rng), set[str]()
    paths = {**PATHS, "completions": "/v1/completions"}
    heard: list[str] = []

    async def listen(response: aiohttp.ClientResponse) -> None:
        async for name, data in events(response):
            heard.append(json.dumps([name, data]))

    async with aiohttp.ClientSession() as session, session.get(gateway.ops + "/events") as feed:
        listening_task = asyncio.create_task(listen(feed))
        for api, make in (("chat", chat), ("responses", responses), ("messages", messages)):
            for _ in range(4):
                body = marked(make(LONG, metadata={"user_id": "someone"} if api == "messages" else None), fresh, used)
                status, _, raw = await post(gateway.url, body, paths[api], **{"user-agent": "agent/1"})
                assert status == 200, raw
        for _ in range(3):
            body = marked(completion(LONG), fresh, used)
            assert (await post(gateway.url, body, paths["completions"]))[0] == 200
        assert len(used) > 100
        answers = []
        for path in (
            "/metrics",
            "/workers",
            "/index",
            "/prefixes",
            "/prefixes?limit=1000",
            "/dashboard",
            "/health/ready",
        ):
            answers.append((await gateway.get(gateway.ops + path))[1])
        _, _, explained = await post(gateway.ops, marked(chat(LONG), fresh, used), "/route/explain")
        answers.append(explained.decode())
        await until(lambda: any(frame.startswith('["decisions"') for frame in heard))
        await until(lambda: any(frame.startswith('["prefixes"') for frame in heard))
        listening_task.cancel()
        await asyncio.gather(listening_task, return_exceptions=True)
    everything = "".join([*answers, *heard])
    assert '"prompt_tokens"' in everything
    assert not {word for word in used if word in everything}
