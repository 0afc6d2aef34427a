"""Requests whose text an engine writes: its events pass, less what was not asked for, and lost streams go on."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from tokenizers import Tokenizer

from cache.records import WorkerMember
from server.api.engine import text as engine_text
from server.api.prompts.ignored_tools import IgnoredTools
from server.errors import InvalidRequestError
from tests.server.gateway_app import RunningGateway, gateway
from tests.server.scripted_worker import Die, Refuse, ScriptedWorker, script_of
from tests.server.sse_grammar import events
from tests.server.test_app import chat, post, post_once
from tests.waiting import until
from worker.common.capabilities import TOKENS
from worker.wire import (
    End,
    EngineCall,
    EngineText,
    Failed,
    Finished,
    Frame,
    GenerateRequest,
    Rendered,
    Started,
    TokenizerBundle,
    Tokens,
    pack,
    unpack,
)

APIS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")
WORDS = ("The", " capital", " is", " Paris", ".")
USAGE = {"prompt_tokens": 4, "completion_tokens": 5, "total_tokens": 9}


def chunk(delta: dict[str, Any] | None, ids: list[int] | None = None, **fields: Any) -> bytes:
    """One event of vLLM's chat stream."""
    choices = []
    if delta is not None:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": fields.pop("finish_reason", None)}
        choices = [choice | ({} if ids is None else {"token_ids": ids})]
    head = {"id": "chatcmpl-engine", "object": "chat.completion.chunk", "created": 1, "model": "engine-name"}
    return json.dumps(head | {"choices": choices} | fields).encode()


@dataclass(eq=False)
class EngineWorker(ScriptedWorker):
    """An adapter whose engine writes `parts`: each a delta with one token."""

    parts: list[dict[str, Any]] = field(default_factory=lambda: [{"content": word} for word in WORDS])
    dies_after: int | None = None
    gives_ids: bool = True
    rendered: list[dict[str, Any]] = field(default_factory=list)
    refuses_render: Failed | None = None
    tokenizer: Tokenizer | None = None
    silent: bool = False
    """It answers neither polls nor calls."""
    apis: tuple[str, ...] | None = None
    """The engine's; by default all. Without any, the worker is one with Headstart's engine."""

    def member(self) -> WorkerMember:
        return replace(super().member(), capabilities=(APIS if self.apis is None else self.apis) or (TOKENS,))

    def app(self) -> Starlette:
        app = super().app()
        app.router.routes.append(Route("/render", self._render, methods=["POST"]))
        return app

    async def _state(self, http: Request) -> Response:
        return Response(status_code=500) if self.silent else await super()._state(http)

    async def _render(self, http: Request) -> Response:
        if self.silent:
            return Response(pack(Failed("not_ready", "silent", retryable=True)), status_code=503)
        call = unpack(await http.body(), EngineCall)
        body = json.loads(call.body)
        self.rendered.append(body)
        if self.refuses_render is not None:
            return Response(pack(self.refuses_render), status_code=400)
        assert self.tokenizer is not None
        texts = [str(message["content"]) for message in body.get("messages", ())]
        ids = self.tokenizer.encode("<|im_start|>" + "\n".join(texts) + "<|im_end|>").ids
        return Response(pack(Rendered((tuple(ids),), (100,))))

    async def answer(self, request: GenerateRequest) -> AsyncIterator[Frame]:
        assert request.call is not None
        yield Started(self.num_cached_tokens)
        begun = len(request.choices[0].output_ids)
        if not request.call.streams:
            if self.dies_after is not None:
                raise Die
            message = {"role": "assistant", "content": "".join(part.get("content", "") for part in self.parts)}
            choice = {"index": 0, "message": message, "token_ids": [1, 2], "finish_reason": "stop"}
            body = {"id": "e", "created": 1, "model": "e", "choices": [choice], "prompt_token_ids": [1], "usage": USAGE}
            yield Tokens(0, (1, 2))
            yield EngineText(json.dumps(body).encode())
            yield Finished(0, "stop")
            yield End(0.0, 0.0, 0.0)
            return
        yield EngineText(chunk({"role": "assistant", "content": ""}, prompt_token_ids=[1, 2, 3, 4]))
        for number, part in enumerate(self.parts[begun:], begun):
            if number == self.dies_after:
                await asyncio.sleep(0.02)
                raise Die
            if self.gives_ids:
                yield Tokens(0, (10 + number,))
            reason = "stop" if number == len(self.parts) - 1 else None
            yield EngineText(chunk(part, [10 + number], finish_reason=reason))
        if "stream_options" in json.loads(request.call.body):
            usage = USAGE | {"prompt_tokens": 4 + begun, "completion_tokens": 5 - begun}
            yield EngineText(chunk(None, usage=usage, system_fingerprint="fp"))
        yield Finished(0, "stop")
        yield End(0.0, 0.0, 0.0)


@pytest.fixture
def engines(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> list[EngineWorker]:
    return [EngineWorker(bundle, f"w{number}", tokenizer=raw_tokenizer) for number in range(2)]


@asynccontextmanager
async def engine_gateway(*workers: EngineWorker, **options: Any) -> AsyncIterator[RunningGateway]:
    async with gateway(*workers, **options) as target:
        await until(lambda: any(model.facts.engine_paths for _, model in target.models.names()))
        yield target


def text_of(found: list[Any]) -> str:
    deltas = [choice["delta"] for event in found if event != "[DONE]" for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas)


async def test_events_pass_without_what_was_not_asked_for(engines: list[EngineWorker]) -> None:
    worker = engines[0]
    worker.num_cached_tokens = 3
    worker.parts[2:2] = [{}]  # a token that a parser keeps back
    async with engine_gateway(worker) as target:
        status, headers, raw = await post(target.url, chat(stream=True, cache_salt="s", seed=3, priority=0))
    found = events(raw)
    assert status == 200
    assert headers["x-headstart-cached-tokens"] == "3"
    assert text_of(found) == "".join(WORDS)
    assert found[-1] == "[DONE]"
    chunks = found[:-1]
    assert len(chunks) == 1 + len(WORDS)
    assert {event["model"] for event in chunks} == {"tiny"}
    assert len({event["id"] for event in chunks}) == 1
    assert chunks[0]["id"] != "chatcmpl-engine"
    assert chunks[0]["prompt_token_ids"] is None
    assert {json.dumps(event["choices"][0].get("token_ids")) for event in chunks} == {"null"}
    assert not any("usage" in event for event in chunks)
    assert [event.get("system_fingerprint") for event in chunks] == [None] * len(WORDS) + ["fp"]
    request = worker.received[0]
    assert request.call is not None
    body = json.loads(request.call.body)
    assert body["seed"] == 3
    assert body["stream_options"] == {"include_usage": True}
    assert not {"priority", "model"}.intersection(body)
    assert body["cache_salt"] == "s"  # for the engine to check; the adapter replaces it
    assert worker.tokenizer is not None
    text = "\n".join(message["content"] for message in body["messages"])
    assert request.prompt_ids == worker.tokenizer.encode(f"<|im_start|>{text}<|im_end|>").ids


async def test_what_was_asked_for_stays(engines: list[EngineWorker]) -> None:
    async with engine_gateway(engines[0]) as target:
        options = {"stream_options": {"include_usage": True}, "return_token_ids": True}
        _, _, raw = await post(target.url, chat(stream=True, **options))
        _, _, whole = await post(target.url, chat())
    found = events(raw)
    assert found[-2]["usage"] == USAGE
    assert found[0]["prompt_token_ids"] == [1, 2, 3, 4]
    assert [event["choices"][0].get("token_ids") for event in found[1:-2]] == [[10 + n] for n in range(5)]
    body = json.loads(whole)
    assert body["choices"][0]["message"]["content"] == "".join(WORDS)
    assert body["choices"][0]["token_ids"] is body["prompt_token_ids"] is None
    assert body["usage"] == USAGE
    assert body["model"] == "tiny"


@pytest.mark.parametrize("num_tokens", [0, 1, 3])
async def test_plain_content_goes_on_at_another_engine(engines: list[EngineWorker], num_tokens: int) -> None:
    engines[0].dies_after = num_tokens
    _, _, raw = await post_once(engine_gateway(*engines), chat(stream=True, stream_options={"include_usage": True}))
    found = events(raw)
    assert text_of(found) == "".join(WORDS)
    assert engines[1].received[0].choices[0].output_ids == tuple(10 + n for n in range(num_tokens))
    assert [event["choices"][0]["delta"].get("role") for event in found[:-2]].count("assistant") == 1
    assert found[-2]["usage"] == USAGE
    assert len({event["id"] for event in found[:-1]}) == 1


@pytest.mark.parametrize("role", [None, "assistant"])
async def test_text_with_a_role_goes_on_too(engines: list[EngineWorker], role: str | None) -> None:
    """SGLang writes the role, or a null, into every event."""
    for engine in engines:
        engine.parts = [{"role": role} | part for part in engine.parts]
    engines[0].dies_after = 0
    _, _, raw = await post_once(engine_gateway(*engines), chat(stream=True))
    found = events(raw)
    assert text_of(found) == "".join(WORDS)
    choices = [event["choices"][0] for event in found[:-1]]
    assert [choice["delta"].get("role") for choice in choices].count("assistant") == 1
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize("held", [{}, {"content": ""}])
async def test_tokens_without_text_are_computed_again(engines: list[EngineWorker], held: dict[str, Any]) -> None:
    """A parser may keep text back: what was not sent must not be in the next engine's prompt."""
    for engine in engines:
        engine.parts[1:1] = [held, held]
    engines[0].dies_after = 3
    _, _, raw = await post_once(engine_gateway(*engines), chat(stream=True))
    assert engines[1].received[0].choices[0].output_ids == (10,)
    assert text_of(events(raw)) == "".join(WORDS)


async def test_a_stream_without_token_ids_is_not_resumed(engines: list[EngineWorker]) -> None:
    """SGLang gives none in streams: another engine would write again what was sent."""
    engines[0].gives_ids, engines[0].dies_after = False, 2
    _, _, raw = await post_once(engine_gateway(*engines), chat(stream=True))
    assert events(raw)[-1]["error"]["code"] == "worker_lost"
    assert text_of(events(raw)[:-1]) == "".join(WORDS[:2])
    assert engines[1].received == []


@pytest.mark.parametrize(
    "part", [{"reasoning": "hm"}, {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]}]
)
async def test_reasoning_and_calls_end_with_an_error(engines: list[EngineWorker], part: dict[str, Any]) -> None:
    engines[0].parts = [part, {"content": "x"}]
    engines[0].dies_after = 1
    _, _, raw = await post_once(engine_gateway(*engines), chat(stream=True))
    assert events(raw)[-1]["error"]["code"] == "worker_lost"
    assert engines[1].received == []


@pytest.mark.parametrize("fields", [{"n": 2}, {"stop": "."}, {"presence_penalty": 1}, {"logprobs": True}])
async def test_what_depends_on_the_output_is_not_resumed(engines: list[EngineWorker], fields: dict[str, Any]) -> None:
    engines[0].dies_after = 2
    _, _, raw = await post_once(engine_gateway(*engines), chat(stream=True, **fields))
    assert events(raw)[-1]["error"]["code"] == "worker_lost"


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
async def test_errors_are_events_of_the_api(engines: list[EngineWorker], path: str) -> None:
    """Their clients read the type of each event from its name."""
    engines[0].behave = script_of(Started(0), EngineText(b'{"type": "message_start"}'), then=Die())
    async with engine_gateway(*engines) as target:
        body = {"model": "tiny", "input": "Hi", "stream": True} if path == "/v1/responses" else chat(stream=True)
        _, _, raw = await post(target.url, body, path)
    first, last = raw.decode().strip().split("\n\n")
    assert first.startswith("event: message_start\n")
    assert last.startswith("event: error\n")
    assert json.loads(last.split("data: ")[1])["type"] == "error"


async def test_an_unstreamed_answer_begins_again(engines: list[EngineWorker]) -> None:
    engines[0].dies_after = 0
    status, _, raw = await post_once(engine_gateway(*engines), chat())
    assert status == 200
    assert json.loads(raw)["choices"][0]["message"]["content"] == "".join(WORDS)
    assert engines[1].received[0].choices[0].output_ids == ()


async def test_engine_refuses_in_its_own_words(engines: list[EngineWorker]) -> None:
    engines[0].refuses_render = Failed("invalid_request", "not negative", retryable=False, param="temperature")
    status, _, raw = await post_once(engine_gateway(engines[0]), chat(temperature=-1))
    error = json.loads(raw)["error"]
    assert (status, error["message"], error["param"]) == (400, "not negative", "temperature")


@pytest.mark.parametrize("fields", [{"n": "many"}, {"priority": "text"}, {"cache_salt": ["x"]}, {"user": 1}])
async def test_fields_of_a_wrong_type_are_the_engines(engines: list[EngineWorker], fields: dict[str, Any]) -> None:
    """The engine gets them all, and refuses them in its own words."""
    engines[0].refuses_render = Failed("invalid_request", "a wrong type", retryable=False)
    async with engine_gateway(engines[0]) as target:
        status, _, raw = await post(target.url, chat(**fields))
        assert (status, json.loads(raw)["error"]["message"]) == (400, "a wrong type")
        assert engines[0].rendered[0].items() >= fields.items()


async def test_a_long_prompt_in_the_engines_words(engines: list[EngineWorker]) -> None:
    failed = Failed("context_length_exceeded", "the engine's words", retryable=False, param="prompt")
    engines[0].behave = script_of(failed)
    status, _, raw = await post_once(engine_gateway(engines[0]), chat())
    error = json.loads(raw)["error"]
    assert (status, error["message"], error["param"]) == (400, "the engine's words", "prompt")


@pytest.mark.parametrize(
    ("fields", "sent"),
    [
        ({}, {"thinks": False}),
        ({"chat_template_kwargs": None}, {"thinks": False}),
        ({"chat_template_kwargs": {"thinks": True}}, {"thinks": True}),
        ({"chat_template_kwargs": {"a": 1}}, {"thinks": False, "a": 1}),
        ({"chat_template_kwargs": "x"}, "x"),
    ],
)
async def test_the_operators_template_kwargs_are_sent(
    engines: list[EngineWorker], fields: dict[str, Any], sent: object
) -> None:
    """They set what the request does not set."""
    options: dict[str, Any] = {"default_chat_template_kwargs": {"": {"thinks": False}}}
    status, _, raw = await post_once(engine_gateway(engines[0], **options), chat(**fields))
    assert status == 200, raw
    call = engines[0].received[-1].call
    assert call is not None
    bodies = json.loads(call.body), engines[0].rendered[-1]
    assert [body["chat_template_kwargs"] for body in bodies] == [sent, sent]


@pytest.mark.parametrize(
    "event",
    [
        {"type": "message_start", "message": {"model": "engine-name", "usage": {}}},
        {"type": "response.created", "response": {"model": "engine-name", "instructions": None}},
        {"type": "message", "model": "engine-name"},
        {"type": "error", "message": "no model here"},
    ],
)
async def test_other_apis_have_the_clients_model(engines: list[EngineWorker], event: dict[str, Any]) -> None:
    text = EngineText(json.dumps(event).encode())
    engines[0].behave = script_of(Started(0), text, Finished(0, "stop"), End(0.0, 0.0, 0.0))
    async with engine_gateway(engines[0]) as target:
        body = chat(stream=True)
        _, _, raw = await post(target.url, body, "/v1/messages")
    got = json.loads(raw.decode().split("data: ")[1])
    assert got == json.loads(json.dumps(event).replace("engine-name", body["model"]))


async def test_a_lost_worker_renders_nothing(engines: list[EngineWorker]) -> None:
    engines[0].refuses_render = Failed("not_ready", "gone", retryable=True)
    async with engine_gateway(*engines) as target:
        answers = [await post(target.url, chat()) for _ in range(4)]
    assert {status for status, _, _ in answers} == {200}


@asynccontextmanager
async def silent_gateway(engines: list[EngineWorker], **options: Any) -> AsyncIterator[RunningGateway]:
    """A gateway that has learnt the model, and whose workers are all silent now."""
    async with engine_gateway(*engines, **options) as target:
        for engine in engines:
            engine.silent = True
        await until(lambda: not target.fleet.live_workers())
        yield target


async def test_silent_workers_are_waited_for(engines: list[EngineWorker], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_text, "MAX_WAITS", 0)
    async with silent_gateway(engines) as target:
        asked = asyncio.create_task(post(target.url, chat()))
        await asyncio.wait([asked], timeout=1.0)
        assert not asked.done()
        engines[1].silent = False
        status, _, _ = await asked
    assert status == 200


async def test_silent_workers_are_waited_for_until_the_deadline(engines: list[EngineWorker]) -> None:
    async with silent_gateway(engines, request_timeout_s=1.0) as target:
        status, _, raw = await post(target.url, chat())
    assert status == 504
    assert json.loads(raw)["error"]["code"] == "timeout"


async def test_a_gateway_that_stops_waits_for_no_engine(engines: list[EngineWorker]) -> None:
    async with engine_gateway(engines[0]) as target:
        engines[0].silent = True
        asked = asyncio.create_task(post(target.url, chat()))
        await until(lambda: target.endpoint.preparing)
        target.endpoint.shutdown()
        status, _, raw = await asked
        assert not target.endpoint.preparing
    assert (status, json.loads(raw)["error"]["code"]) == (503, "shutting_down")


async def test_workers_that_are_gone_are_not_waited_for_long(engines: list[EngineWorker]) -> None:
    async with engine_gateway(engines[0]) as target:
        engines[0].refuses_render = Failed("not_ready", "gone", retryable=True)
        status, _, _ = await post(target.url, chat())
    assert status == 503


async def test_a_worker_that_refuses_is_left(engines: list[EngineWorker]) -> None:
    engines[0].behave = script_of(then=Refuse(429, "queue_full", retry_after_s=1.0))
    _, _, raw = await post_once(engine_gateway(*engines), chat(stream=True))
    assert text_of(events(raw)) == "".join(WORDS)


def only_of_engine(engine: EngineWorker) -> EngineWorker:
    """Replace the worker's vocabulary by its control tokens."""
    added = json.loads(engine.bundle.tokenizer_json)["added_tokens"]
    vocabulary = json.dumps({"digest": "d", "added_tokens": added}).encode()
    engine.bundle = replace(engine.bundle, tokenizer_json=b"", engine_vocabulary=vocabulary)
    return engine


async def test_vocabularies_that_only_the_engine_reads(engines: list[EngineWorker]) -> None:
    """The engine writes all text, and control tokens of clients are refused."""
    async with engine_gateway(only_of_engine(engines[0])) as target:
        for path in ("/v1/chat/completions", "/v1/messages"):
            status, _, raw = await post(target.url, chat(), path)
            assert status == 200, raw
        message = [{"role": "user", "content": "hi<|im_end|>"}]
        status, _, raw = await post(target.url, chat(messages=message))
        assert (status, json.loads(raw)["error"]["code"]) == (400, "control_token")
        routes: dict[str, dict[str, Any]] = {
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [1]},
            "/v1/embeddings": {"input": "a"},
            "/v1/messages/count_tokens": {"messages": message},
        }
        for path, fields in routes.items():
            status, _, raw = await post(target.url, {"model": "tiny"} | fields, path)
            assert (status, b"only its engine can read" in raw) == (400, True), (path, raw)


async def test_routes_that_an_engine_lacks_are_named(engines: list[EngineWorker]) -> None:
    engines[0].apis = ("/v1/chat/completions",)
    async with engine_gateway(engines[0]) as target:
        for path, fields in (("/v1/completions", {"prompt": [1, 2]}), ("/v1/responses", {"input": "a"})):
            status, _, raw = await post(target.url, {"model": "tiny"} | fields, path)
            assert (status, f"not {path}".encode() in raw) == (400, True), (path, raw)


WEB: Any = {"tools": [{"type": "web_search", "name": "web_search"}]}


@pytest.mark.parametrize(
    ("path", "choice", "is_refused"),
    [
        (APIS[0], "required", True),
        (APIS[0], {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{}]}}, True),
        (APIS[0], {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [{}]}}, False),
        (APIS[0], "auto", False),
        (APIS[2], {"type": "any"}, True),
        (APIS[2], {"type": "tool", "name": "web_search"}, True),
        (APIS[2], {"type": "auto"}, False),
        (APIS[3], {"type": "web_search"}, True),
        (APIS[3], "none", False),
    ],
)
def test_a_call_of_the_vendors_tools_alone_is_refused(path: str, choice: Any, is_refused: bool) -> None:
    body = {**WEB, "path": path, "tool_choice": choice}
    ignored = IgnoredTools(strict_tools=False, strict_blocks=False)
    if not is_refused:
        assert ignored.without(body) == ({"path": path}, "web_search")
        return
    with pytest.raises(InvalidRequestError, match="cannot run web_search") as refused:
        ignored.without(body)
    assert refused.value.param == "tool_choice"
