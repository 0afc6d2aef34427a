"""Workers die, break connections, stop or send invalid frames, and streams are resumed elsewhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from itertools import chain, count, repeat

import openai
import pytest
from tokenizers import Tokenizer

from cache.types import Epoch
from server.request.retry import MAX_LOSSES
from server.router import queue
from server.workers.connection import WorkerRefused
from tests.server.conftest import ANSWER
from tests.server.gateway_app import gateway
from tests.server.request.failing_workers import MakeWorker, dies_after
from tests.server.scripted_worker import Die, Refuse, Script, ScriptedWorker, script_of
from tests.server.sse_grammar import GrammarError, check_chat, events
from tests.server.test_app import MESSAGES, chat, client, post
from tests.waiting import until
from worker.wire import End, Failed, Finished, Frame, GenerateRequest, Started, TokenizerBundle, Tokens


def gone_after(worker: ScriptedWorker, num_tokens: int) -> Script:
    """Like `dies_after`, and then die again before each token."""
    dies, lives = dies_after(worker, num_tokens), iter([True])

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        if not next(lives, False):
            yield Started(0)
            raise Die
        async for frame in dies(request):
            yield frame

    return behave


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_death_is_resumed_with_the_tokens_received(make: MakeWorker, stream: bool, num_tokens: int) -> None:
    dying, healthy = make(num_cached_tokens=3), make(num_cached_tokens=5)
    dying.behave = dies_after(dying, num_tokens)
    async with gateway(dying, healthy) as target:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        status, _, raw = await post(target.url, chat(stream=stream, n=1, seed=5, **options))
        assert status == 200
        if stream:
            text, usage = check_chat(raw, include_usage=True)[0], events(raw)[-2]["usage"]
        else:
            body = json.loads(raw)
            text, usage = body["choices"][0]["message"]["content"], body["usage"]
        assert text == ANSWER
        assert usage["prompt_tokens_details"]["cached_tokens"] == (3 if num_tokens else 5), (
            "from the worker of the first token"
        )
        assert target.metrics.registry.get_sample_value("headstart_resumed_total") == (num_tokens > 0)
        (resumed,) = healthy.received
        assert list(resumed.choices[0].output_ids) == healthy.reply[:num_tokens]
        assert resumed.choices[0].seed == dying.received[0].choices[0].seed == 5
        first, second = target.router.placements
        assert first.calls[-1] == "close"
        assert second.calls == ["started 5", "first token", "close"]
        assert second.request.excluded == {(dying.worker_id, dying.member().epoch)}
        assert second.request.numerics == (dying.numerics if num_tokens else None)
        num_needed = len(resumed.prompt_ids) + num_tokens + 1 if num_tokens else 0
        assert second.request.num_context_tokens == max(first.request.num_context_tokens, num_needed)


@pytest.mark.parametrize(("num_tokens", "num_each"), [(4, [2, 1, 1]), (2, [1, 1, 0])])
async def test_n_choices_are_resumed_each_where_it_was(make: MakeWorker, num_tokens: int, num_each: list[int]) -> None:
    dying, healthy = make(), make()
    dying.behave = dies_after(dying, num_tokens)
    async with gateway(dying, healthy) as target:
        _, _, raw = await post(target.url, chat(stream=True, n=3))
        assert check_chat(raw, num_choices=3) == [ANSWER] * 3
        assert [len(choice.output_ids) for choice in healthy.received[0].choices] == num_each
        assert target.router.placements[1].request.numerics == dying.numerics


async def test_no_worker_of_the_numerics_class_means_an_error_event(make: MakeWorker) -> None:
    dying, other = make(), make(numerics="cuda-bfloat16")
    dying.behave = gone_after(dying, 5)
    async with gateway(dying, other) as target:
        status, _, raw = await post(target.url, chat(stream=True))
        assert status == 200
        with pytest.raises(GrammarError):
            check_chat(raw)
        *_, last = events(raw)
        assert last["error"]["code"] == "worker_lost"
        assert set(last["error"]) == {"message", "type", "param", "code"}
        assert b"[DONE]" not in raw
        assert other.received == []
        dying.behave = gone_after(dying, 5)
        async with client(target) as sdk:
            with pytest.raises(openai.APIError) as raised:
                async for _ in await sdk.chat.completions.create(model="tiny", messages=MESSAGES, stream=True):
                    pass
            assert raised.value.code == "worker_lost"


async def test_unstreamed_answers_restart_on_other_numerics(make: MakeWorker) -> None:
    dying, other = make(), make(numerics="cuda-bfloat16")
    dying.behave = dies_after(dying, 5)
    async with gateway(dying, other) as target:
        status, headers, raw = await post(target.url, chat())
        assert status == 200
        assert json.loads(raw)["choices"][0]["message"]["content"] == ANSWER
        assert json.loads(raw)["usage"]["completion_tokens"] == len(other.reply) + 1
        assert target.metrics.registry.get_sample_value("headstart_restarted_total") == 1
        assert other.received[0].choices[0].output_ids == ()
        assert headers["x-headstart-worker"] == other.worker_id


@pytest.mark.parametrize("has_other", [False, True])
async def test_only_answers_that_go_on_count_as_moved(make: MakeWorker, *, has_other: bool) -> None:
    """A worker that refuses the rest of an answer has not continued it."""
    dying, full, other = make(), make(), make()
    dies, full.behave = dies_after(dying, 5), script_of(then=Refuse(429, "queue_full"))
    scripts = chain([dies], repeat(full.behave))
    dying.behave = lambda request: next(scripts)(request)
    async with gateway(dying, full, *([other] if has_other else [])) as target:
        status, _, _ = await post(target.url, chat())
        counted = target.metrics.registry.get_sample_value
        moved = counted("headstart_resumed_total"), counted("headstart_restarted_total")
        assert (status, moved) == ((200, (1, 0)) if has_other else (503, (0, 0)))


async def test_a_dead_address_is_passed_over(make: MakeWorker) -> None:
    gone, healthy = make(), make()
    async with gateway(gone, healthy) as target:
        dead = target.router.members[0]
        target.router.members[0] = replace(dead, url="http://127.0.0.1:1")
        status, headers, _ = await post(target.url, chat(stream=True))
        assert (status, headers["x-headstart-worker"]) == (200, healthy.worker_id)
        assert target.router.failed == [gone.worker_id]


async def test_a_stream_outlives_many_handovers(make: MakeWorker) -> None:
    """A worker that stops hands over, which is no loss; a lost worker is asked again when there is no other."""
    worker = make()
    tries = count()

    async def flaky(request: GenerateRequest) -> AsyncIterator[Frame]:
        done = len(request.choices[0].output_ids)
        number = next(tries)
        if number == 4:
            async for frame in worker.answer(request):
                yield frame
            return
        yield Started(0)
        yield Tokens(0, tuple(worker.reply[done : done + 1]))
        if number < 3:
            target.router.members[0] = replace(worker.member(), epoch=Epoch(f"epoch {number}"))
            yield Failed("draining", "the worker stops", retryable=True)
            return
        await asyncio.sleep(0.02)  # let what was sent be read
        raise Die

    worker.behave = flaky
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER]
        assert next(tries) == 5
        assert len(target.router.placements) == 5


async def test_failed_frames(make: MakeWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue, "FULL_S", 60.0)
    failing, healthy = make(), make()
    stops = Failed("draining", "the worker stops", retryable=True)
    failing.behave = script_of(Started(0), Tokens(0, tuple(failing.reply[:3])), stops)
    async with gateway(failing, healthy) as target:
        _, _, raw = await post(target.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER]
        full = WorkerRefused(429, Failed("queue_full", "full", retryable=True, retry_after_s=60.0))
        target.queue.refused((healthy.worker_id, healthy.member().epoch), failing.received[0].tenant, full)
        _, _, raw = await post(target.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER], "a full worker takes the rest of an answer"
        failing.behave = script_of(Started(0), Failed("internal_error", "secret details", retryable=False))
        status, _, raw = await post(target.url, chat(stream=True))
        assert status == 500
        assert b"secret" not in raw


@pytest.mark.parametrize("frames", [[End(0, 0, 0)], [Started(0), Tokens(7, (1,))], [Started(0), Finished(0, "abort")]])
async def test_invalid_frames_are_a_loss(make: MakeWorker, frames: list[Frame]) -> None:
    odd, healthy = make(), make()
    odd.behave = script_of(*frames)
    async with gateway(odd, healthy) as target:
        status, _, raw = await post(target.url, chat())
        assert status == 200
        assert json.loads(raw)["choices"][0]["message"]["content"] == ANSWER
        assert (len(odd.received), len(healthy.received)) == (1, 1)


@pytest.mark.parametrize("has_finished", [False, True])
async def test_the_end_lost_with_its_worker(make: MakeWorker, has_finished: bool) -> None:
    """All tokens came, so no worker is asked again; where Finished came too, no worker counts as lost."""
    dying = make()
    finished = [Finished(0, "stop", 2)] if has_finished else []
    dying.behave = script_of(Started(0), Tokens(0, (*dying.reply, 2)), *finished, then=Die())
    async with gateway(dying) as target:
        _, _, raw = await post(target.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER]
        assert len(target.router.placements) == 1
        assert target.metrics.registry.get_sample_value("headstart_workers_lost_total") == (not has_finished)


async def test_the_last_loss_is_no_error_when_all_tokens_came(make: MakeWorker) -> None:
    workers = [make() for _ in range(MAX_LOSSES)]

    def dies_later(worker: ScriptedWorker) -> Script:
        async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
            done = len(request.choices[0].output_ids)
            is_last = sum(len(each.received) for each in workers) == MAX_LOSSES
            yield Started(0)
            yield Tokens(0, (*worker.reply[done:], 2) if is_last else tuple(worker.reply[done : done + 1]))
            await asyncio.sleep(0.02)  # let what was sent be read
            raise Die

        return behave

    for worker in workers:
        worker.behave = dies_later(worker)
    async with gateway(*workers) as target:
        _, _, raw = await post(target.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER]
        assert target.metrics.registry.get_sample_value("headstart_workers_lost_total") == MAX_LOSSES


async def test_a_resumed_attempt_has_its_first_token_when_one_comes(
    bundle: TokenizerBundle, raw_tokenizer: Tokenizer
) -> None:
    """The tokens of the attempt before are none of its own: its prefill has yet to be done."""
    reply = raw_tokenizer.encode("The capital of France is Paris.").ids
    dying, healthy = (ScriptedWorker(bundle, worker_id, reply=reply) for worker_id in ("w0", "w1"))
    may_die, may_go_on = asyncio.Event(), asyncio.Event()

    async def die(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        yield dying.token(request, 0, reply[0])
        await may_die.wait()
        raise ConnectionError

    dying.behave, healthy.behave = die, healthy.holds(may_go_on, 1)
    async with gateway(dying, healthy) as target:
        answer = asyncio.create_task(post(target.url, chat()))
        placements = target.router.placements
        await until(lambda: placements and "first token" in placements[0].calls)
        may_die.set()
        await until(lambda: len(placements) == 2 and placements[1].calls)
        second = placements[1]
        assert second.calls == ["started 0"]
        assert list(healthy.received[0].choices[0].output_ids) == reply[:1]
        may_go_on.set()
        status, _, raw = await answer
        assert status == 200
        assert json.loads(raw)["choices"][0]["message"]["content"] == "The capital of France is Paris."
        assert second.calls == ["started 0", "first token", "close"]
