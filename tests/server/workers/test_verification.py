"""Gateway and worker trust each other by the cluster secret, and the gateway dials workers' networks only."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace

import aiohttp
import pytest
from msgspec.structs import replace as replace_field

from cache.records import WorkerLoad, WorkerMember, WorkerState, signature, signed
from cache.types import Epoch, WorkerId
from server.workers.client import WorkerClient
from server.workers.connection import WorkerElsewhere, WorkerLost
from server.workers.fleet import Fleet, NoIndex
from server.workers.networks import WorkerNetworks
from tests.e2e.serving import resolves
from tests.running import listening
from tests.worker.live_worker import serve
from tests.worker_tokens import headers_at
from worker.common.proof import Proof, epoch_token, gateway_token, instance_token, new_challenge, new_instance, verifies
from worker.contracts.metrics import WorkerMetrics
from worker.http.app import make_app
from worker.http.service import WorkerService
from worker.wire import PROTOCOL_VERSION, unpack

MEMBER = WorkerMember(WorkerId("w"), Epoch("e"), "http://127.0.0.1:9", "m", "ns", "cpu", 16, 512, PROTOCOL_VERSION)
ROUTES = ("/generate", "/abort", "/state", "/bundle", "/drain", "/purge", "/debug/state", "/nowhere")


def test_a_signature_binds_what_a_gateway_acts_on() -> None:
    mine = signed(b"secret", MEMBER)
    assert mine.secret_check == signature(b"secret", MEMBER) != ""
    assert signature(b"", MEMBER) == ""
    assert signature(b"other", MEMBER) != mine.secret_check
    for changes in (
        {"url": "http://127.0.0.1:10"},
        {"worker_id": "v"},
        {"model": "n"},
        {"namespace": "x"},
        {"numerics": "cuda"},
        {"block_size": 8},
    ):
        assert signature(b"secret", replace(MEMBER, **changes)) != mine.secret_check
    assert signature(b"secret", replace(MEMBER, epoch=Epoch("later"))) == mine.secret_check


@pytest.mark.parametrize(
    ("member", "accepted"),
    [
        (signed(b"secret", MEMBER), True),
        (MEMBER, False),
        (signed(b"other", MEMBER), False),
        (replace(signed(b"secret", MEMBER), url="http://127.0.0.1:10"), False),
        (signed(b"secret", replace(MEMBER, url="http://169.254.169.254")), False),
        (signed(b"secret", replace(MEMBER, url="http://u@127.0.0.1")), False),
        (signed(b"secret", replace(MEMBER, url="http://127.0.0.1/x")), False),
    ],
)
async def test_the_fleet_takes_signed_workers_only(
    member: WorkerMember, accepted: bool, caplog: pytest.LogCaptureFixture
) -> None:
    asked: list[str] = []

    async def fetch(url: str) -> WorkerState:
        asked.append(url)
        return WorkerState(member, WorkerLoad())

    index = NoIndex()
    index.members = lambda: [member]  # type: ignore[method-assign]
    fleet = Fleet(index, fetch, cluster_secret=b"secret", clock=lambda: 1.0)
    await fleet.poll()
    assert asked == [member.url] * accepted
    assert bool(fleet.workers()) == accepted
    assert ("is refused" in caplog.text) != accepted


@pytest.mark.parametrize(
    ("address", "allowed"),
    [
        ("127.0.0.1", True),
        ("10.1.2.3", True),
        ("192.168.0.9", True),
        ("::1", True),
        ("fd00::5", True),
        ("::ffff:10.0.0.1", True),
        ("169.254.169.254", False),
        ("100.100.100.200", False),
        ("8.8.8.8", False),
        ("0.0.0.0", False),
        ("fe80::1", False),
        ("::ffff:8.8.8.8", False),
        ("2001:db8::1", False),
    ],
)
def test_the_default_networks(address: str, allowed: bool) -> None:
    assert WorkerNetworks().allows(address) == allowed


def test_a_bad_network_is_named() -> None:
    with pytest.raises(ValueError, match="--worker-networks"):
        WorkerNetworks(["10.0.0.1/8"])


async def test_no_other_network_is_dialled(monkeypatch: pytest.MonkeyPatch) -> None:
    networks = WorkerNetworks(["10.0.0.0/8"])
    with closing(WorkerClient("", networks)) as client:
        for host in filter(resolves, ("127.0.0.1", "localhost")):
            with pytest.raises(WorkerLost, match="--worker-networks"):
                await client.send(f"http://{host}:9", b"POST /generate", b"")
            with pytest.raises(WorkerLost, match="--worker-networks"):
                await client.bundle(f"http://{host}:9")


async def test_a_worker_answers_who_shows_its_token() -> None:
    token = gateway_token(b"secret")
    assert token not in ("", gateway_token(b"other"))
    service = WorkerService(WorkerMetrics())
    async with serve(service, make_app(service, token)) as url, aiohttp.ClientSession() as http:
        for path in ROUTES:
            for shown in (
                None,
                "",
                "Bearer",
                "Bearer ",
                f"Bearer {token}",
                f"Basic {token}",
                token,
            ):
                headers = {} if shown is None else {"authorization": shown}
                async with http.post(url + path, headers=headers) as answer:
                    assert answer.status == 401, (path, shown)
        assert not service.draining
        for path in ("/health/live", "/health/ready", "/metrics"):
            async with http.get(url + path) as answer:
                assert answer.status != 401
        with closing(WorkerClient(token)) as client:
            assert await client.is_alive(url)
            with pytest.raises(WorkerLost, match="503"):
                await client.bundle(url)


async def test_the_token_of_an_instance_opens_no_other() -> None:
    token, instance = gateway_token(b"secret"), new_instance()
    service = WorkerService(WorkerMetrics())
    async with (
        serve(service, make_app(service, token, url="http://127.0.0.1:9")) as url,
        aiohttp.ClientSession() as http,
    ):
        challenge = new_challenge()
        async with http.post(url + "/prove", data=challenge) as answer:
            proof = unpack(await answer.read(), Proof)
        assert verifies(proof, token, challenge)
        assert not verifies(proof, token, new_challenge())
        assert not verifies(proof, gateway_token(b"other"), challenge)
        assert not verifies(replace_field(proof, url="http://127.0.0.1:10"), token, challenge)
        for shown, status in (
            (instance_token(token, proof.instance), 200),
            (instance_token(token, instance), 401),
            (epoch_token(token, "e1"), 401),
            (proof.mac.hex(), 401),
        ):
            headers = {"authorization": f"Bearer {shown}"}
            async with http.post(url + "/drain", headers=headers) as answer:
                assert answer.status == status
            async with http.post(url + "/drain", headers=headers | {"x-headstart-epoch": "e1"}) as answer:
                assert answer.status == 401
        for path in ROUTES:
            async with http.post(url + path, headers=await headers_at(b"secret", http, url)) as answer:
                assert answer.status != 401
        for wrong in (b"", challenge + b"x", challenge * 1000):
            async with http.post(url + "/prove", data=wrong) as answer:
                assert answer.status in (400, 413)


async def test_a_worker_under_another_name_is_asked_at_its_own_url() -> None:
    token = gateway_token(b"secret")
    service = WorkerService(WorkerMetrics())
    with closing(WorkerClient(token)) as client:
        async with serve(service, make_app(service, token, url="http://127.0.0.1:1")) as url:
            with pytest.raises(WorkerElsewhere):
                await client.bundle(url)
            with pytest.raises(WorkerLost, match=r"127\.0\.0\.1:1: Connect"):
                await client.state(url)


async def test_redirects_are_not_followed() -> None:
    asked: list[bytes] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(b"HTTP/1.1 302 Found\r\nlocation: /elsewhere\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    with closing(WorkerClient("token")) as client:
        async with listening(answer) as port:
            with pytest.raises(WorkerLost, match="302"):
                await client.bundle(f"http://127.0.0.1:{port}")
    assert len(asked) == 1
