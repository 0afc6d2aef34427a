"""Certificates are checked and reloaded without a restart; connections are bounded."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from cryptography.hazmat.primitives import serialization
from starlette.types import ASGIApp

from server.config import GatewayConfig
from server.http.protocol import HttpLimits
from server.http.server import SPARE_FILES, affordable_connections
from server.workers.client import WorkerClient
from server.workers.connection import WorkerLost
from server.workers.networks import WorkerNetworks
from tests.certificates import Authority
from tests.server.gateway_app import QuietListener
from tests.waiting import HANG_S, until
from worker.common.proof import PROVE_PATH, new_instance, prove
from worker.common.tls import ca_files, certificate_files
from worker.config import WorkerConfig
from worker.wire import pack

LIMITS = HttpLimits(0.5, 0.5, 100, 1.0, 0.5)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca")


async def hello(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": scope["scheme"][:2].encode()})


async def worker(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    """Prove itself to whoever asks, and answer every other call with its scheme."""
    body = b'{"scheme": "%s"}' % scope["scheme"].encode()
    if scope["path"] == PROVE_PATH:
        url = f"https://127.0.0.1:{scope['server'][1]}"
        body = pack(prove("token", (await receive())["body"], url, new_instance()))
    headers = [(b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


class Port:
    """One HTTPS port of a gateway in this process."""

    def __init__(self, tls: ssl.SSLContext | None, limits: HttpLimits = LIMITS, app: ASGIApp = hello) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.server = QuietListener(app, self.listener, limits, tls)

    async def __aenter__(self) -> Port:
        self._task = asyncio.create_task(self.server.run_until_stopped())
        while not self.server.started:  # noqa: ASYNC110 (it has no event)
            await asyncio.sleep(0.001)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.server.stopped.set()
        await self._task

    @property
    def connections(self) -> set[object]:
        """The open ones."""
        return {*self.server.server_state.connections}

    @asynccontextmanager
    async def connected(self, **options: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """A connection, which must not take longer than a hang."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port, **options)
        async with asyncio.timeout(HANG_S):
            yield reader, writer
        writer.close()

    async def exchange(self, data: bytes) -> bytes:
        """Send all of this, and return all that comes until the end."""
        async with self.connected() as (reader, writer):
            writer.write(data)
            return await reader.read()

    async def serial(self, trust: ssl.SSLContext) -> str:
        """Return the serial number of the certificate that it shows. Raises ssl.SSLError."""
        _, writer = await asyncio.open_connection("127.0.0.1", self.port, ssl=trust)
        try:
            return str(writer.get_extra_info("peercert")["serialNumber"])
        finally:
            writer.close()
            await writer.wait_closed()


async def test_a_new_certificate_is_shown_without_a_restart(authority: Authority) -> None:
    cert, key = authority.issue("gateway", "127.0.0.1")
    certificate = certificate_files(str(cert), str(key))
    async with Port(certificate.context) as port:
        first = await port.serial(authority.trust())
        pair = cert.read_bytes(), key.read_bytes()
        cert.write_bytes(authority.issue("other", "127.0.0.1")[0].read_bytes())
        certificate.reload_if_changed()
        assert await port.serial(authority.trust()) == first, "half a pair is not used"
        cert.write_text("rubbish")
        certificate.reload_if_changed()
        assert await port.serial(authority.trust()) == first
        cert.write_bytes(pair[0])
        authority.issue("gateway", "127.0.0.1")
        certificate.reload_if_changed()
        assert await port.serial(authority.trust()) != first


async def test_certificate_and_key_must_be_a_valid_pair(authority: Authority, tmp_path: Path) -> None:
    cert, key = authority.issue("gateway", "127.0.0.1")
    async with Port(certificate_files(str(cert), str(key)).context) as port:
        with pytest.raises(ssl.SSLCertVerificationError):
            await port.serial(Authority(tmp_path / "stranger").trust())
        old = authority.trust()
        with pytest.warns(DeprecationWarning, match="TLSv1_1"):
            old.minimum_version = old.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await port.serial(old)


async def test_missing_handshake_is_cut(authority: Authority) -> None:
    cert, key = authority.issue("gateway", "127.0.0.1")
    async with Port(certificate_files(str(cert), str(key)).context) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port.port)
        async with asyncio.timeout(HANG_S):
            assert await reader.read() == b""
        writer.close()


@pytest.mark.parametrize(
    ("names", "expected", "ca", "works"),
    [
        (["127.0.0.1"], None, True, True),
        (["worker.example"], None, True, False),
        (["worker.example"], "worker.example", True, True),
        (["*.workers.svc"], "w0.workers.svc", True, True),
        (["127.0.0.1"], "worker.example", True, False),
        (["127.0.0.1"], None, False, False),
    ],
)
async def test_worker_certificates_are_checked(
    names: list[str], expected: str | None, ca: bool, works: bool, authority: Authority, tmp_path: Path
) -> None:
    cert, key = authority.issue("worker", *names)
    trusted = authority if ca else Authority(tmp_path / "another")
    worker_ca = ca_files(str(trusted.path), expected)
    networks = WorkerNetworks(tls_only=True)
    client = WorkerClient("token", networks, worker_ca.context)
    try:
        async with Port(certificate_files(str(cert), str(key)).context, app=worker) as port:
            url = f"https://127.0.0.1:{port.port}"
            assert await client.is_alive(url) == works
            if works:
                connection = await client.send(url, b"POST /generate", b"x")
                assert await connection.head() == 200
                assert await connection.read() == b'{"scheme": "https"}'
                connection.close()
            else:
                with pytest.raises(WorkerLost, match="SSLCertVerificationError"):
                    await client.send(url, b"POST /generate", b"x")
    finally:
        client.close()


async def test_a_new_ca_is_trusted_without_a_restart(authority: Authority, tmp_path: Path) -> None:
    other = Authority(tmp_path / "new")
    cert, key = other.issue("worker", "127.0.0.1")
    ca = ca_files(str(authority.path))
    client = WorkerClient(tls=ca.context)
    try:
        async with Port(certificate_files(str(cert), str(key)).context, app=worker) as port:
            url = f"https://127.0.0.1:{port.port}"
            assert not await client.is_alive(url)
            authority.path.write_bytes(authority.path.read_bytes() + other.path.read_bytes())
            ca.reload_if_changed()
            assert await client.is_alive(url)
    finally:
        client.close()


def test_a_worker_without_tls_is_refused_where_it_is_asked_for() -> None:
    networks = WorkerNetworks(tls_only=True)
    assert networks.reject_reason("https://127.0.0.1:1") is None
    assert "does not speak TLS" in str(networks.reject_reason("http://127.0.0.1:1"))
    assert WorkerNetworks().reject_reason("http://127.0.0.1:1") is None


def test_missing_files_are_named(tmp_path: Path, authority: Authority) -> None:
    cert, key = authority.issue("one", "127.0.0.1")
    other = authority.issue("two", "127.0.0.1")[1]
    missing = str(tmp_path / "missing.pem")
    config = GatewayConfig(workers=("dns:w:1",), tls_cert=missing, tls_key=str(key), worker_ca=str(key))
    with pytest.raises(ValueError, match=r"--tls-cert.*missing\.pem"):
        config.certificate()
    with pytest.raises(ValueError, match="--worker-ca"):
        config.workers_ca()
    with pytest.raises(ValueError, match="--tls-cert"):
        WorkerConfig(tls_cert=str(cert), tls_key=str(other)).certificate()
    with pytest.raises(ValueError, match="--tls-key"):
        WorkerConfig(tls_cert=str(cert))
    pair = serialization.load_pem_private_key(key.read_bytes(), None)
    format_, encryption = serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"secret")
    key.write_bytes(pair.private_bytes(serialization.Encoding.PEM, format_, encryption))
    with pytest.raises(ValueError, match="the key has a passphrase"):
        WorkerConfig(tls_cert=str(cert), tls_key=str(key)).certificate()
    assert WorkerConfig().certificate() is None


async def test_idle_connections_make_room() -> None:
    limits = HttpLimits(10.0, 10.0, 20, 1.0, 60.0)
    async with Port(None, limits) as port, aiohttp.ClientSession() as http:
        idle = [await asyncio.open_connection("127.0.0.1", port.port) for _ in range(60)]
        async with http.get(f"http://127.0.0.1:{port.port}/") as answer:
            assert answer.status == 200

        def ended() -> list[asyncio.StreamReader]:
            return [reader for reader, _ in idle if reader.at_eof() or reader.exception() is not None]

        await until(lambda: len(ended()) >= 41)
        assert ended() == [reader for reader, _ in idle[:41]], "those that waited longest"
        for _, writer in idle:
            writer.close()


@pytest.mark.parametrize(
    ("soft", "hard", "allowed", "raised_to"),
    [
        (1024, 1 << 20, 8192, 2 * 8192 + SPARE_FILES),
        (1024, 4096, (4096 - SPARE_FILES) // 2, 4096),
        (1024, 1024, (1024 - SPARE_FILES) // 2, 1024),
        (1 << 20, 1 << 20, 8192, None),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, 8192, None),
        (300, 300, (300 - SPARE_FILES) // 2, 300),
    ],
)
def test_no_more_connections_than_files(
    soft: int,
    hard: int,
    allowed: int,
    raised_to: int | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda kind: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: limits.append(new))
    assert affordable_connections(8192) == allowed
    assert limits[1:] == ([] if raised_to is None else [(raised_to, hard)])
    warned = [record.getMessage() for record in caplog.records]
    assert bool(warned) == (allowed < 8192)
    assert all(f"enough for {allowed} connections" in text and "ulimit" in text for text in warned)


@pytest.mark.parametrize("files", [64, 128, SPARE_FILES, SPARE_FILES + 31])
def test_too_few_files_for_a_port_are_refused(files: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (files, files))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, new: None)
    with pytest.raises(ValueError, match=f"may open {files} files.*ulimit -n"):
        affordable_connections(8192)
