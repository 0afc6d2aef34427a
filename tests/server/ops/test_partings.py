"""Where conversations part, on the ops port of a real gateway: the places, and no text of a prompt."""

from __future__ import annotations

import asyncio
import json
import random
import string
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from server import cli
from server.auth.identity import digest_text
from tests.server.api.test_prompts import PAIRS, chat, completion, messages, responses
from tests.server.conftest import ANSWER
from tests.server.ops.test_ops_port import events
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


async def partings(gateway: Process) -> list[dict[str, Any]]:
    status, text = await gateway.get(gateway.ops + "/prefixes")
    assert status == 200
    rows: list[dict[str, Any]] = json.loads(text)["partings"]
    return rows


@pytest.mark.parametrize("make", [chat, responses, messages], ids=PATHS)
async def test_partings_name_the_client_and_the_field(gateway: Process, make: Any) -> None:
    path = PATHS[make.__name__]
    agent = {"user-agent": "claude-cli/2.1.197 (external, cli)"}
    for day in range(1, 4):
        assert (await post(gateway.url, make(f"It is day {day} of many. {LONG}"), path, **agent))[0] == 200
    (row,) = await partings(gateway)
    assert (row["client"], row["field"], row["num_conversations"]) == ("claude-cli", "system", 2)
    assert row["part_tokens"] < 48 < row["prompt_tokens"]
    for user in ("Which is the first of all the files?", "Say hello to everybody in the room."):
        assert (await post(gateway.url, make(LONG, user=user), path, **{"user-agent": "codex/1"}))[0] == 200
    rows = {row["client"]: row for row in await partings(gateway)}
    assert (rows["codex"]["field"], rows["codex"]["num_conversations"]) == ("messages", 1)
    assert rows["codex"]["part_tokens"] > 100


async def test_the_next_turns_of_a_conversation_are_no_partings(gateway: Process) -> None:
    body = chat(LONG)
    for _ in range(4):
        assert (await post(gateway.url, body))[0] == 200
        body["messages"] += [{"role": "assistant", "content": ANSWER}, {"role": "user", "content": "And then? " * 5}]
    assert await partings(gateway) == []


async def test_each_tenant_has_rows_of_its_own(
    bundle: TokenizerBundle, raw_tokenizer: Tokenizer, tmp_path: Path
) -> None:
    """Reading them needs the ops key."""
    tenants = ("ann", "bob")
    entries = [f'[[keys]]\ndigest = "{digest_text(name.encode())}"\ntenant = "{name}"\n' for name in tenants]
    (tmp_path / "keys.toml").write_text("".join(entries))
    (tmp_path / "ops.key").write_text("ops")
    options = ("--api-keys", str(tmp_path / "keys.toml"), "--ops-key-file", str(tmp_path / "ops.key"))
    worker = ScriptedWorker(bundle, reply=raw_tokenizer.encode(ANSWER).ids)
    async with (
        listening(worker.app()) as worker.url,
        gateway_process("--workers", worker.url, *options) as gateway,
        aiohttp.ClientSession() as session,
    ):
        await gateway.until_ready()
        for name, num_conversations in (("ann", 4), ("bob", 2)):
            for number in range(num_conversations):
                body = chat(f"Number {number} of {name}. {LONG}")
                headers = {"authorization": f"Bearer {name}", "user-agent": "agent/1"}
                assert (await post(gateway.url, body, **headers))[0] == 200
        assert sorted(row["num_conversations"] for row in await partings(gateway)) == [1, 3]
        for name, num_parted in (("ann", 3), ("bob", 1), ("carol", None)):
            url = f"{gateway.ops}/prefixes?tenant={name}"
            async with session.get(url) as response:
                assert response.status == 401
            async with session.get(url, headers={"authorization": "Bearer ops"}) as response:
                rows = (await response.json())["partings"]
            assert [row["num_conversations"] for row in rows] == ([] if num_parted is None else [num_parted])


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
        answers = [str(await partings(gateway))]
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
        pair = {"a": marked(chat(LONG), fresh, used), "b": marked(chat(LONG), fresh, used)}
        status, _, compared = await post(gateway.ops, pair, "/prefixes/compare")
        assert (status, json.loads(compared)["field"]) == (200, "messages[0].content")
        _, _, explained = await post(gateway.ops, marked(chat(LONG), fresh, used), "/route/explain")
        answers += [compared.decode(), explained.decode()]
        await until(lambda: any(frame.startswith('["decisions"') for frame in heard))
        await until(lambda: any(frame.startswith('["prefixes"') and '"client": "agent"' in frame for frame in heard))
        listening_task.cancel()
        await asyncio.gather(listening_task, return_exceptions=True)
    everything = "".join([*answers, *heard])
    assert '"part_tokens"' in everything
    assert not {word for word in used if word in everything}


async def test_a_gateway_compares_for_the_command(
    gateway: Process, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b, field, character, volatile = PAIRS["messages, an id in a client's line"]
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, body in zip(files, (a, b), strict=True):
        file.write_text(json.dumps(body))
    status = await asyncio.to_thread(cli.main, ["prefix", *map(str, files), "--url", gateway.ops, "--json"])
    said = json.loads(capsys.readouterr().out)
    assert (status, said["field"], said["character"], said["volatile"]) == (1, field, character, volatile)
    assert said["prefill_tokens_per_s"] == 500.0
    assert said["excerpts"][0].startswith("build cc_version=2.1.197.|a3f; entry=cli")
    assert await asyncio.to_thread(cli.main, ["prefix", *map(str, files), "--url", gateway.ops]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[2] == "They part in system[1].text, character 25: an id"
    assert "tokens/s" in lines[5]
    files[0].write_text(json.dumps({**a, "model": "another"}))
    assert await asyncio.to_thread(cli.main, ["prefix", *map(str, files), "--url", gateway.ops]) == 2
    assert "'another' does not exist" in capsys.readouterr().err
    assert await asyncio.to_thread(cli.main, ["prefix", *map(str, files), "--url", gateway.url]) == 2
