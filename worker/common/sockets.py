"""Listening sockets, the files and addresses that they need, and the Host headers that they answer to."""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket
from collections.abc import Iterable
from typing import Final

from worker.common.command_line import reason

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
ANY_HOSTS: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # every address, and where this machine reaches it
_BACKLOG: Final = 2048  # a burst of new connections waits; the kernel may allow fewer


def listen(
    host: str, port: int, option: str = "--port", *, share: bool = False, probe_s: tuple[int, int] = (30, 10)
) -> socket.socket:
    """Bind and listen. Raises OSError that names the address and the `option`.

    With `share`, other sockets that share may listen on the same port: the kernel spreads connections over them.
    Accepted connections have the options that are set here. They are probed when idle, so that a peer whose machine is
    gone is noticed. They hold no small packet back (TCP_NODELAY): asyncio would, for a socket that it has not made.
    """
    try:
        family = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0][0]
        sock = socket.create_server((host, port), family=family, backlog=_BACKLOG, reuse_port=share)
    except OSError as error:
        is_port = error.errno in (errno.EADDRINUSE, errno.EACCES)
        own_host = f"an address of this machine as {option.replace('port', 'host')}"
        choose = f"another {option}; 0 is any free one" if is_port else own_host
        why = reason(error).partition(" (while")[0]
        raise OSError(f"cannot listen on {host}:{port}: {why}. Choose {choose}") from error
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in zip(("TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_KEEPCNT"), (*probe_s, 3), strict=True):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return sock


def allow_files(wanted: int) -> int:
    """Raise the soft limit on open files to `wanted`, or to the hard limit. Return how many of `wanted` are allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    allowed = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))
    return allowed


def in_url(host: str) -> str:
    """Return a host as URLs have it: an address of IPv6 in brackets."""
    return f"[{host}]" if ":" in host else host


def reachable(host: str) -> str:
    """Return an address of this machine that others can use, also for a socket bound to every address."""
    if host in ANY_HOSTS or not host:
        try:
            family = socket.AF_INET6 if host == "::" else socket.AF_INET
            host = str(socket.getaddrinfo(socket.gethostname(), None, family)[0][4][0])
        except OSError as error:
            raise OSError(f"the name of this machine has no address ({error}): give --advertise-url") from None
    return in_url(host)


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach a socket bound to `host`."""
    address = address_of(host)
    return host == "localhost" if address is None else address.is_loopback


class HostNames:
    """The Host headers that a port answers to: `localhost`, its names, and addresses that it is bound to.

    The name of another site can be made to resolve to this machine (DNS rebinding): its pages then send that name as
    Host. An address needs no name service, so a port bound to every address takes any address.
    """

    def __init__(self, bound: str, names: Iterable[str]) -> None:
        """`bound` is the address, or the name, that the port is bound to."""
        self._bound = address_of(bound)
        self._names = {"localhost"} | {name.lower().rstrip(".") for name in names}

    def __contains__(self, host: str) -> bool:
        """Return whether the port answers to this Host header, with or without a port."""
        name = (host[1:].partition("]")[0] if host[:1] == "[" else host.partition(":")[0]).lower().rstrip(".")
        if name in self._names:
            return True
        address, bound = address_of(name), self._bound
        if address is None:
            return False
        if bound is None or bound.is_unspecified:  # a name may stand for any address of this machine
            return True
        return address == bound or (address.is_loopback and bound.is_loopback)


def address_of(text: str) -> Address | None:
    """Return the address that a text is, without a zone; one of IPv4 also where it is written as one of IPv6."""
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return getattr(address, "ipv4_mapped", None) or address
