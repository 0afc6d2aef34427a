"""Requests that do not fit a context: limits that are cut, and each API's sentence for a prompt that is too long."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from typing import Any, Final

import aiohttp
import pytest
from tokenizers import Tokenizer

from tests.server.gateway_app import RunningGateway, gateway
from tests.server.messages_grammar import check_error, check_message, events_of, read_stream
from tests.server.scripted_worker import Refuse, Says, ScriptedWorker, script_of
from tests.server.test_app import post
from worker.wire import Failed, Frame, GenerateRequest, Started, TokenizerBundle

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MESSAGES, COUNT_TOKENS = "/v1/messages", "/v1/messages/count_tokens"
ROUTES: Final = (CHAT, COMPLETIONS, RESPONSES, MESSAGES)
CONTEXT: Final = 256
HUGE: Final = 32_000
ANTHROPIC: Final = re.compile(r"prompt is too long: (\d+) tokens > (\d+) maximum")
RESPONSES_SENTENCE: Final = (
    "Your input exceeds the context window of this model. Please adjust your input and try again."
)


@pytest.fixture
def worker(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> ScriptedWorker:
    """One whose answer never ends by itself."""
    worker = Says(bundle, raw_tokenizer)("word " * 4, max_model_len=CONTEXT)
    worker.reply *= CONTEXT
    return worker


def body(path: str, text: str = "Hi", limit: int | None = None, **fields: Any) -> dict[str, Any]:
    match path:
        case "/v1/responses":
            fields |= {"input": text, "max_output_tokens": limit}
        case "/v1/completions":
            fields |= {"prompt": text, "max_tokens": limit}
        case _:
            fields |= {"messages": [{"role": "user", "content": text}]}
            fields |= {"max_tokens": (limit or 16) if path == MESSAGES else limit}
    return {"model": "tiny", "seed": 1, **fields}


def words(num_words: int) -> str:
    return "word " * num_words


def asked(worker: ScriptedWorker) -> tuple[int, int]:
    """The prompt's tokens, and the limit that the worker got."""
    request = worker.received[-1]
    return len(request.prompt_ids), request.sampling.max_tokens


def responses_events(raw: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in raw.decode().splitlines() if line.startswith("data: ")]


@pytest.mark.parametrize("path", [MESSAGES, RESPONSES])
async def test_a_limit_beyond_the_context_takes_what_fits(worker: ScriptedWorker, path: str) -> None:
    async with gateway(worker) as target:
        for text in ("Hi", words(50)):
            status, _, raw = await post(target.url, body(path, text, HUGE), path)
            assert status == 200, raw
            num_prompt, limit = asked(worker)
            assert limit == CONTEXT - num_prompt
            answer = json.loads(raw)
            assert answer["usage"]["output_tokens"] == limit
            status, _, stream = await post(target.url, body(path, text, HUGE, stream=True), path)
            assert status == 200, stream
            assert asked(worker) == (num_prompt, limit)
            if path == MESSAGES:
                assert (answer["stop_reason"], read_stream(stream)["stop_reason"]) == ("max_tokens", "max_tokens")
            else:
                last = responses_events(stream)[-1]
                assert last["type"] == "response.incomplete"
                for response in (answer, last["response"]):
                    assert (response["status"], response["max_output_tokens"]) == ("incomplete", HUGE)
                    assert response["incomplete_details"] == {"reason": "max_output_tokens"}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_openais_limits_are_demands_unless_the_gateway_cuts_them(worker: ScriptedWorker, path: str) -> None:
    async with gateway(worker) as target:
        for fields in ({"limit": HUGE}, {"max_completion_tokens": HUGE}) if path == CHAT else ({"limit": HUGE},):
            status, _, raw = await post(target.url, body(path, **fields), path)
            assert (status, json.loads(raw)["error"]["code"]) == (400, "context_length_exceeded")
            assert f"{HUGE} in the completion" in json.loads(raw)["error"]["message"]
        assert worker.received == []
    async with gateway(worker, clamp_max_tokens=True) as target:
        for fields in ({"limit": HUGE}, {"max_completion_tokens": HUGE}) if path == CHAT else ({"limit": HUGE},):
            status, _, raw = await post(target.url, body(path, **fields), path)
            assert status == 200, raw
            num_prompt, limit = asked(worker)
            assert limit == CONTEXT - num_prompt
            assert json.loads(raw)["choices"][0]["finish_reason"] == "length"
        status, _, raw = await post(target.url, body(path, words(400), HUGE), path)
        assert (status, json.loads(raw)["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("path", ROUTES)
async def test_a_limit_that_fits_is_kept(worker: ScriptedWorker, path: str) -> None:
    async with gateway(worker, clamp_max_tokens=True) as target:
        for limit in (1, 7):
            assert (await post(target.url, body(path, limit=limit), path))[0] == 200
            assert asked(worker)[1] == limit


@pytest.mark.parametrize("path", ROUTES)
async def test_tokens_that_an_answer_has_to_have_are_no_upper_bound(worker: ScriptedWorker, path: str) -> None:
    async with gateway(worker, clamp_max_tokens=True) as target:
        for least, limit, said in ((20, 10, "max_"), (CONTEXT, HUGE, "the context has room for")):
            status, headers, raw = await post(target.url, body(path, limit=limit, min_tokens=least), path)
            message = check_error(raw, headers)["message"] if path == MESSAGES else json.loads(raw)["error"]["message"]
            assert status == 400
            assert message.startswith("min_tokens must not be above ")
            assert said in message
        assert worker.received == []


async def refused(target: RunningGateway, path: str, sent: Any, status: int = 400) -> str:
    """Return the error of a request in its API; a stream that has not begun gets the same."""
    sentences = set()
    for stream in (False, True) if len(str(sent)) < 1 << 20 else (True,):
        got, headers, raw = await post(target.url, {**sent, "stream": stream}, path)
        assert got == status, raw
        if path in (MESSAGES, COUNT_TOKENS):
            error = check_error(raw, headers)
            assert error["type"] == "invalid_request_error"
        else:
            error = json.loads(raw)["error"]
            assert (error["type"], error["code"]) == ("invalid_request_error", "context_length_exceeded")
            assert error["param"] == {CHAT: "messages", COMPLETIONS: "prompt", RESPONSES: "input"}[path]
        sentences.add(error["message"])
    [sentence] = sentences
    return str(sentence)


def check_sentence(path: str, sentence: str) -> None:
    match path:
        case "/v1/messages" | "/v1/messages/count_tokens":
            found = ANTHROPIC.fullmatch(sentence)
            assert found is not None, sentence
            assert int(found[1]) > int(found[2]) == CONTEXT
        case "/v1/responses":
            assert sentence == RESPONSES_SENTENCE
        case _:
            assert sentence.startswith("This model's maximum context length is ")


TEXTS: Final[dict[str, Callable[[], str]]] = {
    "tokenised to the end": lambda: words(260),
    "tokenised up to where it cannot fit": lambda: "zq " * 4000,
    "not tokenised, by its characters": lambda: "z" * 90_000,
    "not tokenised, in control tokens": lambda: "<|im_end|>" * 8000,
    "not decoded, by the body's strings": lambda: "z" * 13_000_000,
}


@pytest.mark.parametrize("path", ROUTES)
async def test_a_prompt_that_is_too_long_gets_the_sentence_of_the_api(worker: ScriptedWorker, path: str) -> None:
    """Every way to such a prompt gives the sentence of its API."""
    async with gateway(worker, max_body_bytes=64 << 20) as target:
        for text in TEXTS.values():
            check_sentence(path, await refused(target, path, body(path, text(), HUGE)))
        assert worker.received == []


async def test_the_numbers_are_the_prompts_where_it_was_counted(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        for num_words in (20, 80, 85, 90, 200):
            sent = body(MESSAGES, words(num_words), 5)
            _, _, raw = await post(target.url, {**sent, "max_tokens": None}, COUNT_TOKENS)
            counted = json.loads(raw)["input_tokens"]
            status, headers, raw = await post(target.url, sent, MESSAGES)
            if counted < CONTEXT:
                assert (status, asked(worker)[0]) == (200, counted)
                continue
            found = ANTHROPIC.fullmatch(check_error(raw, headers)["message"])
            assert found is not None
            assert int(found[1]) in (counted, CONTEXT + 1)


async def test_a_prompt_that_is_not_even_counted(worker: ScriptedWorker) -> None:
    async with gateway(worker, max_body_bytes=64 << 20) as target:
        for num_words in (40_000, 90_000):
            check_sentence(COUNT_TOKENS, await refused(target, COUNT_TOKENS, body(MESSAGES, words(num_words))))


async def test_a_body_beyond_every_context(worker: ScriptedWorker) -> None:
    """Claude Code shortens the conversation after a 413 that speaks of the context window."""
    async with gateway(worker, max_body_bytes=64 << 20) as target:
        longest = target.models.batch_text_limit().num_bytes
        assert longest is not None
        text = "z" * (longest + (12 << 20))
        for path in (MESSAGES, RESPONSES):
            status, headers, raw = await post(target.url, body(path, text), path)
            assert status == 413
            if path == MESSAGES:
                error = check_error(raw, headers)
                assert error["type"] == "request_too_large"
                assert "context window" in error["message"]
            else:
                assert json.loads(raw)["error"]["code"] == "request_too_large"


TOO_LONG: Final = "max_tokens: 9 prompt tokens and 2039 output tokens exceed the context of 8 tokens"


@pytest.mark.parametrize("path", ROUTES)
async def test_a_worker_with_less_room(worker: ScriptedWorker, path: str) -> None:
    worker.behave = script_of(then=Refuse(400, "context_length_exceeded", retryable=False))
    async with gateway(worker) as target:
        check_sentence(path, await refused(target, path, body(path)))


@pytest.mark.parametrize("path", ROUTES)
async def test_a_stream_that_has_begun_says_it_in_its_last_events(worker: ScriptedWorker, path: str) -> None:
    release = asyncio.Event()

    async def refuses_late(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        await release.wait()
        yield Failed("context_length_exceeded", TOO_LONG, retryable=False)

    worker.behave = refuses_late
    async with (
        gateway(worker, ping_s=0.02) as target,
        aiohttp.ClientSession() as session,
        session.post(target.url + path, json=body(path, stream=True)) as response,
    ):
        first = await response.content.readuntil(b"\n")
        release.set()
        raw = await response.read()
    if path == MESSAGES:
        last = events_of(first + raw)[-1]
        assert (last["type"], last["error"]["type"]) == ("error", "invalid_request_error")
        check_sentence(path, last["error"]["message"])
    elif path == RESPONSES:
        *start, error, failed = responses_events(raw)
        assert [event["type"] for event in start] == ["response.created", "response.in_progress"]
        assert [event["sequence_number"] for event in (*start, error, failed)] == [0, 1, 2, 3]
        assert (error["type"], error["code"], error["param"]) == ("error", "context_length_exceeded", "input")
        check_sentence(path, error["message"])
        assert (failed["type"], failed["response"]["status"]) == ("response.failed", "failed")
        assert failed["response"]["error"] == {"code": error["code"], "message": error["message"]}
    else:
        check_sentence(path, responses_events(raw)[-1]["error"]["message"])


@pytest.mark.parametrize("path", ROUTES)
async def test_a_limit_is_cut_to_the_context_of_the_answering_worker(
    worker: ScriptedWorker, bundle: TokenizerBundle, path: str
) -> None:
    """The model is learnt from the worker with the longer context."""
    short = ScriptedWorker(replace(bundle, max_model_len=128), "w1", reply=worker.reply)
    async with gateway(worker, short, clamp_max_tokens=True) as target:
        target.router.members.reverse()
        for limit in (HUGE, 1000, *([None] if path in (CHAT, RESPONSES) else [])):
            assert (await post(target.url, body(path, limit=limit), path))[0] == 200
            num_prompt, given = asked(short)
            assert given == 128 - num_prompt
        assert (await post(target.url, body(path, limit=9), path))[0] == 200
        assert asked(short)[1] == 9
    assert worker.received == []


async def test_messages_without_tokens_fill_the_cache(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        status, _, raw = await post(target.url, {**body(MESSAGES), "max_tokens": 0}, MESSAGES)
        assert status == 200, raw
        answer = check_message(json.loads(raw))
        assert (answer["content"], answer["stop_reason"], answer["usage"]["output_tokens"]) == ([], "max_tokens", 0)
        assert asked(worker)[1] == 1
        status, _, stream = await post(target.url, {**body(MESSAGES), "max_tokens": 0, "stream": True}, MESSAGES)
        assert {**read_stream(stream), "id": ""} == {**answer, "id": ""}
