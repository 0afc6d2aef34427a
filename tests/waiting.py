"""Waiting in tests: for a condition, never for a time to pass."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

HANG_S: Final = 120.0
"""Bound of every wait in a test. No bound is tighter, so the machine's speed decides nothing."""


async def until(condition: Callable[[], object | Awaitable[object]], timeout_s: float = HANG_S) -> None:
    """Wait until the condition holds, looking every few milliseconds; TimeoutError if it never does."""
    async with asyncio.timeout(timeout_s):
        while True:
            result = condition()
            if isinstance(result, Awaitable):
                result = await result
            if result:
                return
            await asyncio.sleep(0.003)


def wait_until(condition: Callable[[], Any], timeout_s: float = HANG_S, what: str = "") -> Any:
    """The condition's first true value; AssertionError when it never comes. A refused connection is false."""
    deadline_s = time.monotonic() + timeout_s
    last: object = None
    while True:
        try:
            if value := condition():
                return value
        except OSError as error:
            last = error
        assert time.monotonic() < deadline_s, f"not within {timeout_s} s: {what or condition} {last or ''}"
        time.sleep(0.02)
