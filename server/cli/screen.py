"""The output of `headstart serve`: a progress bar until it is ready, and the lines of all parts."""

from __future__ import annotations

import asyncio
import re
import sys
from typing import Final

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

_LAYERS: Final = re.compile(r"headstart worker: loading layer (\d+) of (\d+)")
_FOR_LOGS: Final = re.compile(r"^headstart worker: |^\S+ \S+ (INFO|DEBUG) ")
_NEWS: Final = re.compile(" cannot | waiting for the engine ")
"""Marks lines that are shown above the bar."""
TICK_S: Final = 0.2


class Screen:
    """Prints the lines of all parts. On a terminal, a progress bar replaces log lines until `ready`."""

    def __init__(self, num_workers: int) -> None:
        """`num_workers`: those that load a model."""
        self._console = Console(stderr=True, markup=False, highlight=False, emoji=False)
        self._num_workers = num_workers
        self._layers: dict[str, int] = {}
        columns = (TextColumn("headstart: {task.description}"), BarColumn(20), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
        self._task = self._bar.add_task("loading the model" if num_workers else "asking the engines", total=None)
        self._starting = self._console.is_terminal

    async def run(self) -> None:
        """Move the bar until `ready`. Children are forked during that time, so no thread moves it."""
        while self._starting:
            self._bar.start()
            self._bar.refresh()
            await asyncio.sleep(TICK_S)

    def ready(self) -> None:
        """End the bar. Every later line is printed."""
        if self._starting:
            self._starting = False
            self._bar.stop()

    def say(self, text: str, name: str = "headstart:") -> None:
        """Print a line of the supervisor's own, or of a part."""
        if self._starting:
            self._console.print(name, text, soft_wrap=True)  # above the bar
        else:
            print(name, text, file=sys.stderr, flush=True)

    def relay(self, name: str, line: str) -> None:
        """Print a line of a part, unless the bar replaces it. The progress of layers is for the bar only."""
        if (layers := _LAYERS.match(line)) is None:
            if not self._starting or not _FOR_LOGS.match(line) or _NEWS.search(line):
                self.say(line, f"[{name}]")
        elif self._starting:
            self._layers[name] = int(layers[1])
            done, total = sum(self._layers.values()), self._num_workers * int(layers[2])
            text = "loading the model" if done < total else "measuring how fast the workers are"
            self._bar.update(self._task, description=text, completed=done, total=total)
