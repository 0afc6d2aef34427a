"""The client's address behind trusted fronts: never one that a client has written itself."""

from __future__ import annotations

import ipaddress
import logging

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.config import parse
from server.http.forwarded import client_address
from tests.server.gateway_app import gateway
from tests.server.scripted_worker import Says
from tests.server.test_app import chat, post

NETWORKS = [ipaddress.ip_network(each) for each in ("10.0.0.0/8", "fd00::/8")]
FRONTS = st.sampled_from(["10.0.0.1", "10.9.9.9", "fd00::7"])
CLIENTS = st.sampled_from(["192.0.2.1", "198.51.100.7", "2001:db8::5"])
FORGED = st.text(st.sampled_from('10.2,;=: "[]for\\x_'), max_size=30) | CLIENTS | FRONTS


def appended(kind: str, address: str, port: int | None) -> str:
    quoted = f"[{address}]" if ":" in address and (port or kind == "forwarded") else address
    text = quoted if port is None else f"{quoted}:{port}"
    return text if kind == "x-forwarded-for" else f'proto=https;for="{text}"'


@settings(max_examples=500, deadline=None)
@given(
    st.sampled_from(["x-forwarded-for", "forwarded"]),
    CLIENTS,
    st.lists(FRONTS, min_size=1, max_size=3),
    st.lists(FORGED, max_size=3),
    st.lists(FORGED, max_size=2),
    st.none() | st.integers(1, 65535),
)
def test_the_address_is_that_of_the_client_or_of_a_front(
    kind: str, client: str, fronts: list[str], forged: list[str], other: list[str], port: int | None
) -> None:
    """The client forges both headers; each front appends to one of them."""
    hops = [*forged, *(appended(kind, each, port) for each in (client, *fronts[:-1]))]
    unused = "forwarded" if kind == "x-forwarded-for" else "x-forwarded-for"
    headers = [(kind.encode(), ", ".join(hops).encode()), *[(unused.encode(), each.encode()) for each in other]]
    found = client_address(fronts[-1], headers, NETWORKS)
    assert found in ((client,) if not other else (client, *fronts))
    assert client_address(client, headers, NETWORKS) == client, "who connects from elsewhere is not believed"


@pytest.mark.parametrize(
    ("header", "value", "expected"),
    [
        ("x-forwarded-for", "192.0.2.1", "192.0.2.1"),
        ("x-forwarded-for", "192.0.2.1:4711", "192.0.2.1"),
        ("x-forwarded-for", "2001:db8::5", "2001:db8::5"),
        ("x-forwarded-for", "[2001:db8::5]:443", "2001:db8::5"),
        ("x-forwarded-for", "::ffff:192.0.2.1", "192.0.2.1"),
        ("x-forwarded-for", "192.0.2.66, 192.0.2.1, 10.1.1.1", "192.0.2.1"),
        ("x-forwarded-for", "192.0.2.1, unknown", "10.0.0.1"),
        ("forwarded", "for=192.0.2.1;by=10.0.0.1", "192.0.2.1"),
        ("forwarded", 'For="[2001:db8::5]:4711"', "2001:db8::5"),
        ("forwarded", "for=_hidden", "10.0.0.1"),
        ("forwarded", "proto=https", "10.0.0.1"),
        ("x-real-ip", "192.0.2.1", "10.0.0.1"),
    ],
)
def test_forms_of_addresses(header: str, value: str, expected: str) -> None:
    assert client_address("10.0.0.1", [(header.encode(), value.encode())], NETWORKS) == expected


async def test_the_log_has_the_clients_address(says: Says, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "server.access")
    forwarded = {"x-forwarded-for": "192.0.2.66, 192.0.2.1"}
    for trusted, expected in (((), "127.0.0.1"), (("127.0.0.0/8",), "192.0.2.1")):
        async with gateway(says("x"), trusted_proxies=trusted, access_log=True) as target:
            assert (await post(target.url, chat(), **forwarded))[0] == 200
        assert f"client={expected} " in caplog.messages[-1]


def test_a_wrong_network_is_named() -> None:
    with pytest.raises(ValueError, match=r"--trusted-proxies takes networks such as 10\.0\.0\.0/8: 'front'"):
        parse(["--trusted-proxies", "10.0.0.0/8,front"])
