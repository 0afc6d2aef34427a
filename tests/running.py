"""Runs parts of the system as tasks for the length of a test."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from typing import Any, Protocol


class Runnable(Protocol):
    def run(self) -> Coroutine[Any, Any, object]: ...


@asynccontextmanager
async def running(*parts: Runnable) -> AsyncIterator[None]:
    """Cancels all parts at the end; raises what a part raised."""
    tasks = [asyncio.create_task(part.run()) for part in parts]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task
