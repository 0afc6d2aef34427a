"""Background tasks of the gateway outlive what they raise."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

log = logging.getLogger(__name__)

PAUSE_S: Final = 1.0


async def keep_running(
    name: str,
    run: Callable[[], Coroutine[Any, Any, None]],
    count: Callable[[str], None],
    *,
    pause_s: float = PAUSE_S,
) -> None:
    """Run `run()` again whenever it raises, after a pause, until it returns or is cancelled.

    Each failure is counted as `count(name)`, and logged with its traceback when it differs from the one before. What
    an operator must see ends the process before any task starts.
    """
    last = ""
    while True:
        try:
            await run()
            return
        except Exception as error:
            count(name)
            reason = f"{type(error).__name__}: {error!s:.200}"
            if reason != last:
                log.exception("task %s failed and starts again in %g s", name, pause_s)
                last = reason
        await asyncio.sleep(pause_s)
