"""The times of tools that the gateway learns, and the chains that it asks workers to keep."""

from __future__ import annotations

import json
import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from server.request import pauses
from server.request.pauses import (
    DEFAULT_PAUSE_S,
    MAX_PAUSE_S,
    MAX_TENANTS,
    MAX_TOOLS,
    SLACK,
    PauseHistogram,
    Pauses,
    PauseTimes,
)
from server.schema.messages import MessagesRequest
from server.schema.requests import ChatRequest
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import post
from tests.waiting import until
from worker.wire import TokenizerBundle

USER: dict[str, Any] = {"role": "user", "content": "word " * 60}
EPHEMERAL = {"type": "ephemeral"}
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@given(st.lists(st.floats(0.0, 1e5), min_size=5, max_size=100))
def test_most_pauses_end_within_the_quantile(pauses_s: list[float]) -> None:
    histogram = PauseHistogram()
    for pause_s in pauses_s:
        histogram.add(pause_s)
    most_s = histogram.quantile(1.0)
    assert all(pause_s <= most_s for pause_s in pauses_s if pause_s <= MAX_PAUSE_S)
    assert histogram.quantile(0.5) <= most_s <= MAX_PAUSE_S


def test_each_tool_has_its_own_times() -> None:
    rng, times = random.Random(0), PauseTimes()
    for _ in range(200):
        times.add("a", ["fast"], rng.lognormvariate(-1.0, 0.5))
        times.add("a", ["slow"], rng.lognormvariate(4.0, 0.5))
    fast_s, slow_s = times.expected_s("a", ["fast"]), times.expected_s("a", ["slow"])
    assert fast_s < 10.0 < 100.0 < slow_s
    assert times.expected_s("a", ["fast", "slow"]) == slow_s
    assert times.expected_s("a", ["new"]) > fast_s, "a new tool is like the tenant's others"
    assert times.expected_s("b", ["fast"]) == DEFAULT_PAUSE_S
    assert times.expected_s("a", []) == 0.0


def test_old_times_fade() -> None:
    times = PauseTimes()
    for pause_s in (*[1000.0] * 100, *[1.0] * 5000):
        times.add("a", ["tool"], pause_s)
    assert times.expected_s("a", ["tool"]) <= 2.0 * SLACK


def test_memory_is_bounded() -> None:
    times = PauseTimes()
    for number in range(10 * MAX_TOOLS):
        times.add("a", [f"tool{number}"], 1.0)
    for number in range(2 * MAX_TENANTS):
        times.add(f"tenant{number}", ["tool"], 1.0)
        times.add("a", ["tool"], 1.0)
    assert len(times._tenants) == MAX_TENANTS
    assert len(times._tenants["a"]) == MAX_TOOLS + 1


@pytest.mark.parametrize(
    ("fields", "retention_s"),
    [
        ({}, 0.0),
        ({"system": [{"type": "text", "text": "x", "cache_control": EPHEMERAL}]}, 300.0),
        ({"cache_control": {**EPHEMERAL, "ttl": "1h"}}, 3600.0),
        ({"tools": [{"name": "x", "cache_control": {**EPHEMERAL, "ttl": "1h"}}]}, 3600.0),
        ({"cache_control": {**EPHEMERAL, "ttl": "2y"}}, 0.0),
        ({"cache_control": {**EPHEMERAL, "ttl": {}}}, 0.0),
        ({"cache_control": "ephemeral"}, 0.0),
        ({"prompt_cache_retention": "24h"}, 86_400.0),
    ],
)
def test_the_longest_ttl_of_a_message_counts(fields: dict[str, Any], retention_s: float) -> None:
    block = {"type": "text", "text": "x", "cache_control": {"type": "other"}}
    body = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": [block]}], **fields}
    assert msgspec.json.decode(json.dumps(body), type=MessagesRequest).retention_s == retention_s


def test_a_chat_may_ask_for_a_day() -> None:
    for value, retention_s in (("24h", 86_400.0), ("in_memory", 0.0), ("in-memory", 0.0), (None, 0.0)):
        body = {"model": "m", "messages": [USER], "prompt_cache_retention": value}
        assert msgspec.json.decode(json.dumps(body), type=ChatRequest).retention_s == retention_s


async def test_pauses_that_have_begun_are_bounded(
    bundle: TokenizerBundle, raw_tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pauses, "MAX_PENDING", 2)
    ids = raw_tokenizer.encode('[{"name":"look","arguments":{}}]').ids
    worker = ScriptedWorker(bundle, reply=ids, keeps_chains=True)
    body = {"model": bundle.model, "tools": [LOOK], "tool_choice": "required"}
    begun: list[Any] = []
    begin = Pauses.begin
    monkeypatch.setattr(Pauses, "begin", lambda self, *about: (begin(self, *about), begun.append(list(self._pending))))
    async with gateway(worker) as running:
        for number in range(4):
            status, _, answer = await post(running.url, {**body, "messages": [{**USER, "content": f"{number} " * 60}]})
            assert status == 200, answer
            await until(lambda number=number: len(worker.kept) > number)
    assert [len(pending) for pending in begun] == [1, 2, 2, 2]
    assert begun[-1][0] == begun[2][1], "the oldest went"


async def test_a_worker_keeps_what_a_client_asks_for(bundle: TokenizerBundle) -> None:
    new, old = ScriptedWorker(bundle, reply=[5], keeps_chains=True), ScriptedWorker(bundle, reply=[5])
    body = {"model": bundle.model, "messages": [USER], "max_tokens": 1}
    for worker in (new, old):
        async with gateway(worker) as running:
            for fields in ({}, {"prompt_cache_retention": "24h"}, {"prompt_cache_retention": "in_memory"}):
                status, _, answer = await post(running.url, {**body, **fields})
                assert status == 200, answer
            if worker.keeps_chains:
                await until(lambda: new.kept)
    assert not old.kept
    (keep,) = new.kept
    num_blocks = len(new.received[0].prompt_ids) // bundle.block_size
    assert keep.num_prompt_blocks == num_blocks > 1
    assert len(keep.hashes) == 16 * num_blocks
    assert keep.keep_s == MAX_PAUSE_S
    assert keep.epoch == "epoch-w0"


@pytest.mark.parametrize("more", [[], [{"role": "user", "content": "Go on."}]], ids=["results", "and_text"])
async def test_the_times_of_a_tool_are_learned(
    bundle: TokenizerBundle, raw_tokenizer: Tokenizer, more: list[dict[str, Any]]
) -> None:
    ids = raw_tokenizer.encode('[{"name":"look","arguments":{}}]').ids
    worker = ScriptedWorker(bundle, reply=ids, keeps_chains=True)
    messages = [USER]
    async with gateway(worker) as running:
        for number in range(8):
            body = {"model": bundle.model, "messages": messages, "tools": [LOOK], "tool_choice": "required"}
            status, _, answer = await post(running.url, body)
            assert status == 200, answer
            await until(lambda number=number: len(worker.kept) > number)
            (call,) = json.loads(answer)["choices"][0]["message"]["tool_calls"]
            messages = [*messages, {"role": "assistant", "content": "", "tool_calls": [call]}]
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "nothing " * 8})
            messages += more
    kept_s = [keep.keep_s for keep in worker.kept]
    assert kept_s[:5] == [DEFAULT_PAUSE_S] * 5
    assert kept_s[-1] < DEFAULT_PAUSE_S, "the client was fast"
