from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.redis_server import RedisServer, newest_redis, redis_binaries


@pytest.fixture(scope="session", params=sorted(redis_binaries()))
def shared_redis(request: pytest.FixtureRequest) -> Iterator[RedisServer]:
    """Start one server per session, of each version on this machine. Tests flush it, and do not stop it."""
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder), redis_binaries()[request.param]) as server:
        yield server


@pytest.fixture
def redis_server(shared_redis: RedisServer) -> RedisServer:
    shared_redis.command("FLUSHALL")
    return shared_redis


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """Start a server that the test may stop, kill and start."""
    binary = newest_redis()
    with tempfile.TemporaryDirectory() as folder, RedisServer(Path(folder), binary) as server:
        yield server
