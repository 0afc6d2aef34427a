"""The networks of workers, and the verification of registrations. The gateway dials no other address.

Without this check, anyone who can write to Redis could have prompts sent anywhere. It applies to the dialled address,
so a name that changes its address does not evade it. Link-local addresses (a cloud's metadata service) are not allowed
by default.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import ipaddress
import logging
import re
import socket
from collections.abc import Container, Iterable
from typing import Any, Final
from urllib.parse import urlsplit

from cache.records import WorkerMember, signature
from cache.types import WorkerId
from worker.common.sockets import address_of, in_url
from worker.wire import OLDEST_PROTOCOL, PROTOCOL_VERSION, shared_protocol

logger = logging.getLogger(__name__)

DEFAULT_NETWORKS: Final = ("127.0.0.0/8", "::1/128", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7")
MAX_VERIFIED: Final = 50_000  # bounds the memory for forged addresses
MAX_WARNINGS: Final = 500  # bounds the memory for forged addresses
_DNS: Final = "dns:"
_NO_ADDRESS: Final = frozenset({socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME)})
_NAME: Final = r"[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*\.?"
_URL: Final = re.compile(rf"https?://(?:\[(?P<ipv6>[0-9A-Fa-f:.]+)\]|{_NAME})(?::(?P<port>[0-9]{{1,5}}))?/?")

AddressInfo = tuple[Any, Any, int, str, tuple[Any, ...]]


class WorkerNetworks:
    """The networks in which workers may be. Immutable."""

    def __init__(self, networks: Iterable[str] = DEFAULT_NETWORKS, *, tls_only: bool = False) -> None:
        """`tls_only` refuses workers without TLS. Raises ValueError for an invalid network."""
        self.scheme = "https" if tls_only else "http"
        """For workers that are given only by a name or an address."""
        self._tls_only = tls_only
        try:
            self._networks = [ipaddress.ip_network(text.strip()) for text in networks]
        except ValueError as error:
            raise ValueError(f"--worker-networks: {error}") from None

    def allows(self, address: str) -> bool:
        ip = address_of(address)
        return ip is not None and any(ip in network for network in self._networks)

    def reject_reason(self, url: str) -> str | None:
        """Return why a worker's URL must not be used, or None. Does not resolve names."""
        if not is_worker_url(url):
            return "its URL is not http://HOST:PORT or https://HOST:PORT"
        if self._tls_only and not url.startswith("https:"):
            return "it does not speak TLS, and --worker-ca asks for it"
        host = urlsplit(url).hostname or ""
        is_outside = address_of(host) is not None and not self.allows(host)
        return f"{host} is outside of --worker-networks" if is_outside else None

    async def addresses(self, host: str, port: int) -> list[AddressInfo]:
        """Return the addresses that may be dialled for a host. Raises OSError, PermissionError when there is none."""
        allowed = [info for info in await resolve(host, port) if self.allows(str(info[4][0]))]
        if not allowed:
            raise PermissionError(errno.EACCES, f"{host} is outside of --worker-networks")
        return allowed


class MemberVerifier:
    """Verifies members by protocol, address and signature. Owned by the gateway's event loop."""

    def __init__(self, cluster_secret: bytes, networks: WorkerNetworks) -> None:
        self._cluster_secret = cluster_secret
        self._networks = networks
        self._warned: set[tuple[str, str, str]] = set()
        self._verified: dict[WorkerId, WorkerMember] = {}
        """Members, by identity, that passed `_reject_reason`: they are checked at every decision."""
        self.refused: dict[WorkerId, tuple[WorkerMember, str]] = {}
        """Members that did not, each with the reason."""

    def keep_refused(self, worker_ids: Container[WorkerId], urls: Container[str]) -> None:
        """Forget refused members that are neither of these workers nor at these URLs."""
        refused = self.refused.items()
        self.refused = {name: each for name, each in refused if name in worker_ids or each[0].url in urls}

    def accepts(self, member: WorkerMember) -> bool:
        """Return whether to use the worker; log each reason against it once."""
        if self._verified.get(member.worker_id) is member:
            return True
        reason = self._reject_reason(member)
        if reason is None:
            self.refused.pop(member.worker_id, None)
            return True
        if len(self.refused) < MAX_WARNINGS:
            self.refused[member.worker_id] = member, reason
        warning = (member.worker_id, member.epoch, reason)
        if warning not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(warning)
            logger.error("worker %s at %s is refused: %s", member.worker_id, member.url, reason)
        return False

    def _reject_reason(self, member: WorkerMember) -> str | None:
        """Return why the member's protocol, signature or address is wrong, or None."""
        if shared_protocol(member) is None:
            return f"it speaks protocol {member.protocol}, this gateway {OLDEST_PROTOCOL} to {PROTOCOL_VERSION}"
        if not hmac.compare_digest(member.secret_check.encode(), signature(self._cluster_secret, member).encode()):
            return "its registration is not signed with this gateway's cluster secret"
        reject_reason = self._networks.reject_reason(member.url)
        if reject_reason is None:
            if len(self._verified) > MAX_VERIFIED:
                self._verified.clear()
            self._verified[member.worker_id] = member
        return reject_reason


async def resolve(host: str, port: int) -> list[AddressInfo]:
    """Return the addresses of a name. Raises OSError, also for an invalid name."""
    try:
        return list(await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM))
    except (UnicodeError, ValueError, OverflowError) as error:
        raise OSError(errno.EINVAL, f"{host!r:.80}:{port} is no address: {error}") from error


def is_worker_url(url: str) -> bool:
    """Return whether a URL is http[s]://HOST[:PORT] with a name and a port that sockets accept. Never raises."""
    match = _URL.fullmatch(url)
    if match is None or not 0 < int(match["port"] or 80) < 65536:
        return False
    ipv6 = match["ipv6"]
    return ipv6 is None or (":" in ipv6 and address_of(ipv6) is not None)


def check_target(target: str) -> None:
    """Check one value of `--workers`: a base URL, or dns:NAME:PORT. Raises ValueError."""
    if target.startswith(_DNS):
        name, _, port = target.removeprefix(_DNS).rpartition(":")
        if not is_worker_url(f"http://{name}:{port}"):
            raise ValueError(f"--workers {target!r}: use dns:NAME:PORT")
    elif not is_worker_url(target):
        raise ValueError(f"--workers {target!r}: use http://HOST:PORT or dns:NAME:PORT")


async def target_urls(targets: Iterable[str], scheme: str) -> list[str]:
    """Return the URLs of all targets, one for every address of a name, or the name's if the resolver fails.

    `scheme` is that of named ones.
    """
    urls: list[str] = []
    for target in targets:
        if target.startswith(_DNS):
            name, _, port = target.removeprefix(_DNS).rpartition(":")
            try:
                found = await resolve(name, int(port))
            except OSError as error:
                logger.debug("%s does not resolve: %s", name, error)
                if error.errno not in _NO_ADDRESS:  # the resolver has failed, so a worker may be there
                    urls.append(f"{scheme}://{name}:{port}")
                continue
            hosts = sorted({str(address[4][0]) for address in found})
            urls += [f"{scheme}://{in_url(host)}:{port}" for host in hosts]
        else:
            urls.append(target.rstrip("/"))
    return urls
