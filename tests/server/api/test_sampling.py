"""Every sampling field of a body reaches the worker by itself and unchanged, also with the value 0."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from msgspec.structs import replace
from tokenizers import Tokenizer

from tests.server.conftest import ANSWER, bundle_of
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import chat, post, post_once
from worker.wire import End, Finished, Frame, GenerateRequest, Grammar, SamplingDefaults, SamplingParams, Started

PROMPT = "What is the capital of France?"
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": chat(max_tokens=9),
    "/v1/completions": {"model": "tiny", "prompt": PROMPT, "max_tokens": 9},
}
BODIES: dict[str, dict[str, Any]] = {
    **ROUTES,
    "/v1/messages": chat(max_tokens=9),
    "/v1/responses": {"model": "tiny", "input": PROMPT, "max_output_tokens": 9},
}
FIELDS: list[tuple[str, Any, Any]] = [
    ("max_tokens", 5, 5),
    ("temperature", 0.0, 0.0),
    ("top_p", 0.0, 0.0),
    ("top_k", -1, 0),
    ("top_k", 7, 7),
    ("min_p", 0.125, 0.125),
    ("typical_p", 0.75, 0.75),
    ("repetition_penalty", 1.5, 1.5),
    ("frequency_penalty", 0.5, 0.5),
    ("presence_penalty", -0.5, -0.5),
    ("min_tokens", 2, 2),
    ("ignore_eos", True, True),
    ("stop_token_ids", [5, 6], (5, 6)),
    ("allowed_token_ids", [7, 8], (7, 8)),
    ("logit_bias", {"3": -1.5}, ((3, -1.5),)),
    ("prompt_logprobs", 2, 2),
]
GRAMMARS = [
    ({"regex": "a+"}, Grammar("regex", "a+")),
    ({"grammar": "start: /a/"}, Grammar("grammar", "start: /a/")),
    ({"choice": ["a", "b"]}, Grammar("choice", '["a","b"]')),
    ({"json": {"type": "object"}}, Grammar("json_schema", '{"type":"object","x-guidance":{"lenient":true}}')),
    ({"json_object": True}, Grammar("json_object", "")),
]


@pytest.mark.parametrize("path", BODIES)
async def test_sampling_fields_reach_the_worker(worker: ScriptedWorker, path: str) -> None:
    async with gateway(worker) as target:

        async def sampling(**fields: Any) -> SamplingParams:
            status, _, raw = await post(target.url, BODIES[path] | fields, path)
            assert status == 200, raw
            return worker.received[-1].sampling

        plain = SamplingParams(max_tokens=9)
        assert await sampling() == plain
        for name, value, expected in FIELDS:
            if (name == "max_tokens" and path == "/v1/responses") or (name == "prompt_logprobs" and path not in ROUTES):
                continue
            assert await sampling(**{name: value}) == replace(plain, **{name: expected}), name
        for value, grammar in GRAMMARS:
            assert await sampling(structured_outputs=value) == replace(plain, grammar=grammar)
        _, _, raw = await post(target.url, BODIES[path] | {"repetition_penalty": 1e-7}, path)
        assert b'"message":"repetition_penalty: Expected `float` >= 1e-06' in raw


DEFAULTS = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, presence_penalty=1.5, max_tokens=7)


@pytest.mark.parametrize("path", ROUTES)
async def test_a_field_that_is_not_sent_has_the_models_default(raw_tokenizer: Tokenizer, path: str) -> None:
    bundle = bundle_of(raw_tokenizer, sampling_defaults=DEFAULTS)
    worker = ScriptedWorker(bundle, reply=raw_tokenizer.encode(ANSWER).ids)
    body = {name: value for name, value in ROUTES[path].items() if name != "max_tokens"}
    async with gateway(worker) as target:
        status, _, raw = await post(target.url, body | {"top_p": None}, path)
        assert status == 200, raw
        neutral = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "presence_penalty": 0.0, "max_tokens": 9}
        assert (await post(target.url, body | neutral, path))[0] == 200
        async with aiohttp.ClientSession() as session, session.get(f"{target.url}/v1/models") as listed:
            (card,) = (await listed.json())["data"]
    resolved, sent = (request.sampling for request in worker.received)
    completes = path == "/v1/completions"
    assert resolved == SamplingParams(
        max_tokens=16 if completes else 7, temperature=0.6, top_k=20, top_p=0.95, presence_penalty=1.5
    )
    assert sent == SamplingParams(max_tokens=9)
    assert card["default_sampling_params"] == DEFAULTS.shown()


@pytest.mark.parametrize("path", ROUTES)
async def test_a_bad_word_is_banned_at_the_start_and_after_a_space(
    worker: ScriptedWorker, raw_tokenizer: Tokenizer, path: str
) -> None:
    assert (await post_once(gateway(worker), ROUTES[path] | {"bad_words": ["Paris"]}, path))[0] == 200
    words = [raw_tokenizer.encode(text, add_special_tokens=False).ids for text in ("Paris", " Paris")]
    assert list(map(list, worker.received[0].sampling.bad_words)) == words


async def test_an_end_that_is_ignored_is_a_token_like_others(worker: ScriptedWorker) -> None:
    (end,) = worker.bundle.eos_token_ids
    worker.reply = [*worker.reply, end, *worker.reply]
    fields = {"ignore_eos": True, "skip_special_tokens": False, "max_tokens": len(worker.reply)}
    _, _, raw = await post_once(gateway(worker), chat(**fields))
    assert json.loads(raw)["choices"][0]["message"]["content"] == f"{ANSWER}<|im_end|>{ANSWER}"


@pytest.mark.parametrize("path", ROUTES)
async def test_prompts_are_cut_on_the_side_that_is_named(worker: ScriptedWorker, path: str) -> None:
    async with gateway(worker) as target:
        for fields in ({}, {"truncation_side": "left"}, {"truncation_side": "right"}):
            body = ROUTES[path] | fields | ({"truncate_prompt_tokens": 3} if fields else {})
            assert (await post(target.url, body, path))[0] == 200
        assert (await post(target.url, ROUTES[path] | {"truncate_prompt_tokens": 3}, path))[0] == 200
    whole, left, right, default = (list(request.prompt_ids) for request in worker.received)
    assert left == default == whole[-3:]
    assert right == whole[:3]


@pytest.mark.parametrize("path", ROUTES)
async def test_a_cache_key_reaches_the_router_and_a_tier_is_answered(worker: ScriptedWorker, path: str) -> None:
    async with gateway(worker) as target:
        status, _, raw = await post(target.url, ROUTES[path] | {"prompt_cache_key": "k", "service_tier": "auto"}, path)
        assert status == 200
        assert target.router.placements[0].request.affinity_key == f"{worker.received[0].tenant}/k"
    if "chat" in path:
        assert json.loads(raw)["service_tier"] == "default"


async def test_the_context_holds_the_prompt_and_one_token_at_least(worker: ScriptedWorker) -> None:
    limit = worker.bundle.max_model_len
    async with gateway(worker) as target:
        for num_prompt, max_tokens, expected in (
            (limit - 1, 1, 200),
            (limit - 1, 2, 400),
            (limit, None, 400),
            (limit - 5, 5, 200),
        ):
            body = {"model": "tiny", "prompt": [5] * num_prompt, "max_tokens": max_tokens}
            status, _, raw = await post(target.url, body, "/v1/completions")
            assert status == expected, (num_prompt, max_tokens)
            if status == 400:
                assert json.loads(raw)["error"]["code"] == "context_length_exceeded"


async def test_the_choices_of_all_prompts_together_are_limited(worker: ScriptedWorker) -> None:
    body = {"model": "tiny", "prompt": ["x"] * 9, "n": 128, "max_tokens": 1}
    status, _, raw = await post_once(gateway(worker), body, "/v1/completions")
    assert (status, json.loads(raw)["error"]["param"]) == (400, "prompt")
    assert worker.received == []


async def test_best_of_shows_the_best_of_more_choices(worker: ScriptedWorker) -> None:
    body = {"model": "tiny", "prompt": ["one", "two"], "n": 1, "best_of": 3, "max_tokens": 2}
    status, _, raw = await post_once(gateway(worker), body, "/v1/completions")
    assert status == 200
    assert [choice["index"] for choice in json.loads(raw)["choices"]] == [0, 1]
    assert [len(request.choices) for request in worker.received] == [3, 3]


async def test_the_best_choice_is_one_with_text(worker: ScriptedWorker, raw_tokenizer: Tokenizer) -> None:
    """A choice that a stop string ends at its first token has no log probabilities to rank it by."""

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        first, second = worker.reply[:2]
        for choice, token_ids in enumerate([[first], [second, second]]):
            for token_id in token_ids:
                yield worker.token(request, choice, token_id)
            yield Finished(choice, "length")
        yield End(0.0, 0.0, 0.0)

    worker.behave = behave
    body = {
        "model": "tiny",
        "prompt": "one",
        "best_of": 2,
        "max_tokens": 2,
        "stop": raw_tokenizer.decode(worker.reply[:1]),
    }
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, body, "/v1/completions")
    assert json.loads(raw)["choices"][0]["text"] != ""


async def test_ids_that_are_repeated_travel_once(worker: ScriptedWorker) -> None:
    assert (await post_once(gateway(worker), chat(allowed_token_ids=[8, 7] * 50_000)))[0] == 200
    assert worker.received[-1].sampling.allowed_token_ids == (8, 7)


async def test_lists_of_ids_are_bounded_times_the_choices(
    worker: ScriptedWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.wire.MAX_LISTED_IDS", 100)
    async with gateway(worker) as target:
        fields: dict[str, Any] = {"allowed_token_ids": list(range(20)), "logit_bias": {"1": 1.0}}
        assert (await post(target.url, chat(n=4, **fields)))[0] == 200
        status, _, raw = await post(target.url, chat(n=5, **fields))
    error = json.loads(raw)["error"]
    assert (status, error["param"]) == (400, "allowed_token_ids")
    assert "allowed_token_ids, logit_bias: 21 ids times n = 5 choices exceed 100" in error["message"]
