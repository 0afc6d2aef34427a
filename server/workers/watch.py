"""Finds hung workers: when a stream is silent for long, asks its worker whether it still lives.

Silence alone proves nothing (a long queue, a long prefill), and a stopped process keeps its connections open. A worker
that does not answer loses its streams if another one lives that could resume them. If none does, the fleet may be
paused (a machine suspended, a network cut), so the streams wait for `no_successor_timeout_s`.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from cache.records import WorkerMember
from server.workers.client import GenerateStream, WorkerClient

SILENT_S: Final = 5.0
INTERVAL_S: Final = 1.0
NUM_PROBES: Final = 2
NO_SUCCESSOR_TIMEOUT_S: Final = 60.0
MAX_PROBED: Final = 8
"""Workers that could resume a stream and are probed at a time."""


class StallWatch:
    """The open streams of this gateway. One task calls `run`."""

    def __init__(
        self,
        client: WorkerClient,
        workers: Callable[[], Sequence[WorkerMember]] = tuple,
        *,
        silent_s: float = SILENT_S,
        interval_s: float = INTERVAL_S,
        no_successor_timeout_s: float = NO_SUCCESSOR_TIMEOUT_S,
    ) -> None:
        """`workers` returns all known workers."""
        self._client = client
        self._workers = workers
        self._no_successor_timeout_s = no_successor_timeout_s
        self._silent_s = silent_s
        self._interval_s = interval_s
        self._streams: set[GenerateStream] = set()

    @contextmanager
    def watching(self, stream: GenerateStream) -> Iterator[GenerateStream]:
        """Watch a stream from before it is entered: a worker may hang before its headers."""
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    async def run(self) -> None:
        """Probe the workers of silent streams, for ever, and give up the streams of workers that do not answer."""
        while True:
            await asyncio.sleep(self._interval_s)
            before_s = time.monotonic() - self._silent_s
            silent: defaultdict[str, list[GenerateStream]] = defaultdict(list)
            for stream in self._streams:
                if stream.last_read_s < before_s:
                    silent[stream.url].append(stream)
            if silent:
                await asyncio.gather(*(self._check(url, streams) for url, streams in silent.items()))

    async def _check(self, url: str, streams: list[GenerateStream]) -> None:
        for _ in range(NUM_PROBES):
            if await self._client.is_alive(url):
                return
        before_s = time.monotonic() - self._no_successor_timeout_s
        can_resume = await self._any_lives(self._successors(url))
        for stream in streams:
            if can_resume or stream.last_read_s < before_s:
                stream.give_up()

    def _successors(self, url: str) -> list[str]:
        """Return workers that could resume a stream of the worker at `url`."""
        workers = self._workers()
        kinds = {(worker.model, worker.numerics) for worker in workers if worker.url == url}
        urls = [worker.url for worker in workers if worker.url != url and (worker.model, worker.numerics) in kinds]
        return random.sample(urls, min(len(urls), MAX_PROBED))

    async def _any_lives(self, urls: Sequence[str]) -> bool:
        checks = [asyncio.create_task(self._client.is_alive(url)) for url in urls]
        try:
            for check in asyncio.as_completed(checks):
                if await check:
                    return True
            return False
        finally:
            for task in checks:
                task.cancel()
