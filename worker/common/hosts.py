"""Who may speak to a worker that asks for no token: programs, never a page in somebody's browser.

Browsers send `Origin` with every request that changes something, `Sec-Fetch-Site` where they can, and `Accept-Language`
always; no gateway of any version does. A page whose own name leads to this machine (DNS rebinding) reads with the last
of them alone, but under a Host that is not ours. Gateways may know a worker by any name: their Hosts are not looked at.
"""

from __future__ import annotations

import ipaddress
import socket
from typing import Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from worker.wire import CONTENT_TYPE, Failed, pack_frame

_ADVICE: Final = "start the worker with --advertise-url to name it, or give the fleet a cluster secret"
_BROWSERS_OWN: Final = frozenset({"accept-language", "referer"})


class ProgramsOnly:
    """Answers 403 to pages, and to browsers under a Host that the worker was neither bound to nor told.

    Known are `localhost`, this machine's name, `bound` and the host of `advertise_url`; and every address where `bound`
    is all of them, for an address needs no name service.
    """

    def __init__(self, app: ASGIApp, bound: str, advertise_url: str | None) -> None:
        """`bound`: what --host says."""
        self._app = app
        self._names = {"localhost", socket.gethostname().lower(), bound.lower()}
        if advertise_url is not None and (told := urlsplit(advertise_url).hostname):
            self._names.add(told)
        self._bound = _address(bound)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        problem = self._problem(Headers(scope=scope)) if scope["type"] == "http" else None
        if problem is None:
            await self._app(scope, receive, send)
            return
        await Response(pack_frame(Failed("forbidden", problem, retryable=True)), 403, media_type=CONTENT_TYPE)(
            scope, receive, send
        )

    def _problem(self, headers: Headers) -> str | None:
        if "origin" in headers or headers.get("sec-fetch-site", "none") != "none":
            return "a worker does not speak to pages"
        host = headers.get("host")
        if host is None or not _BROWSERS_OWN.intersection(headers.keys()):
            return None
        name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
        if name.lower().rstrip(".") in self._names or self._is_own(_address(name)):
            return None
        return f"this worker does not answer to the Host {host!r:.300}: {_ADVICE}"

    def _is_own(self, address: ipaddress.IPv4Address | ipaddress.IPv6Address | None) -> bool:
        if address is None:
            return False
        if self._bound is None:  # bound to a name, which may stand for any address of this machine
            return True
        return self._bound.is_unspecified or address == self._bound or (address.is_loopback and self._bound.is_loopback)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None
