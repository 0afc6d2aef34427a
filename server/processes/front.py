"""The public port of many processes, as the parent sees it: children that are started, replaced and ended."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Sequence

from server.cli.serve.child import Child


class ProcessesFront:
    """`serve` raises ChildRefusedError when a process cannot work as it was asked to."""

    def __init__(self, children: Sequence[Child], address: str, grace_s: float) -> None:
        self._children = children
        self._address = address
        self._grace_s = grace_s
        self._stop_requested = asyncio.Event()

    @property
    def address(self) -> str:
        return self._address

    async def serve(self) -> None:
        lives = [asyncio.create_task(child.run(), name=child.spec.name) for child in self._children]
        stop = asyncio.create_task(self._stop_requested.wait())
        try:
            await asyncio.wait([*lives, stop], return_when=asyncio.FIRST_COMPLETED)
        finally:
            await asyncio.gather(*(child.stop(self._grace_s) for child in self._children))
            for task in (*lives, stop):
                task.cancel()
            ends = await asyncio.gather(*lives, return_exceptions=True)
        for end in ends:
            if isinstance(end, Exception):
                raise end

    def stop(self) -> None:
        self._stop_requested.set()

    def force(self) -> None:
        for child in self._children:
            child.signal(signal.SIGTERM)
