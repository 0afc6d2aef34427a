"""Requests whose client has left, and choices that ended early, are aborted on their worker."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.server.gateway_app import gateway
from tests.server.request.failing_workers import MakeWorker, stalls_after
from tests.server.sse_grammar import check_chat
from tests.server.test_app import chat, post
from tests.waiting import until
from worker.wire import Finished, Frame, GenerateRequest, Started, Tokens


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["queued", "running"])
async def test_a_client_that_leaves_is_an_abort_at_once(make: MakeWorker, stream: bool, when: str) -> None:
    worker = make()
    forever = asyncio.Event()

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        if when == "running":
            for id_ in worker.reply[:4]:
                yield Tokens(0, (id_,))
        await forever.wait()

    worker.behave = behave
    # Only the end of the connection shows it: no keep-alive is written, and no stream is probed.
    async with gateway(worker, ping_s=3600.0, silent_s=3600.0) as target:
        async with aiohttp.ClientSession() as session:
            request = asyncio.create_task(session.post(target.url + "/v1/chat/completions", json=chat(stream=stream)))
            await until(lambda: worker.num_running)
            num_waiting = len(worker.received[0].prompt_ids) if when == "queued" else 0
            await until(lambda: target.queue.num_tokens == num_waiting)
            if stream and when == "running":
                response = await request
                await response.content.readany()
                response.close()
            else:
                request.cancel()
                await asyncio.gather(request, return_exceptions=True)
        await until(lambda: not worker.num_running and target.router.placements[0].calls[-1:] == ["close"])
        assert len(worker.aborted) == 1
        assert target.metrics.disconnects.sum() == 1


async def test_a_client_that_leaves_a_batch_aborts_every_prompt(make: MakeWorker) -> None:
    """Except one that has ended, which the client has seen."""
    worker = make()
    stalls = stalls_after(worker, 4)
    worker.behave = lambda request: (stalls if len(worker.received) > 1 else worker.answer)(request)
    body, seen = {"model": "tiny", "prompt": ["one", "two", "three"], "stream": True}, b""
    async with gateway(worker) as target:
        async with (
            aiohttp.ClientSession() as session,
            session.post(target.url + "/v1/completions", json=body) as response,
        ):
            while b'"finish_reason":"' not in seen or worker.num_running < 2:
                seen += await response.content.readany()
        await until(lambda: len(worker.aborted) == 2)
        assert [placement.calls[-1] for placement in target.router.placements] == ["close"] * 3


async def test_a_stop_string_ends_one_choice_and_leaves_the_others(make: MakeWorker) -> None:
    worker = make()

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        async for frame in worker.answer(request):
            if isinstance(frame, Finished):
                await asyncio.Event().wait()
            yield frame

    worker.behave = behave
    async with gateway(worker) as target:
        _, _, raw = await post(target.url, chat(stream=True, n=2, stop="Fra", max_tokens=8))
        assert check_chat(raw, num_choices=2) == ["The capital of "] * 2
        request_id = worker.received[0].request_id
        await until(lambda: {(request_id, 0), request_id} == set(worker.aborted))
