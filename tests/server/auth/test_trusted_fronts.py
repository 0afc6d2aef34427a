"""Tenants that a gateway in front names: only its key proves the header, and no form of a forged one is believed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.types import Scope

from server.auth.authentication import TENANT_HEADER, Authenticator
from server.auth.identity import KeyFile, digest_text, parse_keys, tenant_identity
from server.auth.limits import AuthThrottle
from server.config import parse
from server.errors import InvalidRequestError, OverloadedError
from tests.server.auth.test_authentication import bearer, raw
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import ScriptedWorker
from tests.server.test_app import chat, post

FRONT, CLIENT = "key of the front", "key of a client"
TENANTS = ("acme", "client", "front", "other")
KEYS = "\n".join(
    [
        f'[[keys]]\ndigest = "{digest_text(FRONT.encode())}"\ntenant = "front"\nname = "litellm"',
        "trusted_front = true\nrequests_per_minute = 1000\nweight = 2\n",
        f'[[keys]]\ndigest = "{digest_text(CLIENT.encode())}"\ntenant = "client"\n',
        '[[tenants]]\ntenant = "acme"\nrequests_per_minute = 2\nweight = 4\nmodels = ["tiny"]\nmay_prioritise = true\n',
    ]
)


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, Any]:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS)
    return {"api_keys": str(path), "throttle": AuthThrottle(burst=1000)}


def request(key: str, *tenants: bytes) -> Scope:
    headers = [(b"authorization", b"Bearer " + key.encode()), *((TENANT_HEADER.encode(), name) for name in tenants)]
    return {"type": "http", "headers": headers, "client": ("192.0.2.1", 1)}


async def test_a_front_names_tenants_with_their_own_rights(keys: dict[str, Any]) -> None:
    file = KeyFile(Path(keys["api_keys"]), b"secret")
    who = Authenticator(file, tenant_identity(b"secret", "default"))
    scope = request(FRONT, b"acme")
    acme, other = who.authenticate(scope), who.authenticate(request(FRONT, b"other@example.com"))
    assert scope["headers"] == request(FRONT)["headers"], "nothing after it sees the header"
    assert (acme.tenant, acme.key_name, acme.key.weight, acme.key.may_prioritise) == ("acme", "litellm", 4.0, True)
    assert acme.salt == tenant_identity(b"secret", "acme").salt
    assert acme.tag == tenant_identity(b"secret", "acme").tag
    assert (acme.may_use("tiny"), acme.may_use("big")) == (True, False)
    assert (other.tenant, other.key.weight, other.may_use("big")) == ("other@example.com", 2.0, True)
    front, client = who.authenticate(request(FRONT)), who.authenticate(request(CLIENT, b"acme", b"front"))
    assert (front.tenant, client.tenant, client.usage) == ("front", "client", None)
    assert other.usage is front.usage, "tenants without limits of their own share those of the front"
    assert acme.usage is not None
    for _ in range(2):
        await acme.usage.admit()
    with pytest.raises(OverloadedError):
        await who.authenticate(request(FRONT, b"acme")).usage.admit()  # type: ignore[union-attr]
    file.reload()
    with pytest.raises(OverloadedError):
        await who.authenticate(request(FRONT, b"acme")).usage.admit()  # type: ignore[union-attr]
    file.paths[0].write_text(KEYS.partition("[[tenants]]")[0])
    file.reload()
    assert who.authenticate(request(FRONT, b"acme")).usage is front.usage


def test_models_of_a_front_bound_its_tenants(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(KEYS.replace('name = "litellm"', 'models = ["tiny", "small"]'))
    who = Authenticator(KeyFile(path, b""), tenant_identity(b"", "default"))
    found = [who.authenticate(request(FRONT, name)).key.models for name in (b"acme", b"other")]
    assert found == [frozenset({"tiny"}), frozenset({"tiny", "small"})]
    path.write_text(KEYS.replace('name = "litellm"', 'models = ["small"]'))
    who = Authenticator(KeyFile(path, b""), tenant_identity(b"", "default"))
    assert who.authenticate(request(FRONT, b"acme")).key.models == frozenset()


@pytest.mark.parametrize("names", [[b""], [b"a", b"a"], [b"a", b"b"], [b"a,b"], [b"\xff"], [b"a\n"], [b"x" * 65]])
def test_a_header_that_is_not_one_name_is_refused(keys: dict[str, Any], names: list[bytes]) -> None:
    who = Authenticator(KeyFile(Path(keys["api_keys"]), b""), tenant_identity(b"", "default"))
    with pytest.raises(InvalidRequestError, match="once, with one name"):
        who.authenticate(request(FRONT, *names))
    assert who.authenticate(request(CLIENT, *names)).tenant == "client"


def test_without_keys_no_header_names_a_tenant() -> None:
    assert Authenticator(None, tenant_identity(b"", "default")).authenticate(request("x", b"acme")).tenant == "default"


def test_bad_tables_and_header_names_are_refused() -> None:
    for extra in ('[[tenants]]\ntenant = "acme"', "[[tenants]]\nweight = 1", '[[tenants]]\ntenant = "b"\ndigest = "x"'):
        with pytest.raises(ValueError, match=r"tenant|digest"):
            parse_keys(KEYS + extra)
    for name in (
        "authorization",
        "x-api-key",
        "X-API-Key",
        "",
        "x-a b",
        "host",
        "x-request-id",
        "x-forwarded-for",
        "x-headstart-session",
    ):
        with pytest.raises(ValueError, match="--tenant-header"):
            parse(["--workers", "http://127.0.0.1:1", "--tenant-header", name])


def _forged(rng: random.Random, header: str) -> tuple[bytes, list[str] | None]:
    """Return header lines, and the tenants that they name; None: the head is malformed."""
    name, victim = rng.choice([header, header.upper(), header.title()]), rng.choice(TENANTS)
    one = f"{name}: {victim}\r\n"
    forms: list[tuple[str, list[str] | None]] = [
        (one, [victim]),
        (f"Connection: {name}\r\n{one}", [victim]),
        (f"{one}{name.swapcase()}: {victim}\r\n", [victim, victim]),
        (f"{one}{name}: third\r\n{one}", [victim, "third", victim]),
        (f"{name}:\r\n{one}", ["", victim]),
        (f"{name}: {victim}, acme\r\n", [f"{victim}, acme"]),
        (f"{name}: {victim};acme\r\n", [f"{victim};acme"]),
        (f"{name.replace('-', '_')}: {victim}\r\n", []),
        (f"x-tenant: {victim}\r\nx-forwarded-{header}: {victim}\r\nforwarded: tenant={victim}\r\n", []),
        (f"x-other: a\t{name}: {victim}\r\n", []),
        (f"{name} : {victim}\r\n", None),
        (f"{name}: third\r\n {victim}\r\n", None),
    ]
    lines, named = rng.choice(forms)
    return lines.encode(), named


@pytest.fixture
def generous(keys: dict[str, Any]) -> dict[str, Any]:
    """The options with limits that 500 requests in turn do not reach."""
    Path(keys["api_keys"]).write_text(KEYS.replace("requests_per_minute", "max_streams"))
    return keys


async def test_500_forged_headers_are_not_believed(worker: ScriptedWorker, generous: dict[str, Any]) -> None:
    """With and without the proof, in the head, in trailers and in the query: at most one plain header counts."""
    rng = random.Random(7)
    body = msgspec.json.encode(chat(user="acme", metadata={TENANT_HEADER: "acme"}))
    async with gateway(worker, **generous) as target:
        for tenant in TENANTS:
            assert (await post(target.url, chat(), **bearer(FRONT), **{TENANT_HEADER: tenant}))[0] == 200
        roots = dict(zip(TENANTS, (received.root for received in worker.received), strict=True))
        assert len(set(roots.values())) == len(TENANTS)
        for number in range(500):
            lines, named = _forged(rng, TENANT_HEADER)
            key = rng.choice([CLIENT, FRONT, FRONT, "wrong", ""])
            head = f"POST /v1/chat/completions?{TENANT_HEADER}=acme HTTP/1.1\r\nHost: h\r\nConnection: close\r\n"
            head += f"Content-Type: application/json\r\nAuthorization: Bearer {key}\r\n"
            if rng.random() < 0.2:  # in trailers, which name no tenant
                chunked = b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n%b\r\n" % (len(body), body, lines)
                named, sent = named and [], head.encode() + chunked
            else:
                sent = head.encode() + lines + b"Content-Length: %d\r\n\r\n%b" % (len(body), body)
            worker.received.clear()
            status, answer = await raw(target.url, sent)
            expected: tuple[int, set[bytes]] = (400, set())
            if named is not None and key not in (CLIENT, FRONT):
                expected = (401, set())
            elif named is not None and key == CLIENT:
                expected = (200, {roots["client"]})
            elif named is not None and not named:
                expected = (200, {roots["front"]})
            elif named is not None and len(named) == 1 and named[0] in roots:
                expected = (200, {roots[named[0]]})
            found = {received.root for received in worker.received}
            assert (status, found) == expected, (number, key, lines, sent, answer[:300])
