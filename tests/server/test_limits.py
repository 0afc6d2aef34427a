"""The cost of a request is limited before it is spent, and long work on it is done in slices."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from tokenizers import Tokenizer as RawTokenizer

from benchmarks.dev.gateway_load.processes import free_ports, until_ready
from benchmarks.dev.limits import SPARE_BYTES, Case, Site, cases, measure
from server.api.formatting import LazyJson, json_parts
from server.api.prompts import params
from server.api.prompts.limits import TEXT_ROOM
from server.event_loop import Steps, run_now, run_sliced, sample_delay
from server.metrics import GatewayMetrics
from server.request.response import MAX_AT_ONCE
from server.schema import decoding
from server.schema.decoding import MAX_CONTAINERS, MAX_VALUES
from server.text.chat_template import ChatTemplate
from server.text.tokenizer import Tokenizer
from tests.server.auth.test_authentication import raw
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.server.test_app import chat, post

COMPLETIONS = "/v1/completions"


def refusal(answer: bytes) -> tuple[str | None, str | None]:
    error = json.loads(answer)["error"]
    return error["code"], error["param"]


@pytest.mark.parametrize("unit", ["zyqxv ", "z", "<|im_end|>", "\u00e9\U0001f600"])
async def test_oversized_prompt_is_refused_before_tokenising(
    worker: ScriptedWorker, unit: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(worker, max_body_bytes=32 << 20) as target:
        model = target.models.get("tiny")
        assert model.prompt_bytes is not None
        text = unit * (2 * model.prompt_bytes // len(unit.encode()))
        monkeypatch.setattr(Tokenizer, "_encode_segments", None)
        status, _, answer = await post(target.url, chat(messages=[{"role": "user", "content": text}]))
        assert (status, *refusal(answer)) == (400, "context_length_exceeded", "messages")
        status, _, answer = await post(target.url, {"model": "tiny", "prompt": text}, COMPLETIONS)
        assert (status, *refusal(answer)) == (400, "context_length_exceeded", "prompt")
        assert not worker.received


async def test_text_that_a_template_drops_counts_before_it_is_rendered(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with gateway(worker, max_body_bytes=32 << 20) as target:
        model = target.models.get("tiny")
        assert model.prompt_bytes is not None
        monkeypatch.setattr(ChatTemplate, "render_in_slices", None)
        thoughts = "z" * (TEXT_ROOM * model.prompt_bytes)
        for field in ("reasoning_content", "reasoning", "content"):
            messages = [{"role": "assistant", "content": "Hi", field: thoughts}, {"role": "user", "content": "go"}]
            status, _, answer = await post(target.url, chat(messages=messages))
            assert (status, *refusal(answer)) == (400, "context_length_exceeded", "messages")
        assert not worker.received


async def test_tokenising_ends_where_the_context_ends(worker: ScriptedWorker) -> None:
    """The bound admits the text: only its tokens show that it is too long."""
    async with gateway(worker) as target:
        tokenizer = target.models.get("tiny").tokenizer
        text = "zq " * 4000
        assert tokenizer.bound is not None
        assert run_now(tokenizer.bound.least_tokens(text)) < 2048
        status, _, answer = await post(target.url, {"model": "tiny", "prompt": text}, COMPLETIONS)
        assert (status, *refusal(answer)) == (400, "context_length_exceeded", "prompt")
        assert tokenizer._cache.num_bytes < len(text)
        status, _, _ = await post(
            target.url, {"model": "tiny", "prompt": "zq " * 1000, "truncate_prompt_tokens": 9}, COMPLETIONS
        )
        assert status == 200
        assert len(worker.received[-1].prompt_ids) == 9


async def test_bodies_beyond_any_need_are_refused_unread(worker: ScriptedWorker) -> None:
    async with gateway(worker, max_body_bytes=1 << 30) as target:
        head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\n\r\n"
        status, answer = await raw(target.url, head % (64 << 20))
        assert status == 413
        assert b"send less text" in answer


async def test_bodies_that_grow_in_decoding_are_refused(worker: ScriptedWorker) -> None:
    async with gateway(worker, max_body_bytes=32 << 20) as target:
        for unit, count in ((b"7", MAX_VALUES + 1), (b"{}", MAX_CONTAINERS + 1)):
            for field in ("unknown", "chat_template_kwargs", "prompt"):
                body = b'{"model":"tiny","messages":[],"%b":[%b]}' % (field.encode(), b",".join([unit] * count))
                status, _, answer = await post(target.url, body)
                assert status == 400
                assert b"holds more than" in answer
        ids = [7] * 1_000_000
        assert (await post(target.url, chat(allowed_token_ids=ids)))[0] == 200, "so many are allowed"


async def test_brackets_and_quotes_in_text_are_not_structure(worker: ScriptedWorker) -> None:
    async with gateway(worker, max_body_bytes=32 << 20) as target:
        status, _, _ = await post(target.url, chat(user='"[{,\\' * 200_000))
        assert status == 200


async def test_bad_words_are_made_in_batches(
    worker: ScriptedWorker, raw_tokenizer: RawTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [f"word {number} is bad" for number in range(1024)]
    async with gateway(worker) as target:
        sizes: list[int] = []
        encode = Tokenizer.encode_texts
        monkeypatch.setattr(
            Tokenizer, "encode_texts", lambda self, texts: (sizes.append(sum(map(len, texts))), encode(self, texts))[1]
        )
        assert (await post(target.url, chat(bad_words=words)))[0] == 200
        assert max(sizes) < 32_768
        banned = [raw_tokenizer.encode(text, add_special_tokens=False).ids for w in words for text in (w, " " + w)]
        assert list(map(list, worker.received[0].sampling.bad_words)) == banned
        status, _, answer = await post(target.url, chat(bad_words=["x" * 1024] * 300))
        assert (status, refusal(answer)[1]) == (400, "bad_words")


async def test_many_prompts_share_their_parameters_and_take_turns(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    made = params.with_sampling
    monkeypatch.setattr(params, "with_sampling", lambda *a, **k: (calls.append(1), made(*a, **k))[1])
    async with gateway(worker) as target:
        most = 0

        async def watch() -> None:
            nonlocal most
            while True:
                most = max(most, sum("close" not in each.calls for each in target.router.placements))
                await asyncio.sleep(0)

        watching = asyncio.create_task(watch())
        body = {"model": "tiny", "prompt": [f"p{n}" for n in range(200)], "max_tokens": 1, "bad_words": ["a b"]}
        status, _, answer = await post(target.url, body, COMPLETIONS)
        watching.cancel()
        assert status == 200
        assert len(json.loads(answer)["choices"]) == 200
        assert len(calls) == 1
        assert 1 < most <= MAX_AT_ONCE


async def test_fields_that_go_along_with_every_prompt_are_bounded(worker: ScriptedWorker) -> None:
    async with gateway(worker, max_body_bytes=32 << 20) as target:
        body = {"model": "tiny", "prompt": ["a"] * 64, "bad_words": [f"{n} " + "a b " * 240 for n in range(30)]}
        status, _, answer = await post(target.url, body, COMPLETIONS)
        assert (status, refusal(answer)[1]) == (400, "prompt")
        body = {"model": "tiny", "prompt": [[7] * 1000] * 600}
        assert (await post(target.url, body | {"max_tokens": 1}, COMPLETIONS))[0] == 200
        status, _, answer = await post(target.url, body | {"echo": True, "logprobs": 20}, COMPLETIONS)
        assert (status, refusal(answer)[1]) == (400, "logprobs")


async def test_ids_to_text_in_bounded_parts(worker: ScriptedWorker) -> None:
    async with gateway(worker, max_body_bytes=32 << 20) as target:
        status, _, answer = await post(target.url, {"tokens": [70] * 65_537}, "/detokenize")
        assert (status, refusal(answer)[1]) == (400, "tokens")
        assert (await post(target.url, {"tokens": [70] * 65_536}, "/detokenize"))[0] == 200


async def test_large_schemas_and_tools_are_refused(worker: ScriptedWorker) -> None:
    schema = {"type": "object", "properties": {f"field {n}": {"type": "string"} for n in range(40_000)}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    formatted = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    async with gateway(worker, max_body_bytes=32 << 20) as target:
        status, _, answer = await post(target.url, chat(tools=[tool]))
        assert (status, refusal(answer)[1]) == (400, "tools")
        status, _, answer = await post(target.url, chat(response_format=formatted))
        assert status == 400
        assert (refusal(answer)[1] or "").startswith("response_format")


async def test_paced_work_lets_others_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.event_loop.SLICE_S", 0.0)
    turns = []

    def work(name: str) -> Steps[str]:
        for number in range(3):
            turns.append(f"{name}{number}")
            yield
        return name

    assert await asyncio.gather(run_sliced(work("a")), run_sliced(work("b"))) == ["a", "b"]
    assert turns == ["a0", "b0", "a1", "b1", "a2", "b2"]
    assert run_now(work("c")) == "c"


async def test_the_loops_delay_is_reported_once() -> None:
    metrics = GatewayMetrics()
    sampling = asyncio.create_task(sample_delay(metrics.delayed))
    await asyncio.sleep(0.05)
    time.sleep(0.3)  # noqa: ASYNC251 (this is what is measured)
    await asyncio.sleep(0.05)
    sampling.cancel()
    value = metrics.registry.get_sample_value
    assert (value("headstart_event_loop_longest_delay_seconds") or 0.0) >= 0.25
    assert value("headstart_event_loop_longest_delay_seconds") == 0.0, "since the last scrape"
    assert value("headstart_event_loop_delay_seconds_bucket", {"le": "0.25"}) != value(
        "headstart_event_loop_delay_seconds_bucket", {"le": "+Inf"}
    )


@pytest.mark.parametrize(
    "value",
    [
        1,
        [],
        LazyJson(),
        LazyJson(a=iter(())),
        LazyJson(a=iter([1, "x"]), b=LazyJson(c=iter([{"d": [1]}, None]))),
        {"a": [{}]},
    ],
)
def test_json_in_parts_is_json(value: Any) -> None:
    def plain(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: plain(each) for key, each in item.items()}
        return [plain(each) for each in item] if isinstance(item, Iterator) else item

    text = b"".join(json_parts(value))
    if not isinstance(value, LazyJson):
        assert json.loads(text) == plain(value)
    else:
        assert json.loads(text) is not None


def test_a_body_is_measured_the_same_however_it_is_sliced(monkeypatch: pytest.MonkeyPatch) -> None:
    body = json.dumps([{'a\\"[': ['"\\', {"b": [[]]}, "{{[["], "c": 1.5}] * 20).encode()
    expected = run_now(decoding.measure(body))
    assert (expected.depth, expected.num_containers) == (6, 1 + 20 * 5)
    for size in (2, 3, 5, 64):
        monkeypatch.setattr(decoding, "_SLICE_BYTES", size)
        shape = run_now(decoding.measure(body))
        assert (shape.depth, shape.num_containers, shape.num_values) == (
            expected.depth,
            expected.num_containers,
            expected.num_values,
        )


SHORT = ("one_new_word", "one_new_word_15_mb", "many_small_prompts_16_mb", "empty_objects", "wide_15_mb")


@contextlib.contextmanager
def process(worker: ScriptedWorker) -> Iterator[Site]:
    port, ops_port = free_ports(2)
    command = [sys.executable, "-m", "server.gateway", "--port", str(port), "--ops-port", str(ops_port)]
    started = subprocess.Popen([*command, "--workers", worker.url, "--log-level", "error", "--drain-grace-s", "0"])
    try:
        yield Site(f"http://127.0.0.1:{port}", f"http://127.0.0.1:{ops_port}", started, worker.url, started)
    finally:
        started.kill()
        started.wait()


async def test_no_request_makes_the_gateway_much_larger(worker: ScriptedWorker) -> None:
    """Measure memory like `headstart bench limits`, for the requests that need most of it."""
    chosen = [case for case in cases() if case.name in SHORT]
    assert len(chosen) == len(SHORT)
    async with listening(worker.app()) as worker.url:
        with process(worker) as site:
            await until_ready(site.url)
            for case in chosen:
                renamed = Case(case.name, case.path, lambda case=case: case.body().replace(b'"limits"', b'"tiny"', 1))
                done = await measure(site, renamed, 60.0)
                assert done.status in (200, 400, 413), case.name
                assert done.grown_bytes <= 2 * done.body_bytes + SPARE_BYTES, case.name
