"""A gateway whose longest delay is the longest processor time of its loop's thread between two turns of a task."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable
from typing import Final

from server import gateway

SAMPLE_S: Final = 0.005


async def sample_held(observe: Callable[[float], None]) -> None:
    """Observe the processor time of each turn, without end. Time of other processes does not count."""
    while True:
        before_s = time.thread_time()
        await asyncio.sleep(SAMPLE_S)
        observe(time.thread_time() - before_s)


if __name__ == "__main__":
    vars(gateway)["sample_delay"] = sample_held
    sys.exit(gateway.main())
