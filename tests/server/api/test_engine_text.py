"""Requests whose text an engine writes: its events pass, less what was not asked for, and lost streams go on."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tests.server.api.engine_worker import USAGE, WORDS, EngineWorker, engine_gateway, text_of
from tests.server.conftest import bundle_of, trained_tokenizer
from tests.server.scripted_worker import listening, script_of
from tests.server.sse_grammar import events
from tests.server.test_app import chat, post, post_once
from tests.server.text.template_families import CHANNELS
from worker.wire import (
    Failed,
)


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
    call = engines[0].received[0].call
    assert call is not None
    assert json.loads(call.body)["return_token_ids"], "an adapter does not ask for the ids of an echo"
    assert found[-2]["usage"] == USAGE
    assert found[0]["prompt_token_ids"] == [1, 2, 3, 4]
    assert [event["choices"][0].get("token_ids") for event in found[1:-2]] == [[10 + n] for n in range(5)]
    body = json.loads(whole)
    assert body["choices"][0]["message"]["content"] == "".join(WORDS)
    assert body["choices"][0]["token_ids"] is body["prompt_token_ids"] is None
    assert body["usage"] == USAGE
    assert body["model"] == "tiny"


async def test_a_busy_gateway_asks_for_several_tokens_an_event(
    engines: list[EngineWorker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client's own wish wins, and an answer that is no stream needs none."""
    monkeypatch.setattr("server.event_loop.StreamInterval.num_tokens", lambda self: 4)
    async with engine_gateway(engines[0]) as target:
        for body in (chat(stream=True), chat(stream=True, stream_interval=2), chat()):
            assert (await post(target.url, body))[0] == 200
    calls = [request.call for request in engines[0].received]
    assert [json.loads(call.body).get("stream_interval") for call in calls if call is not None] == [4, 2, None]


async def test_a_format_that_only_the_engine_reads_passes(caplog: pytest.LogCaptureFixture) -> None:
    """The gateway has no parser of gpt-oss's channels, and needs none: nothing warns of it."""
    tokenizer, called = trained_tokenizer(), {"name": "now", "arguments": "{}"}
    parts = [{"reasoning": "hm"}, {"tool_calls": [{"index": 0, "id": "c", "type": "function", "function": called}]}]
    worker = EngineWorker(bundle_of(tokenizer, chat_template=CHANNELS), parts=parts, tokenizer=tokenizer)
    async with engine_gateway(worker) as target:
        assert [model.tool_format for _, model in target.models.names()] == [None]
        _, _, raw = await post(target.url, chat(stream=True))
    deltas = [choice["delta"] for event in events(raw)[:-1] for choice in event["choices"]]
    assert [delta for delta in deltas if "role" not in delta] == parts
    assert not [record for record in caplog.records if "--tool-parser" in record.getMessage()]


COMPLETION = {"model": "tiny", "prompt": "The"}


@pytest.mark.parametrize(
    ("num_tokens", "body"), [(0, chat()), (1, chat()), (3, chat()), (0, COMPLETION), (2, COMPLETION)]
)
async def test_plain_content_goes_on_at_another_engine(
    engines: list[EngineWorker], num_tokens: int, body: dict[str, Any]
) -> None:
    engines[0].dies_after, is_chat = num_tokens, "messages" in body
    path, options = f"/v1/{'chat/' * is_chat}completions", {"stream": True, "stream_options": {"include_usage": True}}
    _, _, raw = await post_once(engine_gateway(*engines), body | options, path)
    found = events(raw)
    assert text_of(found) == "".join(WORDS)
    assert engines[1].received[0].choices[0].output_ids == tuple(10 + n for n in range(num_tokens))
    assert [event["choices"][0].get("delta", {}).get("role") for event in found[:-2]].count("assistant") == is_chat
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


@pytest.mark.parametrize(
    "fields",
    [
        *({"n": 2}, {"stop": "."}, {"presence_penalty": 1}, {"logprobs": True}, {"return_prompt_text": True}),
        *({"vllm_xargs": {"ngram_size": 3}}, {"repetition_detection": {"max_pattern_size": 4}}),
    ],
)
async def test_what_depends_on_the_output_is_not_resumed(engines: list[EngineWorker], fields: dict[str, Any]) -> None:
    engines[0].dies_after = 2
    _, _, raw = await post_once(engine_gateway(*engines), chat(stream=True, **fields))
    assert events(raw)[-1]["error"]["code"] == "worker_lost"


@pytest.mark.parametrize("is_chat", [True, False])
async def test_ids_of_a_stream_that_goes_on_come_once(engines: list[EngineWorker], is_chat: bool) -> None:
    engines[0].dies_after = 2
    path, body = ("/v1/chat/completions", chat()) if is_chat else ("/v1/completions", COMPLETION)
    if not is_chat:  # the first event of each has the prompt
        for engine, number in zip(engines, (0, 2), strict=False):
            engine.parts[number] = engine.parts[number] | {"prompt_token_ids": [1, 2]}
    async with engine_gateway(*engines) as target:
        _, _, raw = await post(target.url, body | {"stream": True, "return_token_ids": True}, path)
    found = [event for event in events(raw) if event != "[DONE]"]
    assert [id_ for event in found for id_ in event["choices"][0].get("token_ids") or ()] == [10, 11, 12, 13, 14]
    prompts = [event.get("prompt_token_ids") or event["choices"][0].get("prompt_token_ids") for event in found]
    assert sum(prompt is not None for prompt in prompts) == 1


async def test_ids_that_were_sent_before_their_text_are_not_sent_again(engines: list[EngineWorker]) -> None:
    engines[0].parts = [{"content": "a"}, {"content": ""}, {"content": "b"}]
    engines[0].dies_after = 2
    _, _, raw = await post_once(engine_gateway(*engines), chat(stream=True, return_token_ids=True))
    assert events(raw)[-1]["error"]["code"] == "worker_lost"


async def test_an_unstreamed_answer_begins_again(engines: list[EngineWorker]) -> None:
    engines[0].dies_after = 0
    status, _, raw = await post_once(engine_gateway(*engines), chat())
    assert status == 200
    assert json.loads(raw)["choices"][0]["message"]["content"] == "".join(WORDS)
    assert engines[1].received[0].choices[0].output_ids == ()


@pytest.mark.parametrize("stream", [False, True])
async def test_the_router_knows_an_answer_that_comes_as_a_whole(engines: list[EngineWorker], *, stream: bool) -> None:
    async with engine_gateway(engines[0]) as target:
        await post(target.url, chat(stream=stream))
        assert [placement.request.is_whole for placement in target.router.placements] == [not stream]


async def test_explain_and_compare_ask_the_engine_too(engines: list[EngineWorker]) -> None:
    """The gateway's own prompts would be placed at no worker."""
    async with engine_gateway(engines[0]) as target, listening(target.ops) as ops:
        _, _, raw = await post(ops, chat(temperature=0.5), "/route/explain")
        explained = json.loads(raw)
        assert ([each["guard"] for each in explained["workers"]], explained["choice"]) == ([None], ["w0"])
        assert explained["sampling_params"] == {}
        _, _, raw = await post(ops, {"a": chat(), "b": chat()}, "/prefixes/compare")
        assert len(engines[0].rendered) == 3
        assert json.loads(raw)["goes_on"]
        await post(target.url, chat())
    assert explained["prompt_tokens"] == len(engines[0].received[0].prompt_ids)


async def test_engine_refuses_in_its_own_words(engines: list[EngineWorker]) -> None:
    engines[0].refuses_render = Failed("invalid_request", "not negative", retryable=False, param="temperature")
    status, _, raw = await post_once(engine_gateway(engines[0]), chat(temperature=-1))
    error = json.loads(raw)["error"]
    assert (status, error["message"], error["param"]) == (400, "not negative", "temperature")


@pytest.mark.parametrize("fields", [{"n": "many"}, {"priority": "text"}, {"cache_salt": ["x"]}, {"user": 1}])
async def test_fields_of_a_wrong_type_are_named(engines: list[EngineWorker], fields: dict[str, Any]) -> None:
    """The gateway reads these fields itself."""
    status, _, raw = await post_once(engine_gateway(engines[0]), chat(**fields))
    [name] = fields
    assert (status, json.loads(raw)["error"]["param"].partition("[")[0]) == (400, name)
    assert engines[0].rendered == []


@pytest.mark.parametrize("field", ["chat_template_kwargs", "vllm_xargs"])
async def test_bytes_that_are_no_text_are_the_clients_error(engines: list[EngineWorker], field: str) -> None:
    body = json.dumps(chat(**{field: {"a": 1}})).encode().replace(b'"a"', b'"\xff"')
    options: dict[str, Any] = {"default_chat_template_kwargs": {"": {"thinks": False}}}
    status, _, raw = await post_once(engine_gateway(engines[0], **options), body)
    assert status == 400, raw


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


@pytest.mark.parametrize(("path", "session"), [("/v1/messages", "u"), ("/v1/chat/completions", None)])
async def test_the_user_of_messages_is_a_session(engines: list[EngineWorker], path: str, session: str | None) -> None:
    async with engine_gateway(engines[0]) as target:
        assert (await post(target.url, chat(metadata={"user_id": "u"}, max_tokens=5), path))[0] == 200
        (key,) = [placement.request.affinity_key for placement in target.router.placements]
    assert key == (session and f"{engines[0].received[0].tenant}/{session}")


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
            status, _, raw = await post(target.url, chat(max_tokens=5), path)
            assert status == 200, raw
        message = [{"role": "user", "content": "hi<|im_end|>"}]
        status, _, raw = await post(target.url, chat(messages=message))
        assert (status, json.loads(raw)["error"]["code"]) == (400, "control_token")
        routes: dict[str, dict[str, Any]] = {
            "/tokenize": {"prompt": "a"},
            "/detokenize": {"tokens": [1]},
            "/v1/embeddings": {"input": "a"},
        }
        status, _, _ = await post(target.url, chat(), "/v1/messages/count_tokens")
        assert status == 200, "the engine counts"
        for path, fields in routes.items():
            status, _, raw = await post(target.url, {"model": "tiny"} | fields, path)
            assert (status, b"only its engine can read" in raw) == (400, True), (path, raw)


async def test_routes_that_an_engine_lacks_are_named(engines: list[EngineWorker]) -> None:
    """Any engine with chats has Messages and Responses."""
    engines[0].apis = ("/v1/chat/completions",)
    async with engine_gateway(engines[0]) as target:
        status, _, raw = await post(target.url, {"model": "tiny", "prompt": [1, 2]}, "/v1/completions")
        assert (status, b"not /v1/completions" in raw) == (400, True), raw
        status, _, raw = await post(target.url, {"model": "tiny", "input": "a"}, "/v1/responses")
        assert status == 200, raw
