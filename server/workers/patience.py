"""A timeout for what others owe us, that does not run while we ourselves do not.

`asyncio.timeout` compares clocks: an event loop that was busy, stopped, or without a core for longer than the timeout
finds it passed, although the answer lies in the socket. Here time counts in pieces, each of which the loop has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

NUM_PIECES: Final = 8
T = TypeVar("T")


async def patiently(
    work: Coroutine[Any, Any, T], timeout_s: float, discard: Callable[[T], object] = lambda result: None
) -> T:
    """What `work` returns. Raises TimeoutError, and what `work` raises; ends `work` when cancelled. `discard` gets what
    nobody waits for any more: the result that came as the time ended, or its caller was cancelled."""
    task = asyncio.create_task(work)
    is_taken = False
    try:
        for _ in range(NUM_PIECES):
            done, _ = await asyncio.wait((task,), timeout=timeout_s / NUM_PIECES)
            if done:
                is_taken = True
                return task.result()
    finally:
        if not is_taken:
            task.cancel()
            await asyncio.wait((task,))
            if not task.cancelled() and task.exception() is None:
                discard(task.result())
    raise TimeoutError
