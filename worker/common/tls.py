"""TLS contexts, and other contents of files that are read again when the files change, without a restart."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from worker.common.command_line import reason

log = logging.getLogger(__name__)


class WatchedFiles:
    """Files whose contents are in use. One task calls `follow`."""

    interval_s: ClassVar[float] = 5.0

    def __init__(self, paths: Iterable[str | Path]) -> None:
        self.paths = tuple(Path(path) for path in paths)
        self._seen = self._stamp()

    async def follow(self) -> None:
        """Read the files again whenever they change, until cancelled."""
        while True:
            await asyncio.sleep(self.interval_s)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        stamp = self._stamp()
        if stamp != self._seen:
            self._seen = stamp
            self.reload()

    def reload(self) -> None:
        """Read the files. Files that cannot be used change nothing, and are logged."""
        raise NotImplementedError

    def _stamp(self) -> list[tuple[int, ...]]:
        """Return numbers that change with the contents. Kubernetes puts a new file behind a link: a new inode."""
        stamps: list[tuple[int, ...]] = []
        for path in self.paths:
            try:
                status = os.stat(path)
                stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
            except OSError:
                stamps.append(())
        return stamps


class TlsFiles(WatchedFiles):
    """A context made of files. Open connections keep what they began with."""

    def __init__(
        self, option: str, context: ssl.SSLContext, load: Callable[[ssl.SSLContext], None], *paths: str
    ) -> None:
        """`load` reads the files into a context; `option` names them in messages. Raises ValueError."""
        super().__init__(paths)
        self._option = option
        self._load = load
        self.context = context
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            load(context)
        except OSError as error:  # ssl.SSLError is one
            hint = ": PEM files that fit each other are needed" if isinstance(error, ssl.SSLError) else ""
            raise ValueError(f"{option} {', '.join(paths)}: {reason(error)}{hint}") from None

    def reload(self) -> None:
        try:
            self._load(ssl.SSLContext(self.context.protocol))  # half a pair must not get into the one in use
            self._load(self.context)
        except OSError as error:
            log.error("%s was NOT reloaded, what was read before still counts: %s", self._option, error)
            return
        log.info("%s was reloaded", self._option)


def client_context(option: str, ca: str | Path | None) -> ssl.SSLContext:
    """Return a client's context with this CA, None: the system's. Raises ValueError that names option and file."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise ValueError(f"{option} {ca}: {reason(error)}") from None


def certificate_files(cert: str, key: str) -> TlsFiles:
    """Return a server's certificate: a PEM file with the chain to the CA, and one with its key. Raises ValueError."""

    def refuse() -> str:  # without it, OpenSSL would ask at the terminal, and wait
        raise OSError("the key has a passphrase, which cannot be asked for: remove it with `openssl pkey`")

    load = partial(ssl.SSLContext.load_cert_chain, certfile=cert, keyfile=key, password=refuse)
    return TlsFiles("--tls-cert, --tls-key", ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), load, cert, key)


def ca_files(ca: str, name: str | None = None) -> TlsFiles:
    """Return the CA that signs workers' certificates. One removed from the file stays trusted until the next start.

    `name`: the name in a worker's certificate, when that is not its address. Raises ValueError.
    """
    context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.peer = {} if name is None else {"server_hostname": name}
    return TlsFiles("--worker-ca", context, lambda each: each.load_verify_locations(ca), ca)


class _NamedContext(ssl.SSLContext):
    """Checks a peer's certificate for one name, whatever address was dialled."""

    peer: Mapping[str, str] = {}
    """The name as an option of a handshake; empty: the address has to be in the certificate."""

    def wrap_bio(self, *args: Any, **options: Any) -> ssl.SSLObject:
        return super().wrap_bio(*args, **{**options, **self.peer})

    def wrap_socket(self, *args: Any, **options: Any) -> ssl.SSLSocket:
        return super().wrap_socket(*args, **{**options, **self.peer})
