"""A worker of role "prefill" computes the prompt and one token, and the answer goes on at another worker."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest

from tests.server.gateway_app import RunningGateway, gateway
from tests.server.request.failing_workers import MakeWorker, dies_after
from tests.server.scripted_worker import Die, Refuse
from tests.server.sse_grammar import events
from tests.server.test_app import chat, post
from tests.waiting import until
from worker.wire import End, Finished, Frame, GenerateRequest, Started, Tokens

LONG = {"role": "user", "content": "A long question. " * 20}


def split(target: RunningGateway) -> None:
    target.router.prefill = target.workers[0].member().worker_id


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_split_changes_nothing_but_the_way(make: MakeWorker, stream: bool, n: int) -> None:
    prefill, mixed = make(num_cached_tokens=3), make(num_cached_tokens=5)
    async with gateway(prefill, mixed) as target:
        body = chat(stream=stream, n=n, seed=5, max_tokens=9, min_tokens=4, logprobs=True)
        _, _, whole = await post(target.url, body)
        split(target)
        status, _, raw = await post(target.url, body)
        assert status == 200
        assert answer_of(raw, stream) == answer_of(whole, stream)
        _, first = prefill.received
        (rest,) = mixed.received
        assert (first.sampling.max_tokens, first.sampling.min_tokens) == (1, 1)
        assert (rest.sampling.max_tokens, rest.sampling.min_tokens) == (9, 4)
        assert [choice.output_ids for choice in rest.choices] == [(prefill.reply[0],)] * n
        assert [choice.seed for choice in rest.choices] == [choice.seed for choice in first.choices]
        metrics = target.metrics
        assert (metrics.splits.sum(), metrics.resumed.sum(), metrics.lost.sum()) == (1, 0, 0)
        assert [placement.calls[-1] for placement in target.router.placements] == ["close"] * 3


async def test_the_worker_that_ends_the_answer_keeps_its_chain(make: MakeWorker) -> None:
    prefill, mixed = make(keeps_chains=True), make(keeps_chains=True)
    async with gateway(prefill, mixed) as target:
        split(target)
        status, _, _ = await post(target.url, chat(messages=[LONG], prompt_cache_retention="24h", stream=True))
        assert status == 200
        await until(lambda: mixed.kept)
    assert not prefill.kept


async def test_the_first_token_goes_to_the_client_at_once(make: MakeWorker) -> None:
    """All that the first worker sends may come in one read."""
    prefill, mixed = make(), make()

    async def refuses(request: GenerateRequest) -> AsyncIterator[Frame]:
        raise Refuse(400, "invalid_request", retryable=False)
        yield End(0.0, 0.0, 0.0)

    mixed.behave = refuses
    async with gateway(prefill, mixed) as target:
        split(target)
        _, _, raw = await post(target.url, chat(stream=True, n=1))
    *before, last = events(raw)
    assert last["error"]["message"]
    assert any(event["choices"][0]["delta"].get("content") for event in before)


@pytest.mark.parametrize("changes", [{"max_tokens": 1}, {"stop": ["The"]}])
async def test_an_answer_that_ends_with_its_first_token(make: MakeWorker, changes: dict[str, object]) -> None:
    prefill, mixed = make(), make()
    async with gateway(prefill, mixed) as target:
        split(target)
        status, _, _ = await post(target.url, chat(**changes))
        assert status == 200
        assert mixed.received == []


async def test_an_end_of_sequence_as_the_first_token(make: MakeWorker) -> None:
    prefill, mixed = make(), make()

    async def ends(request: GenerateRequest) -> AsyncIterator[Frame]:
        eos = prefill.bundle.eos_token_ids[0]
        for frame in (Started(0), Tokens(0, (eos,)), Finished(0, "stop", eos), End(0.0, 0.0, 0.0)):
            yield frame

    prefill.behave = ends
    async with gateway(prefill, mixed) as target:
        split(target)
        status, _, raw = await post(target.url, chat(n=1))
        assert (status, mixed.received) == (200, [])
        assert json.loads(raw)["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("num_tokens", [0, 1])
async def test_a_prefill_worker_that_dies_is_replaced(make: MakeWorker, num_tokens: int) -> None:
    prefill, mixed = make(), make()

    async def dies(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        for _ in range(num_tokens):
            yield Tokens(0, (prefill.reply[0],))
        raise Die

    prefill.behave = dies
    async with gateway(prefill, mixed) as target:
        split(target)
        status, _, raw = await post(target.url, chat(n=1, seed=5))
        assert status == 200
        (rest,) = mixed.received
        assert len(rest.choices[0].output_ids) == num_tokens
        assert target.metrics.resumed.sum() == num_tokens
        assert target.metrics.lost.sum() == 1
    assert json.loads(raw)["choices"][0]["finish_reason"] == "stop"


async def test_an_end_before_every_choice_has_a_token_is_a_loss(make: MakeWorker) -> None:
    prefill, mixed = make(), make()

    async def ends_early(request: GenerateRequest) -> AsyncIterator[Frame]:
        for frame in (Started(0), Tokens(0, (prefill.reply[0],)), Finished(0, "length"), End(0.0, 0.0, 0.0)):
            yield frame

    prefill.behave = ends_early
    async with gateway(prefill, mixed) as target:
        split(target)
        status, _, _ = await post(target.url, chat(n=3))
        assert status == 200
        assert target.metrics.lost.sum() == 1
        assert [len(choice.output_ids) for choice in mixed.received[0].choices] == [1, 0, 0]


async def test_a_death_after_a_split_is_resumed(make: MakeWorker) -> None:
    """At whoever is left, the prefill worker too."""
    prefill, mixed = make(), make()
    mixed.behave = dies_after(mixed, 2)
    async with gateway(prefill, mixed) as target:
        split(target)
        status, _, raw = await post(target.url, chat(n=1, seed=5))
        assert status == 200
        _, last = prefill.received
        assert len(last.choices[0].output_ids) >= 2
        assert target.metrics.resumed.sum() == 1
    assert json.loads(raw)["choices"][0]["finish_reason"] == "stop"


def answer_of(raw: bytes, stream: bool) -> object:
    if not stream:
        return [choice | {"index": 0} for choice in json.loads(raw)["choices"]]
    texts: dict[int, str] = {}
    for event in events(raw)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + (choice["delta"].get("content") or "")
    return texts
