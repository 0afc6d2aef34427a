"""Requests at a fixed rate, whatever the answers take."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.dev.gateway_load.client import BrokenAnswerError, Connection, post


@dataclass(slots=True, eq=False)
class Outcomes:
    """The answers and failures so far."""

    num_sent: int = 0
    latencies_s: list[float] = field(default_factory=list)
    failures: Counter[str] = field(default_factory=Counter)


class OpenLoop:
    """Sends a body, drawn at random, every 1 / `per_s` seconds."""

    def __init__(self, url: str, bodies: Sequence[bytes], per_s: float) -> None:
        self._url = url
        self._requests = [post(url, body) for body in bodies]
        self._per_s = per_s
        self._random = random.Random(0)
        self._idle: list[Connection] = []

    async def run(self, seconds: float) -> Outcomes:
        """Send for this time, and wait for all answers."""
        outcomes, begun_s = Outcomes(), time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while (elapsed_s := time.perf_counter() - begun_s) < seconds:
                while outcomes.num_sent < elapsed_s * self._per_s:
                    outcomes.num_sent += 1
                    group.create_task(self._ask(self._random.choice(self._requests), outcomes))
                await asyncio.sleep(0.2 / self._per_s)
        for connection in self._idle:
            connection.transport.close()
        self._idle.clear()
        return outcomes

    async def _ask(self, request: bytes, outcomes: Outcomes) -> None:
        begun_s = time.perf_counter()
        try:
            connection = self._idle.pop() if self._idle else await Connection.open(self._url)
            async with asyncio.timeout(60.0):
                await connection.ask(request)
        except (BrokenAnswerError, OSError, TimeoutError) as error:
            outcomes.failures[f"{type(error).__name__}: {error!s:.200}"] += 1
        else:
            outcomes.latencies_s.append(time.perf_counter() - begun_s)
            self._idle.append(connection)
