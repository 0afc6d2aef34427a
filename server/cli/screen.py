"""The output of `headstart serve`: the lines of all parts, and until it is ready one every ten seconds at least."""

from __future__ import annotations

import asyncio
import re
import sys
import time
from contextlib import suppress
from typing import Final

_LAYERS: Final = re.compile(r"headstart worker: loading layer (\d+) of (\d+)")
TICK_S: Final = 1.0  # the shown seconds count up
MAX_SILENT_S: Final = 8.0  # with a tick less than ten seconds, after which a user would ask whether it hangs
_READY: Final = "headstart worker: ready: "


class Screen:
    """Prints lines with the name of their part. Reports the progress of a start that prints nothing."""

    def __init__(self, num_workers: int) -> None:
        """`num_workers`: those that load a model."""
        self._num_workers = num_workers
        self._layers: dict[str, int] = {}
        self._progress = "loading the model" if num_workers else "asking the engines"
        self._begun_s = self._printed_s = time.monotonic()
        self._starting = True

    async def run(self) -> None:
        """Report the progress until `ready`."""
        while self._starting:
            await asyncio.sleep(TICK_S)
            if self._starting and time.monotonic() - self._printed_s >= MAX_SILENT_S:
                self.say(f"{self._progress}, {time.monotonic() - self._begun_s:.0f} s so far")

    def ready(self) -> None:
        self._starting = False

    def say(self, text: str, name: str = "headstart:") -> None:
        """Print a line of the supervisor's own, or of a part."""
        self._printed_s = time.monotonic()
        with suppress(OSError):  # a full disk, or a pipe without a reader, costs lines and nothing else
            print(name, text, file=sys.stderr, flush=True)

    def relay(self, name: str, line: str) -> None:
        """Print a line of a part. The progress of layers is summed up over the workers."""
        if (layers := _LAYERS.match(line)) is None:
            self.say(line, f"[{name}]")
            if line.startswith(_READY):
                self._progress = "waiting until a gateway finds all workers in Redis"
            return
        self._layers[name] = int(layers[1])
        done, total = sum(self._layers.values()), self._num_workers * int(layers[2])
        text = f"loading the model, {done} of {total} layers" if done < total else "measuring how fast the workers are"
        self._progress = text
