"""One supervised process: started, listened to, restarted with back-off, ended.

starting --ready--> running --exit--> waiting (back-off) --> starting ...
     any state --stop()--> SIGTERM, grace, SIGKILL --> stopped
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
FIRST_BACKOFF_S: Final = 0.5
MAX_BACKOFF_S: Final = 15.0
STABLE_AFTER_S: Final = 60.0
"""A child that has lived this long begins its back-off anew."""
MAX_HELD_BACK: Final = 20
"""Lines of a quiet child."""
REFUSED: Final = 2
"""Exit code of a part that cannot work as it was asked to: starting it again would not help."""


class ChildRefusedError(Exception):
    """A child ended with exit code 2. Its own last lines say why."""


@dataclass(frozen=True, slots=True)
class ChildSpec:
    """What to run. `on_line` hears every line of output; `is_ready` returns once the child serves."""

    name: str
    command: Sequence[str]
    on_line: Callable[[str], None]
    is_ready: Callable[[], Awaitable[None]] | None = None
    pass_fds: Sequence[int] = ()
    """Kept open across the start."""
    quiet: bool = False
    """Its lines are heard only when it has died: the last of them say why."""


class Child:
    """Owner of one process. `run` lives as long as the supervisor wants the child; `stop` ends both."""

    def __init__(self, spec: ChildSpec, report: Callable[[str], None]) -> None:
        self.spec = spec
        self.ready = asyncio.Event()
        self.num_restarts = 0
        self._report = report
        self._process: asyncio.subprocess.Process | None = None
        self._stopping = False

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def run(self) -> None:
        """Start the child and start it again whenever it dies, until `stop`. Raises ChildRefusedError."""
        backoff_s = FIRST_BACKOFF_S
        while True:
            started_s = time.monotonic()
            code = await self._run_once()
            if self._stopping:
                return
            if code == REFUSED:
                raise ChildRefusedError(f"{self.spec.name} cannot start; its lines above say why")
            if time.monotonic() - started_s > STABLE_AFTER_S:
                backoff_s = FIRST_BACKOFF_S
            self._report(f"{self.spec.name} died ({_describe(code)}); starting it again in {backoff_s:g} s")
            await asyncio.sleep(backoff_s)
            backoff_s = min(MAX_BACKOFF_S, 2 * backoff_s)
            self.num_restarts += 1

    async def stop(self, grace_s: float) -> None:
        """SIGTERM, then SIGKILL after `grace_s`. Returns when the process is gone."""
        self._stopping = True
        process = self._process
        if process is None or process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        try:
            await asyncio.wait_for(process.wait(), grace_s)
        except TimeoutError:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    def signal(self, number: signal.Signals) -> None:
        """To the process, if it lives."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _run_once(self) -> int:
        """One life of the process, from its start to its exit code."""
        self.ready.clear()
        self._process = process = await asyncio.create_subprocess_exec(
            *self.spec.command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C reaches the supervisor alone, which then ends the children in order
            preexec_fn=partial(_die_with_parent, os.getpid()) if sys.platform == "linux" else None,
            limit=1 << 20,
            pass_fds=self.spec.pass_fds,
        )
        assert process.stdout is not None
        held_back: deque[str] = deque(maxlen=MAX_HELD_BACK)
        hear = held_back.append if self.spec.quiet else self.spec.on_line
        watcher = asyncio.create_task(self._watch_ready())
        try:
            while line := await process.stdout.readline():
                hear(line.decode(errors="replace").rstrip())
            code = await process.wait()
            if not self._stopping:
                for text in held_back:
                    self.spec.on_line(text)
            return code
        finally:
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    async def _watch_ready(self) -> None:
        if self.spec.is_ready is not None:
            await self.spec.is_ready()
        self.ready.set()
        if self.num_restarts and self.spec.is_ready is not None:
            self._report(f"{self.spec.name} is back")


def _die_with_parent(parent_pid: int) -> None:
    """In the child, before exec: be killed when the supervisor dies, even by SIGKILL (Linux)."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        os._exit(1)


def _describe(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
