"""The usage log: a line of JSON for each request, written in batches by a thread of its own.

Several gateways of one machine may share a file: a batch is written under the file's lock, whole or not at all. At
`max_bytes` the file is renamed to FILE.TIME and a new one begins. A killed process's partial line gets a newline.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec

from server.metrics import GatewayMetrics
from server.usage.account import Account

log = logging.getLogger(__name__)

FLUSH_S: Final = 0.25  # a killed gateway loses at most this much of the log
RETRY_S: Final = 1.0  # a full disk is tried again
MAX_PENDING: Final = 50_000
"""Lines kept while the file cannot be written, some 25 MB of memory; later ones are lost."""
_FULL: Final = (errno.ENOSPC, errno.EDQUOT)
_ROTATED: Final = re.compile(r"\.\d{8}T\d{6}\.\d{6}")
_encode: Final = msgspec.json.Encoder().encode


class UsageLog:
    """Owned by the event loop; only `_write` runs in the thread. One task calls `run`."""

    def __init__(self, path: Path, max_bytes: int, max_files: int, metrics: GatewayMetrics) -> None:
        """Keep `max_files` full files. Raises ValueError for a file that can never be written."""
        self._path = path
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._metrics = metrics
        self._lines: list[bytes] = []
        self._reason = ""
        """Why the last batch could not be written."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="usage-log")
        try:
            os.close(self._open())
        except OSError as error:
            if error.errno not in _FULL:
                raise ValueError(f"--usage-log {path}: {error.strerror}") from None

    def add(self, account: Account) -> None:
        """Queue the account's line for the next write. It is lost if MAX_PENDING lines wait."""
        if len(self._lines) >= MAX_PENDING:
            self._metrics.usage_log_lines.inc("lost")
            return
        self._lines.append(_encode(account))

    async def run(self) -> None:
        """Write the lines until cancelled, and then the rest."""
        try:
            while True:
                written = await self.flush()
                await asyncio.sleep(FLUSH_S if written else RETRY_S)
        except asyncio.CancelledError:
            await self.close()
            raise

    async def flush(self) -> bool:
        """Write the lines that wait. Return False if that failed; they wait for the next time."""
        if not self._lines:
            return True
        batch, self._lines = self._lines, []
        data = b"\n".join([*batch, b""])
        writing = asyncio.get_running_loop().run_in_executor(self._thread, self._write, data)
        try:
            await asyncio.wait([writing])
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            self._finish_batch(batch, writing.exception())
            raise
        return self._finish_batch(batch, writing.exception())

    def _finish_batch(self, batch: list[bytes], error: BaseException | None) -> bool:
        """Count a batch as written, or keep its lines. Return whether it was written."""
        reason = "" if error is None else str(error)
        if error is None:
            self._metrics.usage_log_lines.inc("written", by=len(batch))
        else:
            self._lines = batch + self._lines
            self._metrics.usage_log_failures.inc()
            if reason != self._reason:
                log.error("the usage log cannot be written, and its lines wait: %s", reason)
        self._reason = reason
        return error is None

    async def close(self) -> None:
        """Write the rest. No account may be added after it."""
        if not await self.flush():
            self._metrics.usage_log_lines.inc("lost", by=len(self._lines))
            log.error("%d lines of the usage log are lost", len(self._lines))
        self._thread.shutdown(wait=False)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640)

    def _write(self, data: bytes) -> None:
        """Append whole lines, or nothing. Raises OSError."""
        while True:
            file = self._open()
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                num_bytes = os.fstat(file).st_size
                if not self._is_current(file):  # another process has renamed it
                    continue
                if num_bytes and num_bytes + len(data) > self._max_bytes:
                    self._rotate()
                    continue
                if num_bytes and os.pread(file, 1, num_bytes - 1) != b"\n":
                    data = b"\n" + data
                try:
                    if os.write(file, data) < len(data):
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
                except OSError:
                    os.ftruncate(file, num_bytes)
                    raise
                return
            finally:
                os.close(file)

    def _is_current(self, file: int) -> bool:
        try:
            return os.path.samestat(os.stat(self._path), os.fstat(file))
        except FileNotFoundError:
            return False

    def _rotate(self) -> None:
        name = self._path.name
        self._path.rename(self._path.with_name(f"{name}.{datetime.now(UTC):%Y%m%dT%H%M%S.%f}"))
        full = sorted(
            each for each in self._path.parent.glob(f"{name}.*") if _ROTATED.fullmatch(each.name[len(name) :])
        )
        for each in full[: max(0, len(full) - self._max_files)]:
            each.unlink(missing_ok=True)
