"""Behind a proxy that shares its connections among users, every user gets their own answers, next to an attacker."""

from __future__ import annotations

import asyncio
import json
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import aiohttp
import pytest

from server.auth.identity import digest_text
from tests.e2e.serving import SMALL_POOL, Serve
from tests.faults.fronts import FRONTS, Front
from tests.waiting import HANG_S

NUM_ROUNDS: Final = 200
USERS: Final = ("ALICE", "BOB", "CAROL")
KEYS: Final = {name: f"sk-{secrets.token_hex(24)}" for name in (*USERS, "MALLORY")}
UPGRADES: Final = ("h2c", "websocket", "TLS/1.0", "x", "HTTP/2.0, h2c")


@pytest.fixture(scope="module")
def serve(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Serve]:
    keys = tmp_path_factory.mktemp("keys") / "keys.toml"
    entries = [f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "{name}"\n' for name, key in KEYS.items()]
    keys.write_text("\n".join(entries))
    arguments = f"--num-workers 1 --model {model}".split()
    with Serve(*arguments, f"--gateway-args=--api-keys {keys}", f"--worker-args={SMALL_POOL}") as running:
        yield running


def completion(model: str, prompt: str) -> bytes:
    return json.dumps({"model": model, "prompt": prompt, "max_tokens": 1, "temperature": 0, "echo": True}).encode()


def attack(rng: random.Random, model: str) -> bytes:
    """A request with a request of the attacker's in its body."""
    text = completion(model, "MALLORY's text")
    inner = rng.choice((b"POST /v1/completions", b"GET /v1/models", b"CONNECT /v1/models", b"DELETE /v1/models"))
    key = b"Authorization: Bearer %b\r\n" % KEYS["MALLORY"].encode()
    inner += b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + key
    inner += b"Content-Length: %d\r\n\r\n%b" % (len(text), rng.choice((text, b"")))  # the next user's may be the rest
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n" + key
    head += b"Connection: %b\r\n" % rng.choice((b"Upgrade", b"keep-alive, upgrade", b"Upgrade, HTTP2-Settings"))
    head += b"Upgrade: %b\r\nHTTP2-Settings: AAMAAABk\r\n" % rng.choice(UPGRADES).encode()
    if rng.random() < 0.3:
        head += b"Expect: 100-continue\r\n"
    if rng.random() < 0.2:
        head = head.replace(b"POST /v1/completions", b"CONNECT x:80", 1)
    if rng.random() < 0.5:
        return head + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(inner), inner)
    return head + b"Content-Length: %d\r\n\r\n%b" % (len(inner), inner)


async def send_attack(port: int, data: bytes, rng: random.Random) -> None:
    """Whole or in two pieces. Nothing of the answer is awaited but its beginning."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        cut = rng.choice((len(data), data.index(b"\r\n\r\n") + 4))
        writer.write(data[:cut])
        await writer.drain()
        await asyncio.sleep(0)
        writer.write(data[cut:])
        await reader.read(200)
    except ConnectionError:
        pass
    finally:
        writer.close()


async def ask(session: aiohttp.ClientSession, model: str, name: str, number: int) -> None:
    """Ask for a completion or the models, and check that the answer is this user's."""
    headers = {"authorization": f"Bearer {KEYS[name]}", "content-type": "application/json"}
    if number % 4 == 3:
        async with session.get("/v1/models", headers=headers) as response:
            assert response.status == 200
            assert (await response.json())["object"] == "list"
        return
    prompt = f"{name}'s question {number} is"
    async with session.post("/v1/completions", headers=headers, data=completion(model, prompt)) as response:
        answer = await response.json()
        assert response.status == 200, answer
        assert answer["choices"][0]["text"].startswith(prompt)


@pytest.mark.parametrize("name", FRONTS)
async def test_every_user_gets_their_own_answers(name: str, serve: Serve, tmp_path: Path, rng: random.Random) -> None:
    with Front(name, tmp_path, serve.port) as front:
        model = await model_of(serve)
        timeout = aiohttp.ClientTimeout(HANG_S)
        async with aiohttp.ClientSession(f"http://127.0.0.1:{front.port}", timeout=timeout) as session:
            for number in range(NUM_ROUNDS):
                attacks = [send_attack(front.port, attack(rng, model), rng) for _ in range(rng.randint(1, 2))]
                asked = [ask(session, model, user, number) for user in USERS]
                if number % 2:
                    await asyncio.gather(*attacks, *asked)
                else:  # one after another, so that each user gets the connection of the last
                    for step in (*attacks, *asked):
                        await step


async def model_of(serve: Serve) -> str:
    headers = {"authorization": f"Bearer {KEYS['ALICE']}"}
    async with aiohttp.request("GET", f"{serve.url}/v1/models", headers=headers) as response:
        return str((await response.json())["data"][0]["id"])
