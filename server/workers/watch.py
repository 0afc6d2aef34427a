"""Finds hung workers: a stream that is silent for long makes us ask its worker whether it still lives.

Silence alone proves nothing (a long queue, a long prefill), and a stopped process keeps its connections open.
"""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from server.workers.client import GenerateStream, WorkerClient

SILENT_S: Final = 5.0
INTERVAL_S: Final = 1.0
NUM_PROBES: Final = 2


class StallWatch:
    """Knows the open streams of this process. One task calls `run`."""

    def __init__(self, client: WorkerClient, *, silent_s: float = SILENT_S, interval_s: float = INTERVAL_S) -> None:
        self._client = client
        self._silent_s = silent_s
        self._interval_s = interval_s
        self._streams: set[GenerateStream] = set()

    @contextmanager
    def watching(self, stream: GenerateStream) -> Iterator[GenerateStream]:
        """From before it is entered: a worker may hang before its headers."""
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    async def run(self) -> None:
        """For ever: probe the workers of silent streams, and give up those streams whose worker does not answer."""
        while True:
            await asyncio.sleep(self._interval_s)
            silent = self._silent()
            if silent:
                await asyncio.gather(*(self._check(url, streams) for url, streams in silent.items()))

    def _silent(self) -> dict[str, list[GenerateStream]]:
        before_s = time.monotonic() - self._silent_s
        by_url: defaultdict[str, list[GenerateStream]] = defaultdict(list)
        for stream in self._streams:
            if stream.last_read_s < before_s:
                by_url[stream.url].append(stream)
        return by_url

    async def _check(self, url: str, streams: list[GenerateStream]) -> None:
        for _ in range(NUM_PROBES):
            if await self._client.is_alive(url):
                return
        for stream in streams:
            stream.give_up()
