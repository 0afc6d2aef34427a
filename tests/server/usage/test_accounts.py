"""The line of each request in the usage log equals what its client was shown, whatever happened to it."""

from __future__ import annotations

import asyncio
import gzip
import json
import secrets
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tokenizers import Tokenizer

from server import cli
from server.auth.identity import digest_text
from tests.faults.part import ROOT
from tests.server.api.engine_worker import EngineWorker, engine_gateway
from tests.server.api.test_embeddings import SIZE, embeds
from tests.server.api.test_pooling import BODY, PoolingWorker, pooling_gateway
from tests.server.conftest import ANSWER
from tests.server.gateway_app import RunningGateway, gateway
from tests.server.request.failing_workers import dies_after, stalls_after
from tests.server.scripted_worker import Refuse, ScriptedWorker, script_of
from tests.server.test_app import chat, post, post_once
from tests.waiting import HANG_S, until
from worker.wire import Failed, Started, TokenizerBundle

KEY, UNNAMED = (f"sk-{secrets.token_hex(16)}" for _ in range(2))
AUTH = {"authorization": f"Bearer {KEY}"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(n=2),
    "/v1/completions": {"model": "tiny", "prompt": ["The capital", "of France"], "n": 2, "max_tokens": 5},
    "/v1/responses": {"model": "tiny", "input": "Capital?"},
    "/v1/messages": {"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "Capital?"}]},
}


class Logged:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "usage.jsonl"
        keys = folder / "keys.toml"
        keys.write_text(
            f'[[keys]]\ndigest = "{digest_text(KEY.encode())}"\ntenant = "one"\nname = "notebook"\nweight = 4\n'
            f'[[keys]]\ndigest = "{digest_text(UNNAMED.encode())}"\ntenant = "two"\n'
        )
        self.options = {"usage_log": str(self.path), "api_keys": str(keys)}

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.path.read_text().splitlines()]

    async def wait_for(self, num_lines: int) -> list[dict[str, Any]]:
        await until(lambda: len(self.lines()) >= num_lines)
        return self.lines()


@pytest.fixture
def logged(tmp_path: Path) -> Logged:
    return Logged(tmp_path)


@asynccontextmanager
async def logging_gateway(logged: Logged, *workers: ScriptedWorker, **options: Any) -> AsyncIterator[RunningGateway]:
    async with gateway(*workers, **logged.options, **options) as target:
        yield target


def usage_of(raw: bytes, *, stream: bool) -> tuple[int, int]:
    """Return the prompt and output tokens that an answer shows."""
    parts = (
        [json.loads(raw)]
        if not stream
        else [json.loads(line.removeprefix(b"data: ")) for line in raw.splitlines() if line.startswith(b"data: {")]
    )
    found: dict[str, int] = {}
    for part in parts:
        for holder in (part, part.get("response") or {}, part.get("message") or {}):
            found |= holder.get("usage") or {}
    return (
        found.get("prompt_tokens", found.get("input_tokens", 0)) + found.get("cache_read_input_tokens", 0),
        found.get("completion_tokens", found.get("output_tokens", 0)),
    )


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
async def test_a_line_equals_the_usage(worker: ScriptedWorker, logged: Logged, path: str, stream: bool) -> None:
    worker.num_cached_tokens = 2
    options = {"stream_options": {"include_usage": True}} if stream and "completions" in path else {}
    async with logging_gateway(logged, worker) as target:
        status, headers, raw = await post(target.url, BODIES[path] | options | {"stream": stream}, path, **AUTH)
    assert status == 200, raw
    (line,) = logged.lines()
    assert (line["prompt_tokens"], line["output_tokens"]) == usage_of(raw, stream=stream)
    assert line["prompt_tokens"] > 0 < line["output_tokens"]
    assert line["request_id"] == headers["x-request-id"]
    assert (line["tenant"], line["key"], line["model"]) == ("one", "notebook", "tiny")
    assert (line["status"], line["finished"], line["worker"]) == (200, True, "w0")
    assert line["num_choices"] == {"/v1/chat/completions": 2, "/v1/completions": 4}.get(path, 1)
    assert line["cached_tokens"] == {"pool": 2 * line["num_prompts"]}
    assert line["prefill_s"] == line["prompt_tokens"] - 2 * line["num_prompts"], "the rate of this router is 1"
    assert line["prefill_saved_s"] == 2 * line["num_prompts"]
    assert 0 < line["queue_s"] < line["num_prompts"] * line["seconds"]
    assert line["block_s"] > 0
    assert {request.weight for request in worker.received} == {4.0}, "that of the key"
    assert KEY not in logged.path.read_text()


async def test_a_key_without_a_name_has_its_digest(worker: ScriptedWorker, logged: Logged) -> None:
    await post_once(logging_gateway(logged, worker), chat(), authorization=f"Bearer {UNNAMED}")
    assert logged.lines()[0]["key"] == digest_text(UNNAMED.encode()).removeprefix("sha256:")[:12]


async def test_embeddings_and_ranks(bundle: TokenizerBundle, logged: Logged) -> None:
    worker = ScriptedWorker(bundle, behave=embeds, embedding_size=SIZE)
    async with logging_gateway(logged, worker) as target:
        body = {"model": "tiny", "input": ["Paris", "The capital of France"]}
        status, _, raw = await post(target.url, body, "/v1/embeddings", **AUTH)
    assert status == 200
    (line,) = logged.lines()
    assert (line["prompt_tokens"], line["output_tokens"]) == usage_of(raw, stream=False)
    assert (line["route"], line["num_prompts"], line["finished"]) == ("embeddings", 2, True)
    assert {request.weight for request in worker.received} == {4.0}


async def test_ranks_count_what_the_engine_counts(bundle: TokenizerBundle, logged: Logged) -> None:
    worker = PoolingWorker(bundle)
    assert (await post_once(pooling_gateway(worker, **logged.options), BODY, "/rerank", **AUTH))[0] == 200
    (line,) = logged.lines()
    assert (line["route"], line["prompt_tokens"], line["output_tokens"]) == ("pooling", 9, 0)
    assert {request.weight for request in worker.received} == {4.0}


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": "The capital", "echo": True, "logprobs": 1}),
        ("/v1/messages", {"messages": BODIES["/v1/messages"]["messages"]}),
    ],
)
async def test_scored_prompts_have_no_output(
    worker: ScriptedWorker, logged: Logged, path: str, fields: dict[str, Any]
) -> None:
    async with logging_gateway(logged, worker) as target:
        status, _, raw = await post(target.url, {"model": "tiny", "max_tokens": 0} | fields, path, **AUTH)
    assert status == 200, raw
    (line,) = logged.lines()
    assert (line["prompt_tokens"], line["output_tokens"]) == usage_of(raw, stream=False)
    assert line["output_tokens"] == 0


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_a_moved_answer_counts_once(
    bundle: TokenizerBundle, raw_tokenizer: Tokenizer, logged: Logged, num_tokens: int
) -> None:
    reply = raw_tokenizer.encode(ANSWER).ids
    dying, healthy = (ScriptedWorker(bundle, f"w{n}", reply=reply, num_cached_tokens=3 + n) for n in range(2))
    dying.behave = dies_after(dying, num_tokens)
    async with logging_gateway(logged, dying, healthy) as target:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        status, _, raw = await post(target.url, chat(**options), **AUTH)
    assert status == 200
    assert healthy.received
    (line,) = logged.lines()
    assert (line["prompt_tokens"], line["output_tokens"]) == usage_of(raw, stream=True)
    assert line["output_tokens"] == len(reply) + 1
    assert line["cached_tokens"] == {"pool": 3 if num_tokens else 4}, "of the worker that computed the prompt"


async def test_a_client_that_leaves(worker: ScriptedWorker, logged: Logged) -> None:
    worker.behave = stalls_after(worker, 5)
    async with logging_gateway(logged, worker) as target, aiohttp.ClientSession() as session:
        async with session.post(target.url + "/v1/chat/completions", json=chat(stream=True), headers=AUTH) as answer:
            await answer.content.readuntil(b"\n\n")
        (line,) = await logged.wait_for(1)
    assert (line["status"], line["finished"], line["output_tokens"]) == (499, False, 5)
    assert line["prompt_tokens"] == len(worker.received[0].prompt_ids)


async def test_refused_and_failed_requests_have_lines(worker: ScriptedWorker, logged: Logged) -> None:
    async with logging_gateway(logged, worker) as target:
        worker.behave = script_of(Started(2), Failed("internal", "it broke", retryable=False))
        assert (await post(target.url, chat(), **AUTH))[0] == 500
        assert (await post(target.url, chat(max_tokens=-1), **AUTH))[0] == 400
        assert (await post(target.url, chat(max_tokens=1_000_000), **AUTH))[0] == 400
        assert (await post(target.url, chat(model="none"), **AUTH))[0] == 404
        assert (await post(target.url, chat(), authorization="Bearer wrong"))[0] == 401
        worker.behave = script_of(then=Refuse(429, "queue_full"))
        assert (await post(target.url, chat(max_tokens=7), **AUTH))[0] == 429
    failed, invalid, too_long, unknown, refused = logged.lines()
    assert (refused["status"], refused["prompt_tokens"], refused["queue_s"] > 0) == (429, 0, True)
    assert (failed["status"], failed["prompt_tokens"]) == (500, len(worker.received[0].prompt_ids))
    assert failed["cached_tokens"] == {"pool": 2}
    assert (invalid["status"], invalid["model"], invalid["num_prompts"]) == (400, "", 0)
    assert (too_long["error"], too_long["model"]) == ("context_length_exceeded", failed["model"])
    assert (unknown["status"], unknown["key"]) == (404, "notebook")
    assert not any(line["finished"] for line in logged.lines())


async def test_the_log_has_no_text(worker: ScriptedWorker, logged: Logged) -> None:
    await post_once(logging_gateway(logged, worker), chat(user="zanzibar", tools=[], metadata={"a": "quokka"}), **AUTH)
    text = logged.path.read_text()
    for word in ("capital", "Paris", "zanzibar", "quokka"):
        assert word not in text


async def test_a_log_that_cannot_be_written_fails_no_request(worker: ScriptedWorker, logged: Logged) -> None:
    logged.path.symlink_to("/dev/full")
    async with logging_gateway(logged, worker) as target:
        for _ in range(3):
            assert (await post(target.url, chat(), **AUTH))[0] == 200
        failures = target.metrics.usage_log_failures
        await until(lambda: failures.sum() > 0)
    assert target.metrics.usage_log_lines.sum("lost") == 3


async def test_counters_by_tenant_and_key(worker: ScriptedWorker, logged: Logged) -> None:
    async with logging_gateway(logged, worker) as target:
        await asyncio.gather(*(post(target.url, chat(), **AUTH) for _ in range(3)))
        value = target.metrics.registry.get_sample_value
        labels = {"tenant": "one", "key": "notebook"}
        await until(lambda: value("headstart_usage_requests_total", labels) == 3)
        tokens = value("headstart_usage_tokens_total", labels | {"kind": "output"})
        assert tokens == 3 * (len(worker.reply) + 1)


async def test_an_engines_own_text(bundle: TokenizerBundle, raw_tokenizer: Tokenizer, logged: Logged) -> None:
    worker = EngineWorker(bundle, tokenizer=raw_tokenizer, num_cached_tokens=3)
    async with engine_gateway(worker, **logged.options) as target:
        for fields in ({}, {"stream": True}, {"stream": True, "stream_options": {"include_usage": True}}):
            status, _, raw = await post(target.url, chat(**fields), **AUTH)
            assert status == 200, raw
    for line, request in zip(logged.lines(), worker.received, strict=True):
        assert (line["prompt_tokens"], line["output_tokens"]) == (len(request.prompt_ids), 5)
        assert (line["cached_tokens"], line["finished"], line["key"]) == ({"pool": 3}, True, "notebook")
        assert request.weight == 4.0


async def test_the_command_sums_logs(
    worker: ScriptedWorker, logged: Logged, capsys: pytest.CaptureFixture[str]
) -> None:
    async with logging_gateway(logged, worker) as target:
        for key in (KEY, KEY, UNNAMED):
            await post(target.url, chat(), authorization=f"Bearer {key}")
        await post(target.url, chat(max_tokens=-1), **AUTH)
    whole = logged.path.read_text()
    torn = '{"tenant":"one","key":"","route":"/","ended_at":1e300}\n{"tenant":"one","ke'
    logged.path.write_text(whole + torn)
    (other := logged.path.with_name("other.jsonl")).write_text(whole.splitlines()[0] + "\n")
    assert cli.main(["usage", str(logged.path), str(other), "--by", "tenant,key,day", "--json"]) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    rows = {row["tenant"]: row for row in answer["usage"]}
    assert answer["invalid_lines"] == 2
    assert "2 lines" in captured.err
    assert (rows["one"]["requests"], rows["one"]["unfinished"], rows["one"]["key"]) == (4, 1, "notebook")
    assert rows["one"]["prompt_tokens"] == 3 * len(worker.received[0].prompt_ids)
    assert rows["two"]["output_tokens"] == len(worker.reply) + 1
    assert (
        rows["two"]["day"] == f"{datetime.fromtimestamp(json.loads(whole.splitlines()[0])['ended_at'], UTC):%Y-%m-%d}"
    )
    assert cli.main(["usage", str(other)]) == 0
    assert "one" in capsys.readouterr().out
    assert cli.main(["usage", str(logged.path.with_name("none"))]) == 2
    with pytest.raises(SystemExit):
        cli.main(["usage", str(other), "--by", "colour"])


def test_a_broken_gzip_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It may still be written."""
    whole, broken = gzip.compress(b"{}\n" * 1000), tmp_path / "usage.jsonl.gz"
    for content in (whole[: len(whole) // 2], whole[:15] + b"\xff" * 20, b"no gzip"):
        broken.write_bytes(content)
        assert cli.main(["usage", str(broken)]) == 2
        assert f"headstart usage: {broken}: " in capsys.readouterr().err


def test_the_example_bills_what_was_answered(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    line = {"tenant": "one", "key": "k", "model": "tiny", "prompt_tokens": 3_000_000, "output_tokens": 1_000_000}
    line |= {"cached_tokens": {"pool": 1_000_000}, "prefill_s": 4.0, "prefill_saved_s": 2.0, "block_s": 7.0}
    lines = [line | {"status": 200}, line | {"status": 499}, line | {"status": 503}]
    path.write_text("\n".join([*map(json.dumps, lines), '{"tenant": "tw']))
    command = [sys.executable, str(ROOT / "examples" / "bill.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S, check=True)
    head, row = done.stdout.splitlines()
    assert row.split() == ["one", "k", "tiny", "6.1000", "8.0", "4.0", "14"]
    assert head.index("cost") + len("cost") == row.index("6.1000") + len("6.1000")
    helped = subprocess.run([*command[:2], "--help"], capture_output=True, text=True, timeout=HANG_S, check=True)
    assert "Bill tenants" in helped.stdout
