"""The socket that a worker listens on, and the address under which others reach it."""

from __future__ import annotations

import socket
from typing import Final

_BACKLOG: Final = 2048


def listen(host: str, port: int) -> socket.socket:
    """Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((host, port))
    _keep_alive(sock)
    sock.listen(_BACKLOG)
    return sock


def reachable(host: str) -> str:
    """An address of this machine that others can use, when the worker listens on all."""
    if host in ("0.0.0.0", "::", ""):
        host = socket.gethostbyname(socket.gethostname())
    return f"[{host}]" if ":" in host else host


def _keep_alive(sock: socket.socket) -> None:
    """Connections accepted here are probed when idle: a gateway whose machine is gone frees its requests."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 5), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
