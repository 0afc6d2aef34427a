"""TLS of a gateway: the certificate that it shows, and the one that workers must show.

Both are read anew when their files change, without a restart; open connections keep what they began with.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import Any, Final

from server.file_stamp import stamp

log = logging.getLogger(__name__)

RELOAD_INTERVAL_S: Final = 5.0


class TlsFiles:
    """A context made of files. One task calls `follow`."""

    def __init__(self, what: str, *paths: str) -> None:
        """`what` names the option in what is logged and raised. Raises ValueError."""
        self._what = what
        self._paths = [Path(path) for path in paths]
        self._seen = stamp(self._paths)
        self.context = self._checked()

    def _read_into(self, context: ssl.SSLContext) -> None:
        """Raises OSError, which ssl.SSLError is."""
        raise NotImplementedError

    def _new_context(self) -> ssl.SSLContext:
        raise NotImplementedError

    def _checked(self) -> ssl.SSLContext:
        context = self._new_context()
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        try:
            self._read_into(context)
        except OSError as error:
            names = ", ".join(map(str, self._paths))
            raise ValueError(f"{self._what} {names}: {error.strerror or error}") from None
        return context

    async def follow(self, interval_s: float = RELOAD_INTERVAL_S) -> None:
        """For ever: read the files when they have changed."""
        while True:
            await asyncio.sleep(interval_s)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Files that cannot be used change nothing: a certificate and its key are seldom replaced in one moment."""
        now = stamp(self._paths)
        if now == self._seen:
            return
        self._seen = now
        try:
            self._checked()  # on a context of its own first, so that half a pair never gets into the one in use
            self._read_into(self.context)
        except (ValueError, OSError) as error:
            log.error("%s was NOT read anew, what was read before still counts: %s", self._what, error)
            return
        log.info("%s was read anew", self._what)


class ServerCertificate(TlsFiles):
    """What a server shows: a PEM file with its certificate and those that lead to the CA, and one with its key."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises ValueError."""
        super().__init__("--tls-cert, --tls-key", cert, key)

    def _new_context(self) -> ssl.SSLContext:
        return ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)

    def _read_into(self, context: ssl.SSLContext) -> None:
        cert, key = self._paths
        context.load_cert_chain(cert, key)


class _NamedContext(ssl.SSLContext):
    """Checks a peer's certificate for one name, whatever address was dialled."""

    peer_name: str | None = None

    def wrap_bio(self, incoming: Any, outgoing: Any, *args: Any, **options: Any) -> ssl.SSLObject:
        if self.peer_name is not None:
            options["server_hostname"] = self.peer_name
        return super().wrap_bio(incoming, outgoing, *args, **options)


class WorkerCa(TlsFiles):
    """Who signs the certificates of workers. A CA that is taken out of the file counts until the next start."""

    def __init__(self, ca: str, name: str | None = None) -> None:
        """`name`: what a worker's certificate must be for, when not for the address it has. Raises ValueError."""
        self._name = name
        super().__init__("--worker-ca", ca)

    def _new_context(self) -> ssl.SSLContext:
        context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
        context.peer_name = self._name
        return context

    def _read_into(self, context: ssl.SSLContext) -> None:
        context.load_verify_locations(self._paths[0])
