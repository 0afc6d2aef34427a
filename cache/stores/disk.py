"""Blocks on disk, which outlive the process.

    DIR/<n>/<fingerprint>-<segment>.blocks    a segment: records of one size (`cache.block_record`), one for each block

A record is overwritten in place when its block is evicted. A torn record fails its digest and is a miss, so nothing
needs fsync. The index of the records is only in memory; a start rebuilds it from the headers.
"""

from __future__ import annotations

import fcntl
import itertools
import logging
import os
import re
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic
from typing import Final

from cache.block_record import HEADER_BYTES, RecordFormat
from cache.stores.base import BlockStore
from cache.types import ChainLink

logger = logging.getLogger(__name__)

SEGMENT_BYTES: Final = 256 << 20  # of one file: large, as it is created while other threads wait for the lock
WRITE_PAUSE_S: Final = 30.0
"""Time without writes after a failed one: on a full disk, each attempt would evict a stored block."""
_NUM_SCANNERS: Final = 8
"""Threads that read headers at the start: a single one mostly waits for the disk."""
_SEGMENT_NAME: Final = re.compile(r"([0-9a-f]{32})-([0-9]{1,18})\.blocks")
_FILE_GONE: Final = (FileNotFoundError, IsADirectoryError, NotADirectoryError)
_LOCK: Final = "lock"
_OTHERS_MAY_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH


class DiskStore(BlockStore):
    """A `BlockStore` in files of one folder, which it claims among those in a directory.

    A segment holds at most n records: number i is record i % n of segment i // n. `clear` deletes the files, and a
    segment's number is never used again. So a write that began before `clear` finds no file.
    """

    tier = "disk"
    takes = "all"
    guess_bytes_per_s = 400e6

    def __init__(
        self, directory: Path, record_format: RecordFormat, max_bytes: int, *, segment_bytes: int = SEGMENT_BYTES
    ) -> None:
        """Find the blocks of an earlier process; delete files of other formats. Raises ValueError."""
        super().__init__(record_format.payload_bytes)
        self._format = record_format
        self._max_records = max_bytes // record_format.record_bytes
        if self._max_records < 1:
            size = record_format.record_bytes
            raise ValueError(f"a disk store of {max_bytes:,} bytes holds no block of {size:,} bytes")
        self._records_per_segment = max(1, segment_bytes // record_format.record_bytes)
        self._segments: dict[int, int] = {}
        """The number of records in use, by the number of the segment."""
        self._next_segment = 0
        self._paused_until_s = 0.0
        self._failing = False
        self._folder, self._claim = claim_folder(directory)
        try:
            self._recover()
        except OSError as error:
            os.close(self._claim)
            raise ValueError(f"{self._folder} cannot be read: {error.strerror}") from error

    def clear(self) -> None:
        with self._lock:
            segments = list(self._segments)
            self._forget_all()
        for number in segments:
            _delete(self._path(number))

    def close(self) -> None:
        if not self._closed:
            super().close()
            os.close(self._claim)

    def _read_record(self, payload: memoryview, link: ChainLink, record: int) -> bool:
        segment, offset = self._locate(record)
        header = bytearray(HEADER_BYTES)
        try:
            with self._opened(segment, os.O_RDONLY) as file:
                os.preadv(file, [header, payload], offset)  # a short read fails the digest
        except OSError as error:
            self._drop_if_gone(error, segment)
            return False
        return self._format.verifies(header, link, payload)

    def _write_record(self, payload: memoryview, link: ChainLink, record: int) -> bool:
        segment, offset = self._locate(record)
        header = self._format.header(link, payload)
        try:
            with self._opened(segment, os.O_WRONLY) as file:  # no O_CREAT: `clear` may have run
                num_written = os.pwritev(file, [header, payload], offset)
            if num_written != self._format.record_bytes:
                raise OSError(f"{num_written:,} of {self._format.record_bytes:,} bytes were written")
        except OSError as error:
            self._drop_if_gone(error, segment)
            if not isinstance(error, _FILE_GONE):
                self._pause(error)
            return False
        if self._failing:
            self._failing = False
            logger.info("blocks are written to %s again", self._folder)
        return True

    def _drop_if_gone(self, error: OSError, segment: int) -> None:
        """Log an error of a segment. Drop the segment if its file was removed or replaced: `_grow` begins another."""
        logger.debug("segment %d in %s: %s", segment, self._folder, error)
        if isinstance(error, _FILE_GONE):
            with self._lock:
                self._segments.pop(segment, None)
                lost = self._chains.forget(lambda held: self._locate(held.record)[0] == segment)
                self._free = [*self._usable(self._free), *self._usable(lost)]

    def _pause(self, error: OSError) -> None:
        self._paused_until_s = monotonic() + WRITE_PAUSE_S
        if not self._failing:
            self._failing = True
            logger.warning(
                "no block can be written to %s: %s; tried again every %.0f s", self._folder, error, WRITE_PAUSE_S
            )

    def _take_record(self, link: ChainLink) -> int | None:
        return None if monotonic() < self._paused_until_s else super()._take_record(link)

    def _grow(self) -> None:
        """Add a record to the last segment, or begin another.

        The file is created under the lock, once in 256 MB, so `clear` deletes every file.
        """
        if sum(self._segments.values()) >= self._max_records:
            return
        number = next(reversed(self._segments), -1)
        if self._segments.get(number, self._records_per_segment) >= self._records_per_segment:
            number = self._next_segment
            self._next_segment += 1
            try:
                os.close(os.open(self._path(number), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
            except OSError as error:
                self._pause(error)
                return
            self._segments[number] = 0
        self._free.append(number * self._records_per_segment + self._segments[number])
        self._segments[number] += 1

    def _usable(self, records: Sequence[int]) -> Sequence[int]:
        return [record for record in records if self._locate(record)[0] in self._segments]

    def _reset_records(self) -> None:
        self._segments.clear()
        self._free = []

    def _locate(self, record: int) -> tuple[int, int]:
        """Return the number of a record's segment and its offset there."""
        segment, index = divmod(record, self._records_per_segment)
        return segment, index * self._format.record_bytes

    @contextmanager
    def _opened(self, segment: int, mode: int) -> Iterator[int]:
        """Open the file of a segment, but no link. Raises OSError."""
        file = os.open(self._path(segment), mode | os.O_NOFOLLOW)
        try:
            yield file
        finally:
            os.close(file)

    def _path(self, segment: int) -> Path:
        return self._folder / f"{self._format.fingerprint}-{segment}.blocks"

    def _recover(self) -> None:
        """Rebuild the index from the headers. Payloads are verified when they are read.

        A record is free if its header is damaged or its block has another record. So is one whose block lacks a parent.
        It stays on disk until it is used again, so a later start may find it together with the parent.
        """
        num_left = self._max_records
        for number in sorted(self._own_segments()):
            self._next_segment = number + 1
            path = self._path(number)
            num_records = min(path.stat().st_size // self._format.record_bytes, self._records_per_segment, num_left)
            if num_records == 0:
                _delete(path)
                continue
            os.truncate(path, num_records * self._format.record_bytes)
            self._segments[number] = num_records
            num_left -= num_records
        with ThreadPoolExecutor(_NUM_SCANNERS) as scanners:
            found = [pair for pairs in scanners.map(self._scan, self._segments) for pair in pairs]
        found.sort(key=lambda pair: pair[1].depth if pair[1] else 0)
        for record, link in found:
            if link is not None and self._chains.accepts(link):
                self._chains.add(link, record)
            else:
                self._free.append(record)
        if found:
            logger.info("%s holds %d blocks of an earlier process", self._folder, len(self._chains))

    def _own_segments(self) -> Iterator[int]:
        """Return the numbers of the segments in the folder; delete segments of other formats."""
        for entry in self._folder.iterdir():
            name = _SEGMENT_NAME.fullmatch(entry.name)
            if name is None or not stat.S_ISREG(entry.lstat().st_mode):
                continue
            if name[1] == self._format.fingerprint:
                yield int(name[2])
            else:
                _delete(entry)

    def _scan(self, segment: int) -> list[tuple[int, ChainLink | None]]:
        """Return each record of a segment with the block that its header names."""
        first, size = segment * self._records_per_segment, self._format.record_bytes
        links: list[ChainLink | None] = [None] * self._segments[segment]
        try:
            with self._opened(segment, os.O_RDONLY) as file:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)  # no read-ahead into the payloads
                for index in range(len(links)):
                    links[index] = self._format.find_link(os.pread(file, HEADER_BYTES, index * size))
        except OSError as error:
            logger.warning("segment %d in %s: %s", segment, self._folder, error)
        return list(enumerate(links, first))


def _delete(path: Path) -> None:
    """Delete a file, or at least truncate it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.error("%s cannot be deleted: %s", path, error)
        try:
            os.truncate(path, 0)
        except OSError:
            logger.error("%s keeps its blocks: delete it by hand", path)


def claim_folder(parent: Path) -> tuple[Path, int]:
    """Claim `DIR/<n>` with the lowest n that no other process has claimed: a restarted worker finds its blocks again.

    Return it with the descriptor whose lock is the claim: the kernel releases it when that is closed, or the process
    ends. Creates `parent` if it is missing. Raises ValueError.
    """
    try:
        with suppress(FileExistsError):
            parent.mkdir(mode=0o700)
        if (problem := parent_problem(parent)) is not None:
            raise ValueError(problem)
        return next(filter(None, (_claim(parent / str(number)) for number in itertools.count())))
    except OSError as error:
        raise ValueError(f"{parent} cannot hold blocks: {error.strerror or error}") from error


def parent_problem(parent: Path) -> str | None:
    """Return why blocks must not be stored below a directory, or None. Raises OSError."""
    status = parent.stat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{parent} is not a directory"
    if status.st_uid != os.geteuid() and status.st_mode & _OTHERS_MAY_WRITE:
        return f"{parent} belongs to another user, and others may write to it: name a folder in it"
    return None


def _claim(path: Path) -> tuple[Path, int] | None:
    """Create and lock a folder. None: another process has locked it, or it belongs to another user."""
    with suppress(FileExistsError):
        path.mkdir(mode=0o700)
    status = path.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid():
        return None
    if stat.S_IMODE(status.st_mode) != 0o700:
        path.chmod(0o700)
    lock = os.open(path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return None
        raise
    return path, lock
