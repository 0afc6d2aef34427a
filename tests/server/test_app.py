"""The public port on a real socket, with the openai client, over scripted workers."""

from __future__ import annotations

import io
import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import aiohttp
import openai
import pytest
from tokenizers import Tokenizer

from tests.server.conftest import ANSWER, bundle_of
from tests.server.gateway_app import RunningGateway, gateway
from tests.server.scripted_worker import Refuse, ScriptedWorker, script_of
from tests.server.sse_grammar import check_chat, check_completion, events
from worker.wire import BlockSource, Frame, GenerateRequest, Started, TokenizerBundle

CHATS = "/v1/chat/completions"
MESSAGES: Any = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture
def worker(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> ScriptedWorker:
    return ScriptedWorker(bundle, reply=raw_tokenizer.encode(ANSWER).ids, num_cached_tokens=16)


async def post(url: str, body: Any, path: str = CHATS, **headers: str) -> tuple[int, Any, bytes]:
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())  # also a large one
    async with (
        aiohttp.ClientSession() as session,
        session.post(url + path, data=data, headers={"content-type": "application/json", **headers}) as response,
    ):
        return response.status, response.headers, await response.read()


async def post_once(
    serving: AbstractAsyncContextManager[RunningGateway], body: Any, path: str = CHATS, **headers: str
) -> tuple[int, Any, bytes]:
    """Post one body to a gateway that serves nothing else."""
    async with serving as target:
        return await post(target.url, body, path, **headers)


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "messages": MESSAGES, **fields}


def client(target: RunningGateway) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{target.url}/v1", api_key="none", max_retries=0)


async def test_chat_with_the_openai_client(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.chat.completions.create(model="tiny", messages=MESSAGES, temperature=0)
        assert answer.choices[0].message.content == ANSWER
        assert answer.choices[0].finish_reason == "stop"
        assert answer.usage is not None
        assert answer.usage.prompt_tokens == len(worker.received[0].prompt_ids)
        assert answer.usage.completion_tokens == len(worker.reply) + 1
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 16
        worker.pace_s = 0.005
        parts = [
            chunk.choices[0].delta.content or ""
            async for chunk in await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True)
        ]
        assert "".join(parts) == ANSWER
        assert len(parts) > 3
        names = [model.id async for model in sdk.models.list()]
        assert names == ["tiny"]
        assert (await sdk.models.retrieve("tiny")).id == "tiny"


async def test_line_ends_of_other_programs_are_escaped(worker: ScriptedWorker, raw_tokenizer: Tokenizer) -> None:
    """Clients that split at each of Python's line ends read whole events."""
    text = "one\u2028two\u2029three\x85four"
    worker.reply = raw_tokenizer.encode(text).ids
    paths = {"/v1/chat/completions": {}, "/v1/messages": {"max_tokens": 90}, "/v1/responses": {"input": "x"}}
    async with gateway(worker) as target:
        for path, fields in paths.items():
            body = {
                name: value
                for name, value in chat(stream=True, **fields).items()
                if "input" not in fields or name != "messages"
            }
            status, _, raw = await post(target.url, body, path)
            assert status == 200, raw
            lines = raw.decode().splitlines()
            assert all(line.startswith(("data: ", "event: ", ": ")) for line in lines if line), path
            assert all(escape in raw for escape in (rb"\u2028", rb"\u2029", rb"\u0085")), path


async def test_headers_of_every_answer(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        target.router.promised_tokens, worker.num_cached_tokens = 351, 336
        for stream in (False, True):
            status, headers, _ = await post(target.url, chat(stream=stream), **{"x-request-id": "abc-1"})
            assert status == 200
            assert headers["x-request-id"] == "abc-1"
            assert headers["x-headstart-worker"] == "w0"
            assert headers["x-headstart-cached-tokens"] == "336", "what usage says, not what was promised"
            assert int(headers["openai-processing-ms"]) >= 0
        status, headers, _ = await post(target.url, chat(model="other"), **{"x-request-id": "no good!"})
        assert status == 404
        assert headers["x-request-id"].startswith("req_")


async def test_usage_splits_cached_tokens_by_place(worker: ScriptedWorker) -> None:
    async def moved(request: GenerateRequest) -> AsyncIterator[Frame]:
        async for frame in worker.answer(request):
            yield Started(16, {"disk": 4, "peer": 8, "moon": 1}) if isinstance(frame, Started) else frame

    async with gateway(worker) as target, client(target) as sdk:
        plain = await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
        assert plain.usage is not None
        assert "headstart" not in plain.usage.to_dict()["prompt_tokens_details"], "all came from the pool"  # type: ignore[operator]
        worker.behave = moved
        answer = await sdk.chat.completions.create(model="tiny", messages=MESSAGES)
        assert answer.usage is not None
        assert answer.usage.prompt_tokens_details is not None
        assert answer.usage.prompt_tokens_details.cached_tokens == 16
        assert answer.usage.completion_tokens_details is not None
        assert answer.usage.completion_tokens_details.reasoning_tokens == 0
        details = answer.usage.to_dict()["prompt_tokens_details"]
        assert details["headstart"] == {"pool": 4, "disk": 4, "peer": 8}  # type: ignore[index]
        response = await sdk.responses.create(model="tiny", input="What is the capital of France?")
        assert response.usage is not None
        assert response.usage.input_tokens_details.to_dict()["headstart"] == {"pool": 4, "disk": 4, "peer": 8}
        places = {"pool": 16 + 4 + 4, "disk": 8, "peer": 16, "host": 0}
        registry = target.metrics.registry
        for place, num_tokens in places.items():
            assert registry.get_sample_value("headstart_cached_tokens_by_place_total", {"place": place}) == num_tokens


async def test_the_worker_gets_the_name_of_a_peer(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        await post(target.url, chat())
        target.router.source = BlockSource("http://peer:8000", "epoch-1", 7)
        await post(target.url, chat())
        assert [request.source for request in worker.received] == [None, target.router.source]
        worker.behave = script_of(then=Refuse(400, "invalid_request", retryable=False))
        assert (await post(target.url, chat()))[0] == 400
        assert target.metrics.planned_fetches.sum() == 1, "a worker that refuses fetches nothing"


@pytest.mark.parametrize("include_usage", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_raw_chat_stream(worker: ScriptedWorker, n: int, include_usage: bool) -> None:
    async with gateway(worker) as target:
        options = {"stream_options": {"include_usage": True}} if include_usage else {}
        status, headers, raw = await post(target.url, chat(stream=True, n=n, **options))
    assert status == 200
    assert headers["content-type"] == "text/event-stream; charset=utf-8"
    assert headers["cache-control"] == "no-cache"
    assert check_chat(raw, num_choices=n, include_usage=include_usage) == [ANSWER] * n


async def test_raw_completion_stream_of_a_batch(worker: ScriptedWorker) -> None:
    body = {"model": "tiny", "prompt": ["one", "two"], "n": 2, "max_tokens": 100, "stream": True}
    _, _, raw = await post_once(gateway(worker), body, "/v1/completions")
    assert check_completion(raw, num_choices=4) == [ANSWER] * 4


async def test_completion_of_text_and_of_token_ids(worker: ScriptedWorker, raw_tokenizer: Tokenizer) -> None:
    ids = raw_tokenizer.encode("What is the capital").ids
    async with gateway(worker) as target, client(target) as sdk:
        for prompt in ("What is the capital", ids, [ids]):
            answer = await sdk.completions.create(model="tiny", prompt=prompt, max_tokens=3)
            assert answer.choices[0].finish_reason == "length"
            assert answer.usage is not None
            assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(ids), 3)
    assert [list(request.prompt_ids) for request in worker.received] == [ids] * 3


async def test_a_batch_is_charged_each_prompt_once_and_every_choice(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.completions.create(model="tiny", prompt=["What is the capital", "Then"], n=2, max_tokens=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    usage = answer.usage
    assert usage is not None
    assert usage.prompt_tokens == sum(len(request.prompt_ids) for request in worker.received)
    assert usage.completion_tokens == 4 * 3
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 2 * worker.num_cached_tokens


async def test_echo_and_scoring(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.completions.create(model="tiny", prompt="seats are", echo=True, max_tokens=0, logprobs=1)
    choice = answer.choices[0]
    assert choice.text == "seats are"
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    assert choice.logprobs.token_logprobs[0] is None
    assert len(choice.logprobs.token_logprobs) == len(worker.received[0].prompt_ids)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 0


async def test_lists_count_for_each_choice_of_best_of(worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.wire.MAX_LISTED_IDS", 50)
    fields = {"model": "tiny", "prompt": "seats", "best_of": 6, "allowed_token_ids": list(range(10))}
    async with gateway(worker) as target:
        status, _, raw = await post(target.url, fields, "/v1/completions")
    assert (status, json.loads(raw)["error"]["param"]) == (400, "allowed_token_ids")


@pytest.mark.parametrize("is_stream", [False, True])
async def test_an_echo_alone_ends_by_its_length(worker: ScriptedWorker, is_stream: bool) -> None:
    fields = {"model": "tiny", "prompt": "seats", "echo": True, "max_tokens": 0, "return_token_ids": True, "stop": "T"}
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, fields | {"stream": is_stream}, "/v1/completions")
    *before, choice = [each["choices"][0] for each in (events(raw)[:-1] if is_stream else [json.loads(raw)])]
    assert "".join(each["text"] for each in (*before, choice)) == "seats"
    assert (choice["token_ids"], choice["finish_reason"], "stop_reason" in choice) == ([], "length", False)


async def test_an_echo_leaves_as_many_prompt_logprobs_as_asked(worker: ScriptedWorker) -> None:
    fields = {"model": "tiny", "prompt": "seats", "echo": True, "max_tokens": 1}
    async with gateway(worker) as target:
        for logprobs, prompt_logprobs in ((1, 5), (5, 1), (2, None)):
            asked = {"logprobs": logprobs, "prompt_logprobs": prompt_logprobs}
            await post(target.url, fields | asked, "/v1/completions")
    assert [request.sampling.prompt_logprobs for request in worker.received] == [5, 5, 2]


async def test_offsets_of_characters_of_several_tokens(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.completions.create(model="tiny", prompt="é中🎉x", echo=True, max_tokens=2, logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.text_offset is not None
    num_prompt_tokens = len(worker.received[0].prompt_ids)
    assert num_prompt_tokens > 4
    assert logprobs.text_offset[num_prompt_tokens - 1 :][:2] == [3, 4]
    assert logprobs.text_offset == sorted(logprobs.text_offset)


async def test_offsets_with_a_bos_are_those_of_the_text(raw_tokenizer: Tokenizer) -> None:
    worker = ScriptedWorker(bundle_of(raw_tokenizer, add_bos=True))
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.completions.create(model="tiny", prompt="seats are", echo=True, max_tokens=0, logprobs=1)
    choice = answer.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert choice.logprobs.text_offset is not None
    tokens = [*zip(choice.logprobs.tokens, choice.logprobs.text_offset, strict=True)]
    assert tokens[0][1] == 0
    assert [choice.text[start:].startswith(token) for token, start in tokens[1:]] == [True] * (len(tokens) - 1)


async def test_an_echo_has_as_many_prompt_logprobs_as_asked(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        for logprobs, asked, most in ((1, 3, 3), (3, 1, 3), (None, 2, 2), (0, None, 0)):
            body = {"model": "tiny", "prompt": "a b", "echo": True, "logprobs": logprobs, "prompt_logprobs": asked}
            assert (await post(target.url, body, "/v1/completions"))[0] == 200
            assert worker.received[-1].sampling.prompt_logprobs == most


async def test_stop_strings_in_stream_and_unstreamed(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        _, _, body = await post(target.url, chat(stop=["France", "Paris"]))
        assert json.loads(body)["choices"][0]["message"]["content"] == "The capital of "
        _, _, raw = await post(target.url, chat(stop="ce is", stream=True))
        assert check_chat(raw) == ["The capital of Fran"]


async def test_logprobs_of_chat(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.chat.completions.create(
            model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=4
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.content is not None
        assert "".join(entry.token for entry in logprobs.content) == answer.choices[0].message.content
        assert all(len(entry.top_logprobs) == 2 for entry in logprobs.content)
        streamed = [
            entry
            async for chunk in await sdk.chat.completions.create(
                model="tiny", messages=MESSAGES, logprobs=True, top_logprobs=2, max_tokens=4, stream=True
            )
            for entry in (chunk.choices[0].logprobs.content or [] if chunk.choices[0].logprobs else [])
        ]
        assert streamed == logprobs.content


async def test_the_token_itself_is_always_among_the_best(worker: ScriptedWorker, raw_tokenizer: Tokenizer) -> None:
    async with gateway(worker) as target, client(target) as sdk:
        answer = await sdk.completions.create(model="tiny", prompt="x", max_tokens=3, logprobs=0)
        _, _, raw = await post(target.url, chat(prompt_logprobs=2, max_tokens=1))
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert logprobs.top_logprobs == [{token: -0.5} for token in logprobs.tokens]
    first, second, *_ = json.loads(raw)["prompt_logprobs"]
    token_id = worker.received[1].prompt_ids[1]
    assert first is None
    assert second[str(token_id)] == {
        "logprob": -0.5,
        "rank": 1,
        "decoded_token": raw_tokenizer.decode([token_id], skip_special_tokens=False),
    }


async def test_seeds_of_choices_differ_and_repeat(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        for _ in range(2):
            await post(target.url, chat(seed=7, n=3))
        await post(target.url, chat())
    first, second, random = ([choice.seed for choice in request.choices] for request in worker.received)
    assert first == second
    assert first[0] == 7
    assert len(set(first)) == 3
    assert random[0] not in first


async def test_tenants_roots_and_cache_salt(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        for fields in ({}, {}, {"cache_salt": "a"}, {"cache_salt": "b"}):
            await post(target.url, chat(**fields))
    roots = [request.root for request in worker.received]
    assert roots[0] == roots[1]
    assert len(set(roots)) == 3


async def test_null_equals_absent(worker: ScriptedWorker) -> None:
    optional = [name for name in chat_fields() if name not in ("model", "messages")]
    status, _, raw = await post_once(gateway(worker), chat(**dict.fromkeys(optional)))
    assert status == 200, raw


def chat_fields() -> list[str]:
    from server.schema.requests import CHAT, ChatRequest

    return [*ChatRequest.__struct_fields__, *CHAT.refused]


async def test_unknown_routes_and_methods(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target, aiohttp.ClientSession() as session:
        for method, path, status in (
            ("GET", "/v1/chat/completions", 405),
            ("POST", "/v1/models", 405),
            ("DELETE", "/v1/models/tiny", 405),
            ("GET", "/v1/embeddings", 405),
            ("POST", "/v1/images/generations", 404),
            ("GET", "/metrics", 404),
            ("GET", "/v1/models/none/at/all", 404),
            ("GET", "/v1/responses/resp_1", 404),  # nothing is stored
            ("DELETE", "/v1/responses/resp_1", 404),
            ("POST", "/v1/responses/resp_1/cancel", 404),
            ("GET", "/v1/responses/resp_1/input_items", 404),
            ("GET", "/v1/chat/completions/chatcmpl-1", 404),
            ("DELETE", "/v1/chat/completions/chatcmpl-1", 404),
        ):
            async with session.request(method, target.url + path) as response:
                error = (await response.json())["error"]
                assert (response.status, set(error)) == (status, {"message", "type", "param", "code"}), path
                assert status == 405 or path.startswith("/v1/models/") or "/v1/chat/completions" in error["message"]
                assert "x-request-id" in response.headers


async def test_body_limit(worker: ScriptedWorker) -> None:
    async with gateway(worker, max_body_bytes=20_000) as target:
        status, _, raw = await post(target.url, b" " * 20_001)
        assert (status, json.loads(raw)["error"]["code"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    ("media_type", "status"),
    [
        ("application/json; charset=utf-8", 200),
        ("Application/JSON", 200),
        ("application/vnd.api+json", 200),
        ("", 415),
        ("text/plain", 415),
        ("application/x-www-form-urlencoded", 415),
        ("multipart/form-data; boundary=x", 415),
        ("text/plain; application/json", 415),
    ],
)
async def test_only_json_media_types_are_accepted(worker: ScriptedWorker, media_type: str, status: int) -> None:
    async with gateway(worker) as target:
        got, _, raw = await post(target.url, chat(), **{"content-type": media_type})
        assert got == status
        if status == 415:
            assert json.loads(raw)["error"]["code"] == "unsupported_media_type"


async def test_a_body_that_ends_after_the_shutdown_begins_nothing(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target, aiohttp.ClientSession() as session:

        async def body() -> AsyncIterator[bytes]:
            yield b"{"
            target.endpoint.shutdown()
            yield json.dumps(chat()).encode()[1:]

        headers = {"content-type": "application/json"}
        async with session.post(target.url + CHATS, data=body(), headers=headers) as response:
            error = (await response.json())["error"]
    assert (response.status, error["code"]) == (503, "shutting_down")
    assert not worker.received


async def test_no_worker_is_503(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        target.router.members.clear()
        for stream in (False, True):
            status, headers, raw = await post(target.url, chat(stream=stream))
            assert (status, json.loads(raw)["error"]["code"]) == (503, "service_unavailable")
            assert headers["retry-after"] == "2"


async def test_aliases(worker: ScriptedWorker) -> None:
    async with gateway(worker, aliases={"gpt-4o": "tiny"}) as target, client(target) as sdk:
        answer = await sdk.chat.completions.create(model="gpt-4o", messages=MESSAGES)
        assert answer.model == "gpt-4o"
        assert [model.id async for model in sdk.models.list()] == ["tiny", "gpt-4o"]


async def test_return_token_ids(worker: ScriptedWorker) -> None:
    async with gateway(worker) as target:
        _, _, body = await post(target.url, chat(return_token_ids=True))
        _, _, raw = await post(target.url, chat(return_token_ids=True, stream=True))
    answer = json.loads(body)
    assert answer["prompt_token_ids"] == list(worker.received[0].prompt_ids)
    assert answer["choices"][0]["token_ids"] == [*worker.reply, 2]
    chunks = [event for event in events(raw) if event != "[DONE]"]
    assert [id_ for chunk in chunks for id_ in chunk["choices"][0]["token_ids"] or []] == [*worker.reply, 2]
