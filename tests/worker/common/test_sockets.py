"""Addresses of this machine, for others."""

from __future__ import annotations

import socket

import pytest

from worker.common.sockets import reachable


def test_a_name_without_an_address_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> list[object]:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", fails)
    with pytest.raises(OSError, match=r"Name or service not known\): give --advertise-url"):
        reachable("0.0.0.0")


def test_a_socket_of_ipv6_alone_has_an_address_of_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    """A socket bound to :: takes no IPv4."""
    addresses = {socket.AF_INET: ("10.0.0.1", 0), socket.AF_INET6: ("fd00::1", 0, 0, 0)}
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port, family: [(0, 0, 0, "", addresses[family])])
    assert (reachable("0.0.0.0"), reachable("::")) == ("10.0.0.1", "[fd00::1]")
