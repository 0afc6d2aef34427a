"""The certificate that a worker shows to gateways, read anew when its files change: a restart would cost its cache."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from pathlib import Path
from typing import Final

logger = logging.getLogger(__name__)

RELOAD_INTERVAL_S: Final = 5.0


class ServerCertificate:
    """One task calls `follow`; connections that are open keep what they began with."""

    def __init__(self, cert: str, key: str) -> None:
        """PEM files: the certificate with those that lead to the CA, and its key. Raises ValueError."""
        self._files = (Path(cert), Path(key))
        self._seen = self._stamp()
        try:
            self.context = self._read()
        except OSError as error:
            raise ValueError(f"--tls-cert {cert}, --tls-key {key}: {error.strerror or error}") from None

    async def follow(self, interval_s: float = RELOAD_INTERVAL_S) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(interval_s)
            self.reload_if_changed()

    def reload_if_changed(self) -> None:
        """Files that are no pair change nothing: the two are seldom replaced in one moment."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        self._seen = stamp
        try:
            self._read()  # on a context of its own first: half a pair must not get into the one in use
            self.context.load_cert_chain(*self._files)
        except OSError as error:
            logger.error("the certificate was NOT read anew, the old one still counts: %s", error)
            return
        logger.info("the certificate was read anew")

    def _read(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.load_cert_chain(*self._files)
        return context

    def _stamp(self) -> list[tuple[int, int, int]]:
        stamps = []
        for path in self._files:
            try:
                status = os.stat(path)
            except OSError:
                continue
            stamps.append((status.st_mtime_ns, status.st_size, status.st_ino))
        return stamps
