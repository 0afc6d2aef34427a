"""Workers that refuse, die, hang and misspeak; clients that leave. Real sockets, scripted workers."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from itertools import count
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import openai
import pytest
from tokenizers import Tokenizer

from cache.types import Epoch
from server.generation import full_queues
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import Die, Refuse, Script, ScriptedWorker, until
from tests.server.sse_grammar import GrammarError, check_chat, events
from tests.server.test_app import ANSWER, MESSAGES, chat, client, post
from worker.wire import End, Failed, Finished, Frame, GenerateRequest, Started, TokenizerBundle, Tokens

MakeWorker = Callable[..., ScriptedWorker]


@pytest.fixture
def make(bundle: TokenizerBundle, raw_tokenizer: Tokenizer) -> MakeWorker:
    ids = raw_tokenizer.encode(ANSWER).ids
    numbers = count()

    def build(**fields: Any) -> ScriptedWorker:
        return ScriptedWorker(bundle, worker_id=f"w{next(numbers)}", reply=ids, **fields)

    return build


def dies_after(worker: ScriptedWorker, num_tokens: int) -> Script:
    """Breaks the connection behind that many tokens of choice 0."""

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        sent = 0
        async for frame in worker.answer(request):
            if isinstance(frame, Tokens) and sent >= num_tokens:
                await asyncio.sleep(0.02)  # let what was sent be read
                raise Die
            sent += isinstance(frame, Tokens)
            yield frame

    return behave


def gone_after(worker: ScriptedWorker, num_tokens: int) -> Script:
    """As `dies_after`, and never again a token."""
    dies, lives = dies_after(worker, num_tokens), iter([True])

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        if not next(lives, False):
            yield Started(0)
            raise Die
        async for frame in dies(request):
            yield frame

    return behave


def refuses(status: int, code: str, *, retryable: bool = True) -> Script:
    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        raise Refuse(status, code, retryable=retryable)
        yield Started(0)

    return behave


@asynccontextmanager
async def breaks_kept_connections(worker: ScriptedWorker) -> AsyncIterator[str]:
    """An address before the worker's: a connection breaks when a second request comes over it."""

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        address = urlsplit(worker.url)
        answers, requests = await asyncio.open_connection(address.hostname, address.port)
        answered = False

        async def relay_back() -> None:
            nonlocal answered
            while data := await answers.read(65536):
                answered = True
                writer.write(data)

        back = asyncio.create_task(relay_back())
        try:
            while (data := await reader.read(65536)) and not answered:
                requests.write(data)
        finally:
            back.cancel()
            requests.close()
            writer.transport.abort()

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("num_tokens", [0, 1, 5])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_death_is_resumed_with_the_tokens_received(make: MakeWorker, stream: bool, num_tokens: int) -> None:
    dying, healthy = make(), make()
    dying.behave = dies_after(dying, num_tokens)
    async with gateway(dying, healthy) as target:
        status, _, raw = await post(target.url, chat(stream=stream, n=1, seed=5))
        assert status == 200
        text = check_chat(raw)[0] if stream else json.loads(raw)["choices"][0]["message"]["content"]
        assert text == ANSWER
        (resumed,) = healthy.received
        assert list(resumed.choices[0].output_ids) == healthy.reply[:num_tokens]
        assert resumed.choices[0].seed == dying.received[0].choices[0].seed == 5
        first, second = target.router.placements
        assert first.calls[-1] == "close False"
        assert second.calls == ["started 0", "first token", "close True"]
        assert second.request.excluded == {(dying.worker_id, dying.member().epoch)}
        assert second.request.numerics == (dying.numerics if num_tokens else None)


async def test_n_choices_are_resumed_each_where_it_was(make: MakeWorker) -> None:
    dying, healthy = make(), make()
    dying.behave = dies_after(dying, 4)
    async with gateway(dying, healthy) as target:
        _, _, raw = await post(target.url, chat(stream=True, n=3))
        assert check_chat(raw, num_choices=3) == [ANSWER] * 3
        assert [len(choice.output_ids) for choice in healthy.received[0].choices] == [2, 1, 1]


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


async def test_unstreamed_answers_begin_again_on_other_numerics(make: MakeWorker) -> None:
    dying, other = make(), make(numerics="cuda-bfloat16")
    dying.behave = dies_after(dying, 5)
    async with gateway(dying, other) as target:
        status, headers, raw = await post(target.url, chat())
        assert status == 200
        assert json.loads(raw)["choices"][0]["message"]["content"] == ANSWER
        assert json.loads(raw)["usage"]["completion_tokens"] == len(other.reply) + 1
        assert other.received[0].choices[0].output_ids == ()
        assert headers["x-headstart-worker"] == other.worker_id


async def test_a_dead_address_is_passed_over(make: MakeWorker) -> None:
    gone, healthy = make(), make()
    async with gateway(gone, healthy) as target:
        dead = target.router.members[0]
        target.router.members[0] = type(dead)(
            **{f: getattr(dead, f) for f in dead.__slots__} | {"url": "http://127.0.0.1:1"}
        )
        status, headers, _ = await post(target.url, chat(stream=True))
        assert (status, headers["x-headstart-worker"]) == (200, healthy.worker_id)


async def test_a_kept_connection_that_broke_is_no_lost_worker(
    make: MakeWorker, caplog: pytest.LogCaptureFixture
) -> None:
    worker = make()
    async with breaks_kept_connections(worker) as url, gateway(worker) as target:
        target.router.members[0] = replace(target.router.members[0], url=url)
        with caplog.at_level(logging.INFO, logger="server.generation"):
            async with asyncio.timeout(10):
                while not any("close False" in placement.calls for placement in target.router.placements):
                    assert (await post(target.url, chat()))[0] == 200
        assert target.metrics.registry.get_sample_value("headstart_workers_lost_total") == 0
        assert target.router.failed == []
    assert [record.levelname for record in caplog.records] == ["INFO"]


@pytest.mark.parametrize(("status", "code"), [(429, "queue_full"), (503, "draining"), (409, "wrong_epoch")])
async def test_refusals_go_elsewhere_at_once(make: MakeWorker, status: int, code: str) -> None:
    refusing, healthy = make(), make()
    refusing.behave = refuses(status, code)
    async with gateway(refusing, healthy) as target:
        got, _, raw = await post(target.url, chat())
        assert got == 200
        assert json.loads(raw)["choices"][0]["message"]["content"] == ANSWER
        assert all(placement.calls[-1] == "close False" for placement in target.router.placements[:-1])
        assert len(refusing.received) == (2 if status == 409 else 1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (429, "queue_full", (429, "queue_full", "1")),
        (503, "draining", (503, "service_unavailable", "1")),
        (400, "invalid_request", (400, None, None)),
        (500, "internal_error", (500, "internal_error", None)),
    ],
)
async def test_refused_by_all_is_a_status(
    make: MakeWorker, stream: bool, status: int, code: str, expected: tuple[int, str | None, str | None]
) -> None:
    workers = make(), make()
    for worker in workers:
        worker.behave = refuses(status, code, retryable=status in (429, 503))
    async with gateway(*workers) as target:
        got, headers, raw = await post(target.url, chat(stream=stream))
        error = json.loads(raw)["error"]
        assert (got, error["code"], headers.get("retry-after")) == expected
        assert headers.get("x-should-retry") == {429: "true", 500: "false"}.get(got)


async def test_a_flood_is_answered_without_asking_the_workers_each_time(
    make: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause_s = 2.0  # so long that a slow machine sends the whole flood meanwhile
    monkeypatch.setattr(full_queues, "PAUSE_S", pause_s)
    workers = make(), make()
    for worker in workers:
        worker.behave = refuses(429, "queue_full")
    async with gateway(*workers) as target:
        answers = [await post(target.url, chat())]
        answers += await asyncio.gather(*(post(target.url, chat()) for _ in range(40)))
        assert {(status, json.loads(raw)["error"]["code"]) for status, _, raw in answers} == {(429, "queue_full")}
        assert sum(len(worker.received) for worker in workers) < 40
        for worker in workers:
            worker.behave = worker.answer
        await asyncio.sleep(pause_s)
        assert (await post(target.url, chat()))[0] == 200


async def test_a_request_that_kills_workers_is_stopped_and_quarantined(make: MakeWorker) -> None:
    workers = [make() for _ in range(5)]
    for worker in workers:
        worker.behave = dies_after(worker, 0)
    async with gateway(*workers) as target:
        for _ in range(2):
            status, headers, _ = await post(target.url, chat(seed=1))
            assert (status, headers["x-should-retry"]) == (500, "false")
        assert [len(worker.received) for worker in workers] == [1, 1, 0, 0, 0]
        assert [worker.received[0].is_suspect for worker in workers[:2]] == [False, True]
        for worker in workers:
            worker.behave = None
        status, _, _ = await post(target.url, chat(seed=1, temperature=0.5))
        assert status == 200, "another request is not in quarantine"


async def test_a_worker_that_says_so_is_believed(make: MakeWorker) -> None:
    blaming, other = make(), make()

    async def blame(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        yield Failed("poisonous", "the request has broken the device", retryable=False)

    blaming.behave = blame
    async with gateway(blaming, other) as target:
        for _ in range(2):
            status, headers, _ = await post(target.url, chat(seed=1))
            assert (status, headers["x-should-retry"]) == (500, "false")
        assert (len(blaming.received), len(other.received)) == (1, 0)


async def test_a_stream_outlives_many_handovers_and_gets_a_lost_worker_back(make: MakeWorker) -> None:
    """Workers that stop hand over, which is no loss; a worker that was lost is asked again when there is no other."""
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
            target.router.members[0] = replace(worker.member(), epoch=Epoch(f"boot {number}"))
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


async def test_failed_frames(make: MakeWorker) -> None:
    failing, healthy = make(), make()

    async def draining(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        yield Tokens(0, tuple(failing.reply[:3]))
        yield Failed("draining", "the worker stops", retryable=True)

    failing.behave = draining
    async with gateway(failing, healthy) as target:
        _, _, raw = await post(target.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER]

        async def broken(request: GenerateRequest) -> AsyncIterator[Frame]:
            yield Started(0)
            yield Failed("internal_error", "secret details", retryable=False)

        failing.behave = broken
        status, _, raw = await post(target.url, chat(stream=True))
        assert status == 500
        assert b"secret" not in raw


@pytest.mark.parametrize("frames", [[End(0, 0, 0)], [Started(0), Tokens(7, (1,))], [Started(0), Finished(0, "abort")]])
async def test_nonsense_from_a_worker_is_a_loss(make: MakeWorker, frames: list[Frame]) -> None:
    odd, healthy = make(), make()

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        for frame in frames:
            yield frame

    odd.behave = behave
    async with gateway(odd, healthy) as target:
        status, _, raw = await post(target.url, chat())
        assert status == 200
        assert json.loads(raw)["choices"][0]["message"]["content"] == ANSWER


async def test_the_end_lost_with_its_worker(make: MakeWorker) -> None:
    """All tokens came, Finished did not: nothing is left to be asked of anybody."""
    dying = make()

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        yield Tokens(0, (*dying.reply, 2))
        raise Die

    dying.behave = behave
    async with gateway(dying) as target:
        _, _, raw = await post(target.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER]
        assert len(target.router.placements) == 1


async def test_a_hung_worker_is_found_and_its_stream_resumed(make: MakeWorker) -> None:
    hung, healthy = make(), make()

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        yield Tokens(0, tuple(hung.reply[:4]))
        hung.hung = True
        await asyncio.Event().wait()

    hung.behave = behave
    async with gateway(hung, healthy, silent_s=0.3) as target:
        _, _, raw = await post(target.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER]
        assert len(healthy.received[0].choices[0].output_ids) == 4


async def test_a_slow_but_living_worker_is_waited_for(make: MakeWorker) -> None:
    slow = make()

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        async for frame in slow.answer(request):
            if isinstance(frame, Finished):
                await asyncio.sleep(0.6)
            yield frame

    slow.behave = behave
    async with gateway(slow, silent_s=0.1) as target:
        _, _, raw = await post(target.url, chat(stream=True))
        assert check_chat(raw) == [ANSWER]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "running"])
async def test_a_client_that_leaves_is_an_abort_within_a_second(make: MakeWorker, stream: bool, when: str) -> None:
    worker = make()
    forever = asyncio.Event()

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        if when == "running":
            for id_ in worker.reply[:4]:
                yield Tokens(0, (id_,))
        await forever.wait()

    worker.behave = behave
    async with gateway(worker) as target:
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(session.post(target.url + "/v1/chat/completions", json=chat(stream=stream)))
            await until(lambda: worker.num_running)
            if stream and when == "running":
                response = await request
                await response.content.readany()
                response.close()
            else:
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
        left_s = time.monotonic()
        await until(lambda: not worker.num_running and target.router.placements[0].calls[-1:] == ["close False"])
        assert time.monotonic() - left_s < 1.0
        assert len(worker.aborted) == 1
        assert target.metrics.disconnects._value.get() == 1


async def test_keepalives_while_queued_and_a_late_error_as_event(make: MakeWorker) -> None:
    worker = make()
    go = asyncio.Event()

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        await go.wait()
        yield Failed("internal_error", "x", retryable=False)

    worker.behave = behave
    async with (
        gateway(worker, keepalive_s=0.05) as target,
        aiohttp.ClientSession() as session,
        session.post(target.url + "/v1/chat/completions", json=chat(stream=True)) as response,
    ):
        assert response.status == 200
        assert await response.content.readexactly(16) == b": ping\n\n: ping\n\n"
        go.set()
        (error,) = events(await response.read())
        assert error["error"]["code"] == "internal_error"


async def test_a_stop_string_ends_one_choice_and_leaves_the_others(make: MakeWorker) -> None:
    worker = make(pace_s=0.002)
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, chat(stream=True, n=2, stop="Fra", max_tokens=8))
        assert check_chat(raw, num_choices=2) == ["The capital of "] * 2
        request_id = worker.received[0].request_id
        await until(lambda: {(request_id, 0), request_id} == set(worker.aborted))


async def test_the_deadline_is_a_504_or_an_error_event(make: MakeWorker) -> None:
    worker = make(pace_s=0.05)
    async with gateway(worker, request_timeout_s=0.3) as target:
        status, _, raw = await post(target.url, chat())
        assert (status, json.loads(raw)["error"]["code"]) == (504, "timeout")
        status, _, raw = await post(target.url, chat(stream=True))
        assert status == 200
        assert events(raw)[-1]["error"]["code"] == "timeout"


async def test_a_worker_whose_bundle_is_not_its_namespace_is_not_served(make: MakeWorker) -> None:
    liar = make(namespace="0" * 32)
    async with gateway(liar) as target:
        assert target.models.names() == []
        status, _, _ = await post(target.url, chat())
        assert status == 503
