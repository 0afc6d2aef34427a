"""Limits of keys over four gateway processes and a real Redis: requests, tokens, streams, and the budget of a day."""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import redis

from server.auth.identity import digest_text
from tests.redis_server import RedisServer, newest_redis
from tests.server.conftest import ANSWER, bundle_of, trained_tokenizer
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.server.test_gateway import Process, gateway_process
from tests.waiting import HANG_S, until

pytestmark = pytest.mark.e2e

NUM_GATEWAYS = 4
KEYS = {
    "first": "max_streams = 8",
    "requests": "requests_per_minute = 300",
    "tokens": "tokens_per_minute = 6000",
    "streams": "max_streams = 8",
    "day": "tokens_per_day = 3000",
}


class Site:
    """Four gateways with keys, one worker, and one Redis."""

    def __init__(self, server: RedisServer, worker: ScriptedWorker, gateways: list[Process], keys: dict[str, str]):
        self.server = server
        self.worker = worker
        self.gateways = gateways
        self._keys = keys
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HANG_S))
        self.close = self._http.close

    def post(self, place: int, key: str, max_tokens: int = 4, **fields: Any) -> Any:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens, **fields}
        headers = {"authorization": f"Bearer {self._keys[key]}"}
        return self._http.post(self.gateways[place].url + "/v1/chat/completions", json=body, headers=headers)

    async def asks(self, place: int, key: str, **fields: Any) -> int:
        """Return the tokens of an answer; 0 for a refusal by the limits."""
        async with self.post(place, key, **fields) as response:
            text = await response.text()
            assert response.status in (200, 429), text
            if response.status == 429:
                assert json.loads(text)["error"]["code"] == "rate_limit_exceeded", text
                assert float(response.headers["retry-after"]) > 0
                return 0
            return int(json.loads(text)["usage"]["total_tokens"])

    async def is_counted(self, place: int) -> bool:
        """Return whether Redis counts the requests of the gateways up to this one."""
        await self.asks(place, "first")
        with redis.Redis(unix_socket_path=str(self.server.socket)) as client:
            (name,) = client.keys("*:limits:*") or [b""]  # type: ignore[misc]
            return sum(field.startswith(b"open:") for field in client.hkeys(name)) > place  # type: ignore[union-attr]

    async def opens(self, place: int, key: str) -> aiohttp.ClientResponse | None:
        """Return a stream that goes on; None for a refusal."""
        response = await self.post(place, key, stream=True)
        assert response.status in (200, 429), await response.text()
        if response.status == 429:
            response.close()
            return None
        await response.content.readline()
        return response  # type: ignore[no-any-return]


@asynccontextmanager
async def site(folder: Path) -> AsyncIterator[Site]:
    tokenizer = trained_tokenizer()
    worker = ScriptedWorker(bundle_of(tokenizer), reply=tokenizer.encode(ANSWER).ids)
    keys = {name: f"sk-{secrets.token_hex(16)}" for name in KEYS}
    entries = [f'[[keys]]\ndigest = "{digest_text(keys[n].encode())}"\ntenant = "{n}"\n{KEYS[n]}\n' for n in KEYS]
    (folder / "keys.toml").write_text("\n".join(entries))
    async with AsyncExitStack() as stack:
        server = stack.enter_context(RedisServer(folder, newest_redis()))
        worker.url = await stack.enter_async_context(listening(worker.app()))
        options = ["--redis", server.url, "--workers", worker.url, "--api-keys", str(folder / "keys.toml")]
        options += ["--limits-gateways", str(NUM_GATEWAYS)]
        starting = [gateway_process(*options, module="tests.e2e.lasting_gateway") for _ in range(NUM_GATEWAYS)]
        made = Site(server, worker, [await stack.enter_async_context(each) for each in starting], keys)
        stack.push_async_callback(made.close)
        for place, gateway in enumerate(made.gateways):
            await gateway.until_ready()
            await until(lambda place=place: made.is_counted(place))
        yield made


async def test_requests_tokens_and_a_day_hold_over_four_gateways(tmp_path: Path) -> None:
    """Within 3 %, whether gateways are asked in turn or at the same time, and also after all have started again."""
    async with site(tmp_path) as made:
        begun_s = time.monotonic()
        tried = [made.asks(number % NUM_GATEWAYS, "requests", max_tokens=1) for number in range(500)]
        granted = sum(map(bool, await asyncio.gather(*tried)))
        refill = 5.0 * (time.monotonic() - begun_s)
        assert 300 <= granted <= 1.03 * 300 + refill

        begun_s = time.monotonic()
        num_tokens, refused, number = 0, 0, 0
        while refused < NUM_GATEWAYS:
            number += 1
            used = await made.asks(number % NUM_GATEWAYS, "tokens", max_tokens=20)
            num_tokens, refused = num_tokens + used, 0 if used else refused + 1
        refill = 100.0 * (time.monotonic() - begun_s)
        assert 6000 * 0.97 <= num_tokens <= 1.03 * 6000 + refill

        tried = [made.asks(number % NUM_GATEWAYS, "day", max_tokens=20) for number in range(150)]
        first = sum(await asyncio.gather(*tried[:60]))
        rest = [await each for each in tried[60:]]
        assert 3000 <= first + sum(rest) <= 1.03 * 3000
        assert rest[-10:] == [0] * 10


async def test_streams_hold_over_four_gateways_and_a_kill(tmp_path: Path) -> None:
    async with site(tmp_path) as made:
        go = asyncio.Event()
        made.worker.behave = made.worker.holds(go, num_frames=2)
        # One after the other: a gateway whose count is late, on a busy machine, grants its quarter.
        tried = [await made.opens(number % NUM_GATEWAYS, "streams") for number in range(24)]
        by_place = [[each for each in tried[place::NUM_GATEWAYS] if each is not None] for place in range(NUM_GATEWAYS)]
        assert sum(map(len, by_place)) == 8
        killed = max(range(NUM_GATEWAYS), key=lambda place: len(by_place[place]))
        lives = (killed + 1) % NUM_GATEWAYS
        assert await made.opens(lives, "streams") is None
        made.gateways[killed].process.kill()
        opened: list[aiohttp.ClientResponse] = []

        async def opens_another() -> bool:
            if (response := await made.opens(lives, "streams")) is not None:
                opened.append(response)
            return len(opened) == len(by_place[killed])

        await until(opens_another)
        assert await made.opens(lives, "streams") is None, "as many as the lease of the killed gateway had"
        go.set()
        for response in [*opened, *(each for place in by_place if place is not by_place[killed] for each in place)]:
            assert b"[DONE]" in await response.read()
        await until(lambda: made.asks((killed + 2) % NUM_GATEWAYS, "streams"))
