"""A gateway or a worker that notes when a request passes the functions on its way.

python -m benchmarks.dev.first_token_load.marks FILE gateway|worker OPTIONS...

The process is the real one. Some of its functions are wrapped. Each call writes its name and its time into a mapped
file, so a killed process loses nothing. All processes of a machine share the monotonic clock.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any, Final

_SIZE: Final = 64 << 20
_HEAD: Final = struct.Struct("<Q")
_ROW: Final = struct.Struct("<QQ")
GATEWAY: Final[tuple[str, ...]] = (
    "server.http.protocol:GatewayProtocol.data_received begin read",
    "server.api.chat:render_chat begin checked",
    "server.api.chat:render_chat end rendered",
    "server.text.tokenizer:Tokenizer.encode end tokenised",
    "server.router.router:Router.place begin asked",
    "cache.redis_index.lookup:RedisIndex.lookup end found",
    "server.router.router:Router.place end placed",
    "server.workers.connection:WorkerConnection.ask end sent",
    "server.workers.client:GenerateStream.read end frames",
    "worker.common.http_protocol:AnswerTransport.write begin written",
)
"""A function, whether its begin or its end is noted, and the name of the moment. The order is that of a request."""
WORKER: Final[tuple[str, ...]] = (
    "worker.http.service:WorkerService.submit begin arrived",
    "worker.scheduler.scheduler:Scheduler.submit begin queued",
    "worker.engine.inflight:InFlightSteps.launch begin launched",
    "worker.engine.inflight:InFlightSteps._apply begin stepped",
    "worker.http.service:WorkerService._dispatch begin dispatched",
    "worker.http.streams:Stream.take end framed",
)
NAMES: Final = [row.split()[2] for row in (*GATEWAY, *WORKER)]


class Marks:
    """The marks of one process, in a file that others read while it is written."""

    def __init__(self, file: Path) -> None:
        with file.open("w+b") as opened:
            opened.truncate(_SIZE)
            self._map = mmap.mmap(opened.fileno(), _SIZE)
        self._end = _HEAD.size

    def add(self, number: int) -> None:
        if self._end + _ROW.size <= _SIZE:
            _ROW.pack_into(self._map, self._end, number, time.monotonic_ns())
            self._end += _ROW.size
            _HEAD.pack_into(self._map, 0, self._end)

    def wrap(self, row: str) -> None:
        """Replace a function by one that notes its begin or its end."""
        place, when, name = row.split()
        module_name, _, path = place.partition(":")
        owner: Any = import_module(module_name)
        *outer, last = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        setattr(owner, last, self._noting(getattr(owner, last), NAMES.index(name), at_begin=when == "begin"))

    def _noting(self, function: Callable[..., Any], number: int, *, at_begin: bool) -> Callable[..., Any]:
        import inspect

        if not at_begin and inspect.iscoroutinefunction(function):

            @wraps(function)
            async def noting_end(*args: Any, **kwargs: Any) -> Any:
                try:
                    return await function(*args, **kwargs)
                finally:
                    self.add(number)

            return noting_end

        @wraps(function)
        def noting(*args: Any, **kwargs: Any) -> Any:
            if at_begin:
                self.add(number)
                return function(*args, **kwargs)
            try:
                return function(*args, **kwargs)
            finally:
                self.add(number)

        return noting


class MarkReader:
    """Reads the marks that a process has added since the last read."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._read = _HEAD.size

    def take(self) -> Iterator[tuple[str, float]]:
        """Yield names and times in seconds."""
        with self._file.open("rb") as opened:
            (end,) = _HEAD.unpack(opened.read(_HEAD.size))
            opened.seek(self._read)
            data = opened.read(end - self._read) if end > self._read else b""
        self._read += len(data)
        for number, time_ns in _ROW.iter_unpack(data):
            yield NAMES[number], time_ns / 1e9


def main(argv: list[str]) -> int:
    file, kind, *options = argv
    marks, rows, module = Marks(Path(file)), GATEWAY, "server.gateway"
    if kind == "worker":
        from worker.common.cores import bound_spinning

        bound_spinning()  # before the engine's modules import torch
        rows, module = WORKER, "worker.main"
    for row in rows:
        marks.wrap(row)
    status: int = import_module(module).main(options)
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
