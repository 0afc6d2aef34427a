"""What `headstart serve` writes: its own lines, and those of its parts under their names.

On a terminal the start is one line that moves; what the parts say of their progress goes into it, and what is for logs
alone is left out until all is ready. Elsewhere every line is written as it comes.

    headstart: loading the model on 2 workers  [##########----------]  50 %  12 s
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable
from typing import Final, TextIO

TICK_S: Final = 0.2
WIDTH: Final = 20
_LAYERS: Final = re.compile(r"headstart worker: loading layer (\d+) of (\d+)")
_FOR_LOGS: Final = re.compile(r"^headstart worker: |^\S+ \S+ (INFO|DEBUG) ")
_FOR_PROGRAMS: Final = '{"event": '


class Screen:
    """Owned by the supervisor's event loop. `run` moves the line until `ready`."""

    def __init__(self, stream: TextIO, num_workers: int) -> None:
        self._stream = stream
        self._starting = stream.isatty()
        self._num_workers = num_workers
        self._begun_s = time.monotonic()
        self._layers: dict[str, tuple[int, int]] = {}
        self._stage = "starting Redis"

    async def run(self) -> None:
        while self._starting:
            self._draw()
            await asyncio.sleep(TICK_S)

    def stage(self, text: str) -> None:
        """What is being done now."""
        self._stage = text

    def say(self, text: str) -> None:
        """A line of the supervisor's own."""
        self._print(f"headstart: {text}")

    def relay(self, name: str) -> Callable[[str], None]:
        """For the lines of a part, but for those that a worker writes for programs."""

        def pass_on(line: str) -> None:
            if line.startswith(_FOR_PROGRAMS):
                return
            if self._starting and (layers := _LAYERS.match(line)):
                self._layers[name] = int(layers[1]), int(layers[2])
            elif not (self._starting and _FOR_LOGS.match(line) and " cannot " not in line):
                self._print(f"[{name}] {line}")

        return pass_on

    def ready(self) -> None:
        """The start is over, well or not: from now on every line is written."""
        self._clear()
        self._starting = False

    def _print(self, text: str) -> None:
        self._clear()
        print(text, file=self._stream, flush=True)

    def _clear(self) -> None:
        if self._starting:
            self._stream.write("\r\033[K")

    def _draw(self) -> None:
        done = sum(done for done, _ in self._layers.values())
        total = self._num_workers * max((total for _, total in self._layers.values()), default=0)
        text = f"headstart: {self._stage}"
        if total and done < total:
            part = done / total
            text += f"  [{'#' * round(part * WIDTH):-<{WIDTH}}] {100 * part:3.0f} %"
        elif total:
            text = "headstart: measuring how fast the workers are"
        self._clear()
        self._stream.write(f"{text}  {time.monotonic() - self._begun_s:.0f} s")
        self._stream.flush()
