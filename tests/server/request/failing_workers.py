"""Scripted workers that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from tests.server.scripted_worker import Die, Script, ScriptedWorker
from worker.wire import Frame, GenerateRequest, Started, Tokens

MakeWorker = Callable[..., ScriptedWorker]
"""Each has its own id, and answers `ANSWER`."""


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


def stalls_after(worker: ScriptedWorker, num_tokens: int, *, hangs: bool = False) -> Script:
    """Send that many tokens of choice 0, then stop. A worker that `hangs` answers no health check either."""

    async def behave(request: GenerateRequest) -> AsyncIterator[Frame]:
        yield Started(0)
        yield Tokens(0, tuple(worker.reply[:num_tokens]))
        worker.hung = hangs
        await asyncio.Event().wait()

    return behave
