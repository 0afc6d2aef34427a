"""The targets of `--workers`: base URLs, and dns:NAME:PORT for every address of a name."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Final

from server.workers.networks import is_worker_url, resolve

logger = logging.getLogger(__name__)

_DNS: Final = "dns:"


def check_target(target: str) -> None:
    """Raises ValueError."""
    if target.startswith(_DNS):
        name, _, port = target.removeprefix(_DNS).rpartition(":")
        if not is_worker_url(f"http://{name}:{port}"):
            raise ValueError(f"--workers {target!r}: use dns:NAME:PORT")
        return
    if not is_worker_url(target):
        raise ValueError(f"--workers {target!r}: use http://HOST:PORT or dns:NAME:PORT")


async def urls_of(targets: Iterable[str], scheme: str) -> list[str]:
    """Where the targets are now; `scheme` is that of addresses found by name."""
    urls: list[str] = []
    for target in targets:
        if target.startswith(_DNS):
            urls.extend(await _resolve(target.removeprefix(_DNS), scheme))
        else:
            urls.append(target.rstrip("/"))
    return urls


async def _resolve(name_and_port: str, scheme: str) -> list[str]:
    name, _, port = name_and_port.rpartition(":")
    try:
        found = await resolve(name, int(port))
    except OSError as error:
        logger.debug("%s does not resolve: %s", name, error)
        return []
    hosts = sorted({str(address[4][0]) for address in found})
    return [f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}" for host in hosts]
