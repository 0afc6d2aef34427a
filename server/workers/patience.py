"""A timeout for what others owe us, that does not run while we ourselves do not.

`asyncio.timeout` compares clocks: an event loop that was busy, stopped, or without a core for longer than the timeout
finds it passed, although the answer lies in the socket. Here time counts in pieces, each of which the loop has seen.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

NUM_PIECES: Final = 8
T = TypeVar("T")


async def patiently(work: Coroutine[Any, Any, T], timeout_s: float) -> T:
    """What `work` returns. Raises TimeoutError, and what `work` raises; ends `work` when cancelled."""
    task = asyncio.create_task(work)
    try:
        for _ in range(NUM_PIECES):
            done, _ = await asyncio.wait((task,), timeout=timeout_s / NUM_PIECES)
            if done:
                return task.result()
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait((task,))
    raise TimeoutError
