"""The names that a port answers to.

A page of another site can let its own name lead to this machine (DNS rebinding). Its requests are then of one origin
for the browser, but carry that name as their Host. An address needs no name service, so that addresses are no way in.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from server.errors import ForbiddenError
from server.http.middleware import send_error


class KnownHostsMiddleware:
    """Answers 403 to a Host that is neither `localhost`, nor one of `names`, nor an address that the port is bound to.

    A port that is bound to every address cannot tell which are its own: it takes any address, but no other name.
    """

    def __init__(self, app: ASGIApp, bound: str, names: Iterable[str], option: str) -> None:
        """`bound`: the listening socket's address. `option` tells the port further names."""
        self._app = app
        self._bound = ipaddress.ip_address(bound)
        self._names = {"localhost"} | {name.lower().rstrip(".") for name in names}
        self._option = option

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host = Headers(scope=scope).get("host") if scope["type"] == "http" else None
        if host is None or self._knows(host):  # HTTP/1.0 may name none, but no browser speaks it
            await self._app(scope, receive, send)
            return
        message = (
            f"This port does not answer to the Host {host!r:.300}: start the gateway with {self._option} to allow it."
        )
        await send_error(ForbiddenError(message, code="unknown_host"), send)

    def _knows(self, host: str) -> bool:
        name = host_name(host)
        if name in self._names:
            return True
        try:
            address = ipaddress.ip_address(name)
        except ValueError:
            return False
        is_local = address.is_loopback and self._bound.is_loopback
        return is_local or self._bound.is_unspecified or address == self._bound


def host_name(host: str) -> str:
    """A Host header without its port, in lower case."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower().rstrip(".")
