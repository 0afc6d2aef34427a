"""Redis over TLS, directly and by a Sentinel: the client checks the CA and the name."""

from __future__ import annotations

import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from redis.exceptions import RedisError

from cache.redis_index.connection import ClientSettings, Endpoint
from tests.certificates import Authority
from tests.e2e.serving import free_ports
from tests.redis_server import REDIS_7, RedisServer, needs_redis_tls
from tests.waiting import HANG_S, until

pytestmark = needs_redis_tls


class TlsRedis:
    """A primary, and a Sentinel that watches it."""

    def __init__(self, folder: Path, name: str) -> None:
        self.authority = Authority(folder / "ca")
        cert, key = self.authority.issue("redis", name)
        self.port, self.sentinel_port = free_ports(2)
        files = f"tls-cert-file {cert}\ntls-key-file {key}\ntls-ca-cert-file {self.authority.path}\n"
        options = [
            f"--{word}" if not number else word
            for line in files.splitlines()
            for number, word in enumerate(line.split())
        ]
        self.server = RedisServer(folder, REDIS_7, "--tls-port", str(self.port), "--tls-auth-clients", "no", *options)
        self.conf = folder / "sentinel.conf"
        self.conf.write_text(
            f"port 0\ntls-port {self.sentinel_port}\ntls-auth-clients no\ntls-replication yes\n{files}"
            f"dir {folder}\nsentinel monitor main 127.0.0.1 {self.port} 1\n"
        )

    @property
    def ca(self) -> str:
        return f"ssl_ca_certs={self.authority.path}"


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsRedis]:
    redis = TlsRedis(tmp_path_factory.mktemp("tls"), "127.0.0.1")
    with redis.server:
        command = [REDIS_7, str(redis.conf), "--sentinel"]
        sentinel = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        try:
            yield redis
        finally:
            sentinel.kill()
            sentinel.wait()


@asynccontextmanager
async def opened(url: str) -> AsyncIterator[bytes]:
    """Yield the reply to a PING."""
    connection = await Endpoint(url, ClientSettings(connect_timeout_s=HANG_S)).open()
    try:
        await connection.send_command("PING")
        yield await connection.read_response()
    finally:
        await connection.disconnect()


async def test_the_ca_is_checked(redis: TlsRedis, tmp_path: Path) -> None:
    async with opened(f"rediss://127.0.0.1:{redis.port}?{redis.ca}") as answer:
        assert answer == b"PONG"
    other = Authority(tmp_path / "other")
    for query in (f"?ssl_ca_certs={other.path}", ""):
        with pytest.raises(RedisError, match="certificate"):
            async with opened(f"rediss://127.0.0.1:{redis.port}{query}"):
                pass
    with pytest.raises((RedisError, OSError)):
        async with opened(f"redis://127.0.0.1:{redis.port}"):
            pass


async def test_the_name_is_checked(tmp_path: Path) -> None:
    redis = TlsRedis(tmp_path, "elsewhere.example")
    with redis.server, pytest.raises(RedisError, match="certificate"):
        async with opened(f"rediss://127.0.0.1:{redis.port}?{redis.ca}"):
            pass


async def test_a_sentinel_over_tls_names_the_primary(redis: TlsRedis) -> None:
    async def answers() -> bool:
        with suppress(RedisError, OSError):  # while the Sentinel starts
            async with opened(f"rediss+sentinel://127.0.0.1:{redis.sentinel_port}/main?{redis.ca}") as answer:
                return answer == b"PONG"
        return False

    await until(answers)
