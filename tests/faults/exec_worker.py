"""A worker started by exec, as in production: for what a fork cannot change, such as preloaded libraries."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.faults.part import ROOT, Worker


class ExecWorker(Worker):
    def __init__(
        self,
        name: str,
        port: int,
        log: Path,
        args: Sequence[str],
        environment: dict[str, str],
        module: str = "worker",
    ) -> None:
        super().__init__(name, port, log, args, None)
        self._environment = environment
        self._module = module
        self._child: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        argv = ["--worker-id", self.name, "--host", "127.0.0.1", "--port", str(self.port), *self.args]
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", self._module, *argv],
                cwd=ROOT,
                env={**os.environ, **self._environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self.pid = self._child.pid

    def poll(self) -> int | None:
        return 0 if self._child is None else self._child.poll()
