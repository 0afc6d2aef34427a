"""The folder of a disk store: claimed by one process at a time, closed to other users."""

from __future__ import annotations

import fcntl
import itertools
import os
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

_LOCK: Final = "lock"
_SHARED: Final = stat.S_IWGRP | stat.S_IWOTH


class ClaimedFolder:
    """`DIR/<n>` with the lowest n that no other process has claimed, so a restarted worker finds its blocks again.

    The kernel holds the lock and releases it when the process ends.
    """

    def __init__(self, parent: Path) -> None:
        """Claim a folder in `parent`, and create `parent` if it is missing. Raises ValueError."""
        try:
            with suppress(FileExistsError):
                parent.mkdir(mode=0o700)
            if (problem := parent_problem(parent)) is not None:
                raise ValueError(problem)
            self.path, self._lock = next(filter(None, (_claim(parent / str(number)) for number in itertools.count())))
        except OSError as error:
            raise ValueError(f"{parent} cannot hold blocks: {error.strerror or error}") from error

    def release(self) -> None:
        """Release the folder for another process. May be called again."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def parent_problem(parent: Path) -> str | None:
    """Return why blocks must not be stored below a directory, or None. Raises OSError."""
    status = parent.stat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{parent} is not a directory"
    if status.st_uid != os.geteuid() and status.st_mode & _SHARED:
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
