"""A generation reports its progress to its placement, attempt by attempt."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator

from tokenizers import Tokenizer

from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import chat, post
from tests.waiting import until
from worker.wire import Frame, GenerateRequest, Started, TokenizerBundle


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

    async def prefill(request: GenerateRequest) -> AsyncIterator[Frame]:
        frames = healthy.answer(request)
        yield await anext(frames)
        await may_go_on.wait()
        async for frame in frames:
            yield frame

    dying.behave, healthy.behave = die, prefill
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
