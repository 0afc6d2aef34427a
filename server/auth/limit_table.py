"""Token buckets and open requests of every key, in one piece of memory that the processes of a gateway share.

    row   tag | requests: level, at | tokens: level, at | open requests of process 0, 1, ...     8 bytes a cell

A row belongs to the key whose digest begins with its tag; rows are found by open addressing and never given back
(there are more than a key file has entries). Locks are POSIX record locks on the row, which end with their process.
Times are CLOCK_MONOTONIC, the same for every process of a machine.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, NewType, Self

Row = NewType("Row", int)
Bucket = Literal["requests", "tokens"]

NUM_ROWS: Final = 8192
MAX_PROCESSES: Final = 64
_CELL_BYTES: Final = 8
_STREAMS: Final = 5
_CELLS: Final = _STREAMS + MAX_PROCESSES
_LEVEL: Final[dict[Bucket, int]] = {"requests": 1, "tokens": 3}
SIZE_BYTES: Final = NUM_ROWS * _CELLS * _CELL_BYTES


class LimitTable:
    """Owned by one event loop per process."""

    def __init__(
        self,
        memory: mmap.mmap,
        process: int = 0,
        lock_fd: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`process`: which of the sharers this is; what an earlier one of this number had open is forgotten."""
        if not 0 <= process < MAX_PROCESSES:
            raise ValueError(f"process must be 0 to {MAX_PROCESSES - 1}, got {process}")
        self._integers = memoryview(memory).cast("Q")
        self._floats = memoryview(memory).cast("d")
        self._process = process
        self._lock_fd = lock_fd
        self._clock = clock
        self._rows: dict[bytes, Row] = {}
        for row in range(NUM_ROWS):
            if self._integers[row * _CELLS]:
                self._integers[row * _CELLS + _STREAMS + process] = 0

    @classmethod
    def private(cls, *, clock: Callable[[], float] = time.monotonic) -> Self:
        """For a gateway of one process."""
        return cls(mmap.mmap(-1, SIZE_BYTES), clock=clock)

    @classmethod
    def shared(cls, path: Path, process: int) -> Self:
        """One of the processes that share `path`, made by `create_shared`. Raises OSError."""
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        return cls(mmap.mmap(fd, SIZE_BYTES), process, fd)

    def row(self, digest: bytes) -> Row:
        """The key's row, taken when it is new."""
        row = self._rows.get(digest)
        if row is None:
            if len(self._rows) >= NUM_ROWS:
                self._rows.clear()
            row = self._rows[digest] = self._find(int.from_bytes(digest[:8], "little") or 1)
        return row

    def take(self, row: Row, bucket: Bucket, per_s: float, capacity: float, amount: float) -> float:
        """Take `amount` and return 0.0, or take nothing and return the seconds until it can be taken.

        What is more than a full bucket is given when the bucket is full, and overdraws it.
        """
        with self._locked(row):
            level = self._refilled(row, bucket, per_s, capacity)
            needed = min(amount, capacity)
            if level < needed:
                self._write(row, bucket, level)
                return (needed - level) / per_s
            self._write(row, bucket, level - amount)
            return 0.0

    def draw(self, row: Row, bucket: Bucket, per_s: float, capacity: float, amount: float) -> None:
        """Take what has been used already."""
        with self._locked(row):
            self._write(row, bucket, self._refilled(row, bucket, per_s, capacity) - amount)

    def level(self, row: Row, bucket: Bucket, per_s: float, capacity: float) -> float:
        return self._refilled(row, bucket, per_s, capacity)

    def enter(self, row: Row, limit: int) -> bool:
        """Count one more open request, unless `limit` are open."""
        begin = row * _CELLS + _STREAMS
        with self._locked(row):
            if sum(self._integers[begin : begin + MAX_PROCESSES]) >= limit:
                return False
            self._integers[begin + self._process] += 1
            return True

    def leave(self, row: Row) -> None:
        self._integers[row * _CELLS + _STREAMS + self._process] -= 1

    def _refilled(self, row: Row, bucket: Bucket, per_s: float, capacity: float) -> float:
        cell = row * _CELLS + _LEVEL[bucket]
        at_s = self._floats[cell + 1]
        if at_s == 0.0:
            return capacity
        return min(capacity, self._floats[cell] + (self._clock() - at_s) * per_s)

    def _write(self, row: Row, bucket: Bucket, level: float) -> None:
        cell = row * _CELLS + _LEVEL[bucket]
        self._floats[cell] = level
        self._floats[cell + 1] = self._clock()

    def _find(self, tag: int) -> Row:
        for step in range(NUM_ROWS):
            row = Row((tag + step) % NUM_ROWS)
            with self._locked(row):
                held = self._integers[row * _CELLS]
                if held in (0, tag):
                    self._integers[row * _CELLS] = tag
                    return row
        return Row(tag % NUM_ROWS)  # full of keys that are long gone: two share a row until the next start

    @contextmanager
    def _locked(self, row: Row) -> Iterator[None]:
        if self._lock_fd is None:
            yield
            return
        fcntl.lockf(self._lock_fd, fcntl.LOCK_EX, 1, row)
        try:
            yield
        finally:
            fcntl.lockf(self._lock_fd, fcntl.LOCK_UN, 1, row)


def create_shared(path: Path) -> None:
    """An empty table for processes to share. Raises OSError."""
    with path.open("xb") as file:
        os.fchmod(file.fileno(), 0o600)
        file.truncate(SIZE_BYTES)
