"""A child process of `headstart serve`: it is started, read line by line, and restarted when it dies."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from server.cli.common import BAD_USAGE, CommandError

FIRST_DELAY_S: Final = 0.5  # before the first restart: short, as most deaths do not repeat
MAX_DELAY_S: Final = 15.0  # between restarts: a child whose cause of death is gone is back in this time
STABLE_AFTER_S: Final = 60.0
"""A child that has lived this long restarts after `FIRST_DELAY_S` again."""
MAX_LAST_LINES: Final = 20  # shown of a quiet child that dies: the end of a traceback
MAX_LINE_BYTES: Final = 1 << 20  # asyncio's default of 64 KiB ends the reading at a longer line
_PR_SET_PDEATHSIG: Final = 1  # from linux/prctl.h
_FOR_PROGRAMS: Final = b'{"event": '


class Child:
    """Owner of one process. One task calls `run`, which keeps the process alive until `stop`."""

    def __init__(
        self, name: str, command: Sequence[str], on_line: Callable[[str], None], *, quiet: bool = False
    ) -> None:
        """`on_line` receives every human-readable line; if `quiet`, only the last ones, when the child dies."""
        self.name = name
        self.said: dict[str, Any] = {}
        """The last JSON object of the process that runs."""
        self.process: asyncio.subprocess.Process | None = None
        self._command = command
        self._on_line = on_line
        self._quiet = quiet
        self._stopping = asyncio.Event()
        self._was_ready = False

    async def run(self, report: Callable[[str], None]) -> None:
        """Start the child, and restart it whenever it dies, until `stop`.

        Raises CommandError for exit code 2, wrong options. A child that was ready before is restarted: an engine
        that was replaced may come back.
        """
        delay_s = FIRST_DELAY_S
        while not self._stopping.is_set():
            started_s = time.monotonic()
            code = await self.run_once()
            self.said = {}
            if self._stopping.is_set():
                return
            if code == BAD_USAGE and not self._was_ready:
                raise CommandError(f"{self.name} cannot start; its lines above have the reason", BAD_USAGE)
            if time.monotonic() - started_s > STABLE_AFTER_S:
                delay_s = FIRST_DELAY_S
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            report(f"{self.name} died ({reason}); starting it again in {delay_s:g} s")
            await asyncio.sleep(delay_s)
            delay_s = min(MAX_DELAY_S, 2 * delay_s)

    async def stop(self, grace_s: float) -> None:
        """Send SIGTERM, and SIGKILL after `grace_s`. Return when the process is gone."""
        self._stopping.set()
        if (process := self.process) is None:
            return
        for send_signal, timeout_s in ((process.terminate, grace_s), (process.kill, None)):
            with contextlib.suppress(ProcessLookupError):
                send_signal()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), timeout_s)
                return

    async def run_once(self) -> int:
        """Run the process once, and return its exit code."""
        self.process = process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # only the supervisor receives Ctrl-C, and stops the children in order
            preexec_fn=partial(_die_with_parent, os.getpid()) if sys.platform == "linux" else None,
            limit=MAX_LINE_BYTES,
        )
        if self._stopping.is_set():
            process.kill()  # `stop` came before it
        assert process.stdout is not None
        last_lines: deque[str] = deque(maxlen=MAX_LAST_LINES)
        on_line = last_lines.append if self._quiet else self._on_line
        while line := await process.stdout.readline():
            if line.startswith(_FOR_PROGRAMS):
                self.said = json.loads(line)
                self._was_ready |= self.said["event"] == "ready"
            else:
                on_line(line.decode(errors="replace").rstrip())
        code = await process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS has the second for a group that is gone
            os.killpg(process.pid, signal.SIGKILL)  # its own children, such as a compiler
        for text in () if self._stopping.is_set() else last_lines:
            self._on_line(text)
        return code


def _die_with_parent(parent_pid: int) -> None:
    """Ask the kernel, in the child before exec, for SIGTERM when the supervisor dies, even by SIGKILL (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        os._exit(1)
