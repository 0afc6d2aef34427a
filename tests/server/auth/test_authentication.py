"""The public port with API keys: authentication on every route, and what a key may do."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from server.auth.identity import KeyFile, digest_text
from server.auth.limits import AuthThrottle
from server.router.queue import FULL_S
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import Refuse, ScriptedWorker, listening, script_of
from tests.server.test_app import chat, post
from tests.server.test_gateway import Process, gateway_process
from tests.waiting import HANG_S, until

KEYS = {
    "My API Key": 'tenant = "one"',
    "other key of one": 'tenant = "one"\nmay_prioritise = true',
    "key of two": 'tenant = "two"',
    "key without models": 'tenant = "one"\nmodels = ["another"]',
    "key of alias": 'tenant = "one"\nmodels = ["nick"]',
    "slow key": 'tenant = "one"\nrequests_per_minute = 2\ntokens_per_minute = 100000',
    "few tokens": 'tenant = "one"\ntokens_per_minute = 200',
    "small day": 'tenant = "one"\ntokens_per_day = 200',
    "one stream": 'tenant = "one"\nmax_streams = 1\nrequests_per_minute = 100',
}
ROUTES = [
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
    ("GET", "/version"),
]


async def is_live(gateway: Process) -> bool:
    try:
        return (await gateway.get(gateway.url + "/health/live"))[0] == 200
    except aiohttp.ClientError:
        return False


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    """The options of a gateway with the keys, whose throttle does not get in the way."""
    path = tmp_path / "keys.toml"
    path.write_text(
        "\n".join(f'[[keys]]\ndigest = "{digest_text(key.encode())}"\n{rest}' for key, rest in KEYS.items())
    )
    return {"api_keys": str(path), "throttle": AuthThrottle(burst=1000)}


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def raw(url: str, request: bytes) -> tuple[int, bytes]:
    """Status and all bytes of the answer to hand-written bytes."""
    host, _, port = url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        writer.write(request)
        async with asyncio.timeout(HANG_S):
            data = await reader.read()
    finally:
        writer.close()
    return int(data.split(b" ", 2)[1]) if data else 0, data


TRICKS = [
    "{path}",
    "{path}/",
    "/{path}",
    "/health/live/..{path}",
    "/health/live%2f..{path}",
    "{path}?x=/health/live",
    "{path}#/health/live",
    "{path};/health/live",
    "/./{path}",
    "/%2e{path}",
    "/HEALTH/LIVE{path}",
    "/health/live%00{path}",
    "/health/live{path}",
]
HOSTS = ["x/health/live?a=", "x/health/live", "health/live", "x#", "x:80/health/live?", "a\x0bb", "x@y", ""]


async def test_no_route_or_trick_passes_without_a_key(worker: ScriptedWorker, keys: dict[str, Any]) -> None:
    async with gateway(worker, **keys) as target:
        requests = [(method, trick.format(path=path), "h") for method, path in ROUTES for trick in TRICKS]
        requests += [(method, path, host) for method, path in ROUTES for host in HOSTS]
        requests += [(method, "/v1/models", "h") for method in ("HEAD", "OPTIONS", "PUT", "DELETE", "TRACE", "PATCH")]
        requests += [("GET", path, "h") for path in ("/metrics", "/workers", "/drain", "/docs", "/openapi.json", "/x")]
        for method, path, host in requests:
            text = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
            status, data = await raw(target.url, text.encode())
            assert status in (400, 401), (method, path, host, data)
            assert b"tiny" not in data
        assert worker.received == []


@pytest.mark.parametrize(
    "key", [None, "", "wrong", digest_text(b"My API Key"), "My API Ke", "My API Key2", "my api key", "My  API Key"]
)
async def test_a_wrong_key_is_a_401_in_our_shape(worker: ScriptedWorker, keys: dict[str, Any], key: str | None) -> None:
    async with gateway(worker, **keys) as target:
        status, headers, body = await post(target.url, chat(), **({} if key is None else bearer(key)))
        assert status == 401
        assert headers["www-authenticate"] == "Bearer"
        error = json.loads(body)["error"]
        assert error["code"] == "invalid_api_key"
        assert key is None or not key or key not in error["message"]


async def test_valid_keys_pass_and_tenants_have_their_own_roots(worker: ScriptedWorker, keys: dict[str, Any]) -> None:
    async with gateway(worker, **keys) as target:
        for key in ("My API Key", "other key of one", "key of two"):
            assert (await post(target.url, chat(), **bearer(key)))[0] == 200
        one, again, two = (request.root for request in worker.received)
        assert one == again != two
        for salt in ("one", "default", "key of one"):
            await post(target.url, chat(cache_salt=salt, prompt_cache_key="one"), **bearer("key of two"))
        assert len({one, *(request.root for request in worker.received[2:])}) == 5
        one, again, *others = (request.tenant for request in worker.received)
        assert one == again
        assert len(set(others)) == 1, "a salt makes no other tenant: a worker's time is shared out by these tags"
        assert len({"one", "two", one, others[0]}) == 4, "tags that name no tenant"
        await post(target.url, chat(cache_salt="one"), **bearer("My API Key"))
        *earlier, salted = (request.root for request in worker.received)
        assert salted not in earlier, "one salt of two tenants makes two roots"


async def test_a_key_for_other_models(worker: ScriptedWorker, keys: dict[str, Any]) -> None:
    async with gateway(worker, **keys, aliases={"nick": "tiny"}) as target:
        for path, body in (
            ("/v1/chat/completions", chat()),
            ("/v1/completions", {"model": "nick", "prompt": "x"}),
            ("/v1/responses", {"model": "tiny", "input": "x"}),
            ("/v1/messages", {**chat(), "max_tokens": 5}),
            ("/v1/messages/count_tokens", chat()),
            ("/tokenize", {"model": "tiny", "prompt": "x"}),
            ("/tokenize", chat()),
            ("/detokenize", {"model": "tiny", "tokens": [5]}),
        ):
            status, _, answer = await post(target.url, body, path, **bearer("key without models"))
            assert status == 403, (path, answer)
            assert json.loads(answer)["error"]["type"] == "permission_error"
        one = b"GET /v1/models/tiny HTTP/1.1\r\nHost: h\r\nConnection: close\r\nAuthorization: Bearer %b\r\n\r\n"
        assert (await raw(target.url, one % b"key without models"))[0] == 403
        assert (await raw(target.url, one % b"My API Key"))[0] == 200
        assert await listed(target.url, "key without models") == []
        assert await listed(target.url, "key of alias") == ["nick"]
        unnamed = {"messages": chat()["messages"]}
        for body in (unnamed, unnamed | {"model": "nick"}):
            assert (await post(target.url, body, "/tokenize", **bearer("key of alias")))[0] == 200
        assert await listed(target.url, "My API Key") == ["tiny", "nick"]
        assert (await post(target.url, chat(model="nick"), **bearer("key of alias")))[0] == 200
        assert (await post(target.url, chat(), **bearer("key of alias")))[0] == 403


async def listed(url: str, key: str) -> list[str]:
    request = f"GET /v1/models HTTP/1.1\r\nHost: h\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n\r\n"
    status, data = await raw(url, request.encode())
    assert status == 200
    return [model["id"] for model in json.loads(data.partition(b"\r\n\r\n")[2])["data"]]


async def test_priority_needs_permission(worker: ScriptedWorker, keys: dict[str, Any]) -> None:
    async with gateway(worker, **keys) as target:
        assert (await post(target.url, chat(priority=-5), **bearer("My API Key")))[0] == 403
        assert (await post(target.url, chat(priority=-5), **bearer("other key of one")))[0] == 200
        assert [request.priority for request in worker.received] == [-5]


async def test_rates_are_enforced_and_in_headers(worker: ScriptedWorker, keys: dict[str, Any]) -> None:
    async with gateway(worker, **keys) as target:
        for remaining in ("1", "0"):
            status, headers, _ = await post(target.url, chat(), **bearer("slow key"))
            assert status == 200
            assert headers["x-ratelimit-limit-requests"] == "2"
            assert headers["x-ratelimit-remaining-requests"] == remaining
            assert int(headers["x-ratelimit-remaining-tokens"]) < 100_000
            assert headers["x-ratelimit-reset-requests"]
        status, headers, body = await post(target.url, chat(), **bearer("slow key"))
        assert status == 429
        assert 25 <= int(headers["retry-after"]) <= 30
        assert headers.getall("x-ratelimit-remaining-requests") == ["0"]
        assert json.loads(body)["error"]["code"] == "rate_limit_exceeded"
        assert (await post(target.url, chat(), **bearer("My API Key")))[0] == 200, "a limit is one key's"
        assert target.day.turned_away == {("refused", "rate_limit_exceeded, tenant one"): 1}, "seen by operators"


async def test_a_prompt_that_a_shutdown_refuses_uses_no_tokens(worker: ScriptedWorker, keys: dict[str, Any]) -> None:
    async with gateway(worker, **keys) as target:
        target.endpoint.shutdown()
        status, headers, _ = await post(target.url, chat(), **bearer("few tokens"))
        assert (status, headers["x-ratelimit-remaining-tokens"]) == (503, headers["x-ratelimit-limit-tokens"])


async def test_tokens_are_counted_with_the_answer(worker: ScriptedWorker, keys: dict[str, Any]) -> None:
    worker.reply = worker.reply * 400
    async with gateway(worker, **keys) as target:
        status, headers, _ = await post(target.url, chat(max_tokens=400), **bearer("few tokens"))
        assert status == 200
        assert int(headers["x-ratelimit-remaining-tokens"]) > 100, "the prompt alone leaves enough for another"
        status, headers, _ = await post(target.url, chat(), **bearer("few tokens"))
        assert status == 429
        assert headers["x-ratelimit-remaining-tokens"] == "0"
        assert len(worker.received) == 1


async def test_prompts_that_do_not_run_cost_no_tokens_of_the_day(worker: ScriptedWorker, keys: dict[str, Any]) -> None:
    """Else a client that asks again and again while the fleet is full would be locked out for the day."""
    worker.behave = script_of(then=Refuse(429, "queue_full"))
    async with gateway(worker, **keys) as target:
        for _ in range(20):
            _, _, body = await post(target.url, chat(), **bearer("small day"))
            assert json.loads(body)["error"]["code"] == "queue_full"
        worker.behave = None
        await asyncio.sleep(FULL_S)
        assert (await post(target.url, chat(), **bearer("small day")))[0] == 200


async def test_open_requests_are_counted_until_they_end(worker: ScriptedWorker, keys: dict[str, Any]) -> None:
    go_on = asyncio.Event()
    worker.behave = worker.holds(go_on)
    async with gateway(worker, **keys) as target:
        first = asyncio.create_task(post(target.url, chat(stream=True), **bearer("one stream")))
        await until(lambda: worker.received)
        status, headers, _ = await post(target.url, chat(), **bearer("one stream"))
        assert (status, headers["retry-after"]) == (429, "1")
        assert headers["x-ratelimit-remaining-requests"] == "99", "a refusal has them, too"
        text = "GET /version HTTP/1.1\r\nHost: h\r\nConnection: close\r\nAuthorization: Bearer one stream\r\n\r\n"
        assert b"x-ratelimit-remaining-requests: 99" in (await raw(target.url, text.encode()))[1]
        go_on.set()
        await first
        assert (await post(target.url, chat(), **bearer("one stream")))[0] == 200


async def test_key_file_reloads_without_a_restart(
    worker: ScriptedWorker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(f'[[keys]]\ndigest = "{digest_text(b"old")}"\ntenant = "t"\n')
    monkeypatch.setattr(KeyFile, "interval_s", 0.02)
    async with gateway(worker, api_keys=str(path)) as target:

        async def status(key: str) -> int:
            answer: int = (await post(target.url, chat(), **bearer(key)))[0]
            return answer

        assert (await status("old"), await status("new")) == (200, 401)
        path.write_text(f'[[keys]]\ndigest = "{digest_text(b"new")}"\ntenant = "t" # longer')

        async def new_counts() -> bool:
            return await status("new") == 200

        await until(new_counts)
        assert await status("old") == 401


async def test_wrong_keys_are_slowed_down_and_right_ones_are_not(worker: ScriptedWorker, keys: dict[str, Any]) -> None:
    keys["throttle"] = AuthThrottle(burst=3, per_s=1e-6)
    async with gateway(worker, **keys) as target:
        statuses: list[Any] = [(await post(target.url, chat(), **bearer(f"guess {n}")))[0] for n in range(5)]
        assert statuses == [401, 401, 401, 429, 429]
        for key in ("My API Key", "key of two"):
            assert (await post(target.url, chat(), **bearer(key)))[0] == 200


async def test_wrong_ops_keys_cost_the_right_one_nothing(worker: ScriptedWorker, tmp_path: Path) -> None:
    (tmp_path / "ops").write_text("the ops key")
    async with gateway(worker, ops_key_file=str(tmp_path / "ops")) as target, listening(target.ops) as url:
        for _ in range(100):
            assert (await post(url, {}, "/drain", **bearer("wrong")))[0] == 401
        assert (await post(url, {}, "/drain", **bearer("the ops key")))[0] != 401


def cpu_seconds(pid: int) -> float:
    """Return the processor seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.deep
@pytest.mark.parametrize("wrong_per_s", [2, 20, 200])
async def test_ten_users_with_wrong_keys_and_a_restart(tmp_path: Path, wrong_per_s: int) -> None:
    """Users of one address, new to this process, with wrong keys at once, before and after a restart."""
    users = [f"sk-{secrets.token_hex(16)}" for _ in range(10)]
    (tmp_path / "keys.toml").write_text(
        "".join(f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "t"\n' for key in users)
    )
    options = ("--api-keys", str(tmp_path / "keys.toml"), "--workers", "http://127.0.0.1:9")
    for _ in range(2):
        async with (
            gateway_process(*options) as process,
            aiohttp.ClientSession() as http,
        ):

            async def status(key: str, url: str = process.url, http: aiohttp.ClientSession = http) -> int:
                async with http.get(url + "/v1/models", headers=bearer(key)) as response:
                    return response.status

            await until(lambda process=process: is_live(process))
            statuses = Counter([await status(f"expired {number}") for number in range(30)])
            assert statuses[429] >= 9, "the source is over its allowance before the first user comes"
            begun_s, answers = time.monotonic(), []
            cpu_s = cpu_seconds(process.process.pid)
            for number in range(5 * wrong_per_s):
                await asyncio.sleep(max(0.0, begun_s + number / wrong_per_s - time.monotonic()))
                statuses[await status(f"wrong {number}")] += 1
                if len(answers) < 2 * (time.monotonic() - begun_s):
                    answers.append(await status(users[len(answers) % 10]))
            answers += [await status(key) for key in users]
            cpu_s = cpu_seconds(process.process.pid) - cpu_s
            print(f"{wrong_per_s} wrong keys a second: {Counter(answers)}, wrong {statuses}, processor {cpu_s:.2f} s")
            assert set(answers) == {200}
            assert statuses[401] <= 20 + 0.2 * (time.monotonic() - begun_s + 5.0)
            assert set(statuses) == {401, 429}
