"""Workers over other engines: counts that come at the end, fields that they lack, engines that refuse late."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import cast

import msgspec
import pytest

from server.errors import WorkerLostError
from server.request.choice import Choice, EngineTextRequest
from server.request.engine_answer import EngineAnswer
from server.text.tokenizer import Tokenizer
from tests.server.gateway_app import gateway
from tests.server.request.failing_workers import MakeWorker, dies_after
from tests.server.scripted_worker import Script, ScriptedWorker, script_of
from tests.server.test_app import chat, post
from worker.wire import End, EngineCall, Failed, Frame, GenerateRequest, Started


def counts_at_the_end(worker: ScriptedWorker, guess: int, found: int | None) -> Script:
    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        async for frame in worker.answer(request):
            match frame:
                case Started():
                    yield Started(guess)
                case End():
                    yield End(0.0, 0.0, 0.0, found)
                case _:
                    yield frame

    return behave


@pytest.mark.parametrize(("guess", "found", "expected"), [(16, 0, 0), (0, 32, 32), (16, 16, 16), (16, None, 16)])
async def test_usage_has_the_engines_own_count(make: MakeWorker, guess: int, found: int | None, expected: int) -> None:
    worker = make()
    worker.behave = counts_at_the_end(worker, guess, found)
    async with gateway(worker) as target:
        status, headers, raw = await post(target.url, chat())
        assert status == 200
        body = json.loads(raw)
        assert body["usage"]["prompt_tokens_details"]["cached_tokens"] == expected
        assert dict(headers)["x-headstart-cached-tokens"] == str(expected)
        _, _, raw = await post(target.url, chat(stream=True, stream_options={"include_usage": True}))
        usage = json.loads(raw.decode().split("data: ")[-2])["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected


async def test_a_resumed_answer_keeps_the_count_of_its_prompt(make: MakeWorker) -> None:
    """Its worker then has the prompt cached, and the output so far."""
    worker = make()
    behaviours = [dies_after(worker, 2), counts_at_the_end(worker, 16, 48)]

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        async for frame in behaviours.pop(0)(request):
            yield frame

    worker.behave = behave
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, chat(stream=True, stream_options={"include_usage": True}))
    assert behaviours == []
    usage = json.loads(raw.decode().split("data: ")[-2])["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 0


async def test_a_worker_that_cannot_take_it_now_is_no_lost_worker(make: MakeWorker) -> None:
    """An engine refuses in the stream, after its adapter has reported the start of the prefill. It is not poison."""
    for code in ("queue_full", "not_ready"):
        workers = [make() for _ in range(3)]
        refuses = script_of(Started(0), Failed(code, "the engine is full", retryable=True, retry_after_s=1.0))
        for worker in workers[:2]:
            worker.behave = refuses
        async with gateway(*workers) as target:
            status, _, raw = await post(target.url, chat())
            assert (status, json.loads(raw).get("error")) == (200, None)
            assert not workers[2].received[0].is_suspect
            workers[2].behave = refuses
            status, _, raw = await post(target.url, chat())
            assert status == (429 if code == "queue_full" else 503), raw


TOKENS = {0: b"", 1: b"a", 2: b" <", 3: b"<", 4: b"b", 5: b"\xe8\xaa", 6: b"\x9e"}
"""The bytes of some tokens; 5 and 6 are a character. None are known of token 0."""


def engine_answer() -> EngineAnswer:
    call, head = EngineCall("/v1/chat/completions", b"", streams=True), {"model": msgspec.Raw(b'"m"')}
    return EngineAnswer(
        EngineTextRequest(call=call, head=head, shows_usage=True, has_usage=True, shows_ids=False, is_resumable=True),
        cast("Tokenizer", SimpleNamespace(token_bytes=TOKENS)),
    )


@pytest.mark.parametrize(
    ("parts", "num_shown"),
    [
        ([("ab", [1, 4])], 2),
        ([("a", [1, 3])], 1),
        ([("a ", [1, 2])], None),
        ([(" ", [2])], None),
        ([("a", [1, 5])], 1),
        ([("a", [1]), ("", [5])], 1),
        ([("a", [1, 5]), ("語", [6])], 3),
        ([("a", [1, 3]), ("<b", [4])], 3),
        ([("a", [1]), ("", [3]), ("<b", [4])], 3),
        ([("a", [0])], 1),
        ([("a", [0, 0])], None),
    ],
)
def test_an_answer_goes_on_where_all_text_was_sent(parts: list[tuple[str, list[int]]], num_shown: int | None) -> None:
    """A parser may keep back the beginning of a call, and a detokenizer a part of a character."""
    answer, choice = engine_answer(), cast("Choice", SimpleNamespace(output_ids=[]))
    for content, ids in parts:
        choice.output_ids += ids
        answer.take(json.dumps({"choices": [{"delta": {"content": content}}]}).encode(), choice.output_ids)
    with pytest.raises(WorkerLostError) if num_shown is None else nullcontext():
        answer.restart([choice], client_has_output=True)
        assert len(choice.output_ids) == num_shown


def test_an_answer_that_begins_again_has_no_earlier_ids() -> None:
    answer, choice = engine_answer(), SimpleNamespace(output_ids=[1], reset=lambda: choice.output_ids.clear())
    answer.take(json.dumps({"choices": [{"delta": {"role": "assistant"}}]}).encode(), [1])
    answer.restart([cast("Choice", choice)], client_has_output=False)
    assert choice.output_ids == []


def test_the_rest_of_an_answer_shows_no_ids_without_request() -> None:
    answer, choice = engine_answer(), cast("Choice", SimpleNamespace(output_ids=[1]))
    answer.take(json.dumps({"choices": [{"delta": {"content": "a"}}]}).encode(), [1])
    answer.restart([choice], client_has_output=True)
    rest = {"delta": {"content": "b"}, "token_ids": [4], "prompt_token_ids": [1]}
    answer.take(json.dumps({"choices": [rest]}).encode(), [1, 4])
    [shown] = json.loads(answer.take_deltas()[-1].event)["choices"]
    assert (shown["token_ids"], shown["prompt_token_ids"]) == (None, None)


def test_a_resumed_prompt_is_never_more_cached_than_long() -> None:
    """The same engine may go on, after a connection was lost: it then has the output so far."""
    answer, choice = engine_answer(), cast("Choice", SimpleNamespace(output_ids=[1] * 20))
    answer.take(json.dumps({"choices": [{"delta": {"content": "a" * 20}}]}).encode(), [1] * 20)
    answer.restart([choice], client_has_output=True)
    usage = {"prompt_tokens": 60, "completion_tokens": 5, "prompt_tokens_details": {"cached_tokens": 48}}
    answer.take(json.dumps({"choices": [], "usage": usage}).encode(), [1] * 25)
    last = json.loads(answer.take_deltas()[-1].event)["usage"]
    assert (last["prompt_tokens"], last["completion_tokens"]) == (40, 25)
    assert last["prompt_tokens_details"] == {"cached_tokens": 40}


@pytest.mark.parametrize(
    ("begin", "part"),
    [
        ({"choices": [{"delta": {"role": "assistant", "content": ""}}]}, {"choices": [{"delta": {"content": "a"}}]}),
        ({"choices": []}, {"choices": [{"text": "a"}]}),
    ],
)
def test_a_cut_stream_without_ids_counts_its_events(begin: dict[str, object], part: dict[str, object]) -> None:
    """A client could leave before the usage and pay nothing."""
    answer = engine_answer()
    for event in (begin, part, part):
        answer.take(json.dumps(event).encode(), [])
    assert answer.num_output_tokens == 2
    answer.take(json.dumps({"choices": [], "usage": {"completion_tokens": 7}}).encode(), [])
    assert answer.num_output_tokens == 7
