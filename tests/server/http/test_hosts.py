"""Ports answer only to known Host headers, against DNS rebinding."""

from __future__ import annotations

import socket

import aiohttp
import pytest

from server.http.middleware import known_hosts
from worker.common.sockets import HostNames
from worker.http.app import ProgramsOnly

CASES = [
    ("127.0.0.1", "localhost:8001", True),
    ("127.0.0.1", "LOCALHOST.", True),
    ("127.0.0.1", "127.0.0.1", True),
    ("127.0.0.1", "127.0.0.1:8001", True),
    ("127.0.0.1", "[::1]:8001", True),
    ("127.0.0.1", "10.1.2.3:8001", False),
    ("127.0.0.1", "evil.example", False),
    ("127.0.0.1", "evil.example:8001", False),
    ("127.0.0.1", "127.0.0.1.evil.example", False),
    ("127.0.0.1", "localhost.evil.example", False),
    ("127.0.0.1", "evil-localhost", False),
    ("127.0.0.1", "127.1", False),
    ("127.0.0.1", "2130706433", False),
    ("127.0.0.1", "", False),
    ("10.1.2.3", "10.1.2.3:8001", True),
    ("10.1.2.3", "10.1.2.4:8001", False),
    ("10.1.2.3", "evil.example", False),
    ("0.0.0.0", "10.1.2.3:8001", True),
    ("0.0.0.0", "[fd00::1]:8001", True),
    ("0.0.0.0", "evil.example", False),
    ("::", "10.1.2.3:8001", True),
    ("::", "[fd00::1]", True),
    ("::", "evil.example", False),
    ("0.0.0.0", "named.example", True),
    ("0.0.0.0", "NAMED.example.:80", True),
    ("0.0.0.0", "not.named.example", False),
]


async def answered(app, headers: dict[str, str], method: str = "GET") -> bool:  # type: ignore[no-untyped-def]
    statuses = []

    async def send(message) -> None:  # type: ignore[no-untyped-def]
        if message["type"] == "http.response.start":
            statuses.append(message["status"])

    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await app({"type": "http", "method": method, "path": "/drain", "headers": raw}, None, send)
    assert statuses in ([200], [403])
    return statuses == [200]


def takes(worker: ProgramsOnly, headers: dict[str, str], method: str = "GET") -> bool:
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    failed = worker.refusal({"type": "http", "method": method, "path": "/drain", "headers": raw})
    assert failed is None or failed.code == "forbidden"
    return failed is None


async def hello(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
    await send({"type": "http.response.start", "status": 200, "headers": []})


@pytest.mark.parametrize(("bound", "host", "known"), CASES)
async def test_known_hosts_of_a_port(bound: str, host: str, known: bool) -> None:
    ops = known_hosts(hello, HostNames(bound, ["named.example"]), "--ops-hosts")
    assert await answered(ops, {"host": host}) is known
    assert await answered(ops, {}), "HTTP/1.0"
    worker = ProgramsOnly(bound, "http://named.example:8100")
    for own in ("accept-language", "referer"):
        assert takes(worker, {"host": host, own: "x"}) is known
    assert takes(worker, {"host": host}), "a gateway may know a worker by any name"


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize(
    ("headers", "allowed"),
    [
        ({}, True),
        ({"sec-fetch-site": "none"}, True),
        ({"sec-fetch-site": "cross-site"}, False),
        ({"sec-fetch-site": "same-origin"}, False),
        ({"origin": "http://127.0.0.1:8100"}, False),
        ({"origin": "null"}, False),
    ],
)
def test_worker_answers_programs_only(method: str, headers: dict[str, str], allowed: bool) -> None:
    worker = ProgramsOnly("127.0.0.1", None)
    assert takes(worker, {"host": "127.0.0.1:8100", **headers}, method) is allowed


def test_worker_knows_its_machine_name_and_bound_name() -> None:
    browser = {"accept-language": "en"}
    assert takes(ProgramsOnly("0.0.0.0", None), {"host": f"{socket.gethostname()}:8100", **browser})
    assert takes(ProgramsOnly("gpu-1", None), {"host": "gpu-1:8100", **browser})
    assert takes(ProgramsOnly("gpu-1", None), {"host": "10.0.0.1:8100", **browser})


async def rebound(url: str, host: str) -> int:
    """As a page of `host`, whose name leads to `url` now: of one origin for the browser."""
    headers = {"host": host, "origin": f"http://{host}"}
    async with aiohttp.ClientSession() as session, session.post(url + "/drain", headers=headers) as response:
        return response.status
