"""Addresses of this machine, for others."""

from __future__ import annotations

import socket

import pytest

from worker.common.sockets import reachable


def test_a_name_without_an_address_has_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(name: str) -> str:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "gethostbyname", fails)
    with pytest.raises(OSError, match=r"Name or service not known\): give --advertise-url"):
        reachable("0.0.0.0")
