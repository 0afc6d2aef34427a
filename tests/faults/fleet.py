"""Real gateways, workers and a Redis, each a process of its own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Final, Self

from tests.faults.part import Gateway, Part, Worker
from tests.redis_server import RedisServer
from tests.stopwatch import Stopwatch
from tests.waiting import HANG_S, wait_until

START_TIMEOUT_S: Final = 2 * HANG_S


class Fleet(ABC):
    """A context manager; ready when entered, gone when left."""

    def __init__(
        self, redis: RedisServer, workers: list[Worker], gateways: list[Gateway], *, starts_redis: bool = True
    ) -> None:
        self.redis = redis
        self.workers = workers
        self.gateways = gateways
        self._starts_redis = starts_redis

    @property
    def parts(self) -> Iterator[Part]:
        yield from self.gateways
        yield from self.workers

    @property
    def gateway(self) -> Gateway:
        return self.gateways[0]

    def stopwatch(self) -> Stopwatch:
        return Stopwatch(lambda: [*(part.pid for part in self.parts), *self.redis.pids])

    def __enter__(self) -> Self:
        try:
            if self._starts_redis:
                self.redis.start()
            for part in self.parts:
                part.start()
            self.wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for part in self.parts:
            part.stop()
        self.redis.kill()

    @abstractmethod
    def wait_ready(self) -> None:
        """Wait until every worker serves, and every gateway has found all of them."""

    def _wait_until(self, ready: Callable[[], bool]) -> None:
        try:
            wait_until(ready, START_TIMEOUT_S)
        except AssertionError:
            raise AssertionError("\n".join(["the fleet is not ready", *(p.tail() for p in self.parts)])) from None
