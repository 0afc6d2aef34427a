"""A listener of the gateway: uvicorn on one socket, with our protocol, our limits and TLS."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from server.event_loop import ByteCollector
from server.http.protocol import GatewayProtocol, HttpLimits
from worker.common.connection_limit import ConnectionLimit
from worker.common.listener import Listener
from worker.common.sockets import allow_files, in_url

log = logging.getLogger(__name__)

SPARE_FILES: Final = 256
"""Files that are neither a client's connection nor a worker's."""
MIN_CONNECTIONS: Final = 16
"""A port with fewer connections would refuse most clients without a visible reason."""


class GatewayListener(Listener):
    """One of the gateway's two ports."""

    def __init__(
        self, app: ASGIApp, sock: socket.socket, limits: HttpLimits, tls: ssl.SSLContext | None = None
    ) -> None:
        self._socket = sock
        self._limits = limits
        self._collector = ByteCollector()
        config = uvicorn.Config(
            app,
            interface="asgi3",
            http=GatewayProtocol,
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=max(1, round(limits.keep_alive_s)),
            timeout_graceful_shutdown=max(1, round(limits.drain_grace_s)),
        )
        config.load()
        config.ssl = tls
        super().__init__(config, ConnectionLimit(limits.max_connections), limits.header_timeout_s)

    @property
    def address(self) -> str:
        host, port = self._socket.getsockname()[:2]
        return f"{in_url(host)}:{port}"

    def announce_end(self) -> None:
        """Go on, but end each connection with its next answer."""
        self.limit.keeps_alive = False

    async def run_until_stopped(self) -> None:
        """Serve until `stop`. Return when the last open request has ended, or the grace is over."""
        await self.serve([self._socket])

    def connection(self) -> GatewayProtocol:
        shared = self._limits, self.limit, self._collector
        return GatewayProtocol(*shared, self.config, self.server_state, {}, asyncio.get_running_loop())


def affordable_connections(wanted: int) -> int:
    """Return how many of `wanted` connections fit the limit of open files: each needs one to a client, one to a worker.

    Raises the soft limit if it has to. Raises ValueError if the hard limit leaves hardly any connections, and warns if
    it leaves fewer than wanted.
    """
    needed = 2 * wanted + SPARE_FILES
    if (allowed := allow_files(needed)) == needed:
        return wanted
    affordable = (allowed - SPARE_FILES) // 2
    if affordable < min(wanted, MIN_CONNECTIONS):
        least = 2 * MIN_CONNECTIONS + SPARE_FILES
        raise ValueError(
            f"this process may open {allowed} files, too few for {min(wanted, MIN_CONNECTIONS)} connections: allow "
            f"{least} at least, {needed} for --max-connections {wanted} (ulimit -n, LimitNOFILE=, --ulimit nofile=)"
        )
    text = "this process may open %d files, enough for %d connections: --max-connections %d needs %d (ulimit -n)"
    log.warning(text, allowed, affordable, wanted, needed)
    return affordable
