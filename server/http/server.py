"""A port of the gateway: uvicorn, with our protocol, our limits and TLS."""

from __future__ import annotations

import asyncio
import logging
import resource
import socket
import ssl
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Final

import uvicorn
from starlette.types import ASGIApp

from server.http.connection_limit import ConnectionLimit
from server.http.protocol import protocol_with

log = logging.getLogger(__name__)

SPARE_FILES: Final = 256
"""For what is no client's connection and no worker's."""


MIN_CONNECTIONS: Final = 16
"""A port with fewer would serve hardly anybody, and nobody would know why."""


@dataclass(frozen=True, slots=True)
class HttpLimits:
    max_header_bytes: int
    header_timeout_s: float
    body_timeout_s: float
    max_connections: int
    drain_grace_s: float


class HttpServer(uvicorn.Server):
    """Signals are the gateway's, which has two servers."""

    def __init__(self, app: ASGIApp, limits: HttpLimits, tls: ssl.SSLContext | None = None) -> None:
        self._handshake_timeout_s = limits.header_timeout_s
        connections = ConnectionLimit(limits.max_connections)
        config = uvicorn.Config(
            app,
            http=protocol_with(limits.header_timeout_s, limits.body_timeout_s, connections),
            ws="none",
            loop="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=75,
            h11_max_incomplete_event_size=limits.max_header_bytes,
            timeout_graceful_shutdown=max(1, round(limits.drain_grace_s)),
        )
        config.load()
        config.ssl = tls
        super().__init__(config)

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        return nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """As uvicorn's, with a bound on the handshake: its 60 s would let strangers wait for long."""
        loop = asyncio.get_running_loop()
        config = self.config

        def protocol() -> asyncio.Protocol:
            kind = config.http_protocol_class
            return kind(config=config, server_state=self.server_state, app_state={}, _loop=loop)  # type: ignore[call-arg]

        timeout_s = None if config.ssl is None else self._handshake_timeout_s
        self.servers = [
            await loop.create_server(
                protocol, sock=sock, backlog=config.backlog, ssl=config.ssl, ssl_handshake_timeout=timeout_s
            )
            for sock in sockets or ()
        ]
        self.started = True


def affordable_connections(wanted: int) -> int:
    """As many of `wanted` as this process may have files for: one for the client and one for the worker.

    Raises the soft limit on open files as far as it may. Raises ValueError for a limit that leaves next to none, and
    warns of one that leaves fewer than wanted.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = 2 * wanted + SPARE_FILES
    if soft != resource.RLIM_INFINITY and soft < needed:
        soft = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return wanted
    affordable = (soft - SPARE_FILES) // 2
    if affordable < min(wanted, MIN_CONNECTIONS):
        least = 2 * MIN_CONNECTIONS + SPARE_FILES
        raise ValueError(
            f"this process may open {soft} files, too few for {min(wanted, MIN_CONNECTIONS)} connections: allow "
            f"{least} at least, {needed} for --max-connections {wanted} (ulimit -n, LimitNOFILE=, --ulimit nofile=)"
        )
    log.warning(
        "this process may open %d files, which is enough for %d connections: --max-connections %d needs %d (ulimit -n)",
        soft,
        affordable,
        wanted,
        needed,
    )
    return affordable
