"""The address of a client behind fronts that the operator trusts.

    client ---- front 1 ---- front 2 ---- gateway       X-Forwarded-For: (the client's own) client, front 1

Each front appends who has connected to it. So the list is read from the right, as long as trusted networks hold the
next hop. The client may have written what is left of the first other address, so that is not read.

A front appends to one of two headers, and passes on the other as the client has sent it. Where both are there and
name different clients, neither is believed: the address is the front's own.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Iterable, Sequence
from ipaddress import IPv4Network, IPv6Network
from typing import Final

from starlette.types import ASGIApp, Receive, Scope, Send

from worker.common.sockets import Address, address_of

Network = IPv4Network | IPv6Network
_FOR: Final = re.compile(r'(?:^|;)\s*for\s*=\s*("(?:[^"\\]|\\.)*"|[^;\s]*)', re.IGNORECASE)
_HOST: Final = re.compile(r"\[([^\]]*)\](?::\d+)?|([^:]*)(?::\d+)?|(.*)")
"""An address in brackets, one with a port, or an IPv6 address."""


def behind_fronts(app: ASGIApp, networks: Sequence[Network]) -> ASGIApp:
    """Put the address of the client into the scope, instead of that of the front."""

    def call(scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        if (peer := scope.get("client")) is not None:
            address = client_address(str(peer[0]), scope["headers"], networks)
            scope = {**scope, "client": (address, 0)}
        return app(scope, receive, send)

    return call


def client_address(peer: str, headers: Iterable[tuple[bytes, bytes]], networks: Sequence[Network]) -> str:
    """Return the address of the client that is behind the connected `peer`."""
    front = _address(peer)
    if front is None or not _is_in(front, networks):
        return peer
    values: dict[bytes, list[str]] = {b"x-forwarded-for": [], b"forwarded": []}
    for name, value in headers:
        if name in values:
            values[name] += value.decode("latin-1").split(",")
    plain, standard = values.values()
    named = [match[1] if (match := _FOR.search(hop)) else "" for hop in standard]
    found = {_first_other(front, hops, networks) for hops in (plain, named) if hops}
    return str(found.pop() if len(found) == 1 else front)


def _first_other(front: Address, hops: Sequence[str], networks: Sequence[Network]) -> Address:
    """Return the first hop from the right that is not trusted, or the last that is."""
    for hop in reversed(hops):
        if not _is_in(front, networks) or (address := _address(hop)) is None:
            break
        front = address
    return front


def _address(text: str) -> Address | None:
    host = _HOST.fullmatch(text.strip().strip('"').strip())
    assert host is not None, "the last form takes any text"
    return address_of(host[1] or host[2] or host[3] or "")


def _is_in(address: Address, networks: Sequence[Network]) -> bool:
    return any(address in network for network in networks)
