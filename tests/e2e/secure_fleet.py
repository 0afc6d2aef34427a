"""Redis, two workers and a gateway as processes of their own: TLS on every port of theirs, keys, a cluster secret.

Blocks move as they may: the workers keep them on disk, too, and fetch from each other.
"""

from __future__ import annotations

import contextlib
import secrets
from pathlib import Path
from typing import Any, Final

import httpx

from server.auth.identity import digest_text
from tests.certificates import Authority
from tests.e2e.serving import SMALL_POOL, free_ports
from tests.faults.fleet import Fleet
from tests.faults.part import Gateway, Worker
from tests.redis_server import RedisServer, has_tls, newest_redis
from tests.waiting import HANG_S
from tests.worker_tokens import gateway_headers

WORKER_NAME: Final = "workers.headstart.test"
"""Name in the workers' certificate: they share it, as pods of a StatefulSet do."""


class SecureFleet(Fleet):
    """Open files of one gateway."""

    def __init__(self, folder: Path, model: Path, *tenants: str, worker_args: tuple[str, ...] = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.authority = ca = Authority(folder / "ca")
        self.trust = ca.trust()
        self.secret = secrets.token_hex(32).encode()
        self.keys = {tenant: f"sk-{secrets.token_hex(16)}" for tenant in tenants}
        redis_port, *worker_ports, port, ops_port = free_ports(5)
        secret_file, keys_file = folder / "secret", folder / "keys.toml"
        secret_file.write_bytes(self.secret)
        entries = [
            f'[[keys]]\ndigest = "{digest_text(key.encode())}"\ntenant = "{tenant}"\n'
            for tenant, key in self.keys.items()
        ]
        keys_file.write_text("\n".join(entries))
        redis, redis_url = _redis(folder, ca, redis_port)
        common = ["--redis", redis_url, "--cluster-secret-file", str(secret_file), "--log-level", "debug"]
        self.worker_certificate = ca.issue("worker", WORKER_NAME)
        self.gateway_certificate = ca.issue("gateway", "127.0.0.1")
        worker_common = ["--model", str(model), "--served-model-name", "tiny", "--threads", "1", *SMALL_POOL.split()]
        worker_common += ["--worker-ca", str(ca.path), "--worker-tls-name", WORKER_NAME]
        worker_common += ["--kv-disk", str(folder / "kv"), "--kv-disk-size", "64M", *common, *worker_args]
        workers = [
            Worker(f"w{n}", port, folder / f"w{n}.log", [*worker_common, *_tls(self.worker_certificate)], None)
            for n, port in enumerate(worker_ports)
        ]
        gateway_args = [*common, *_tls(self.gateway_certificate), "--api-keys", str(keys_file), "--access-log"]
        gateway_args += ["--worker-ca", str(ca.path), "--worker-tls-name", WORKER_NAME, "--log-format", "json"]
        super().__init__(redis, workers, [Gateway("g0", port, ops_port, folder / "g0.log", gateway_args)])

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.gateway.port}"

    @property
    def ops_url(self) -> str:
        return f"https://127.0.0.1:{self.gateway.ops_port}"

    def wait_ready(self) -> None:
        self._wait_until(self._is_ready)

    def _is_ready(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            answer = httpx.get(f"{self.url}/health/ready", verify=self.trust, timeout=HANG_S)
            return answer.status_code == 200 and answer.json()["workers"] == len(self.workers)
        return False

    def post(self, tenant: str, body: dict[str, Any], path: str = "/v1/completions") -> httpx.Response:
        headers = {"authorization": f"Bearer {self.keys[tenant]}"}
        return httpx.post(f"{self.url}{path}", json=body, headers=headers, timeout=HANG_S, verify=self.trust)

    def ask_worker(self, worker: Worker, path: str, body: bytes | None = None) -> bytes:
        """As gateways do, with the token of its process; its certificate is checked as that of WORKER_NAME."""
        headers = gateway_headers(self.secret, lambda path, body: self.send(worker, path, body, {}).content)
        answer = self.send(worker, path, body, headers)
        assert answer.status_code == 200, answer.text
        return answer.content

    def send(self, worker: Worker, path: str, body: bytes | None, headers: dict[str, str]) -> httpx.Response:
        """GET, or POST a body."""
        request = httpx.Request(
            "GET" if body is None else "POST",
            f"https://127.0.0.1:{worker.port}{path}",
            content=body,
            headers=headers | {"host": WORKER_NAME},
            extensions={"sni_hostname": WORKER_NAME},
        )
        with httpx.Client(verify=self.trust, timeout=HANG_S) as client:
            return client.send(request)


def _redis(folder: Path, ca: Authority, port: int) -> tuple[RedisServer, str]:
    """And its URL: over TLS, which tests/cache has tests of, where this machine's Redis has it."""
    binary = newest_redis()
    if not has_tls(binary):
        redis = RedisServer(folder, binary)
        return redis, redis.url
    cert, key = ca.issue("redis", "127.0.0.1")
    listens = ("--tls-port", str(port), "--tls-auth-clients", "no", "--tls-ca-cert-file", str(ca.path))
    redis = RedisServer(folder, binary, *listens, "--tls-cert-file", str(cert), "--tls-key-file", str(key))
    return redis, f"rediss://127.0.0.1:{port}?ssl_ca_certs={ca.path}"


def _tls(pair: tuple[Path, Path]) -> list[str]:
    return ["--tls-cert", str(pair[0]), "--tls-key", str(pair[1])]
