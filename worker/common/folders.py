"""The user's cache folder, which keeps what a start makes for the next one, and folders of one process.

Of the latter none is left, however the process ends.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

UNUSED_S: Final = 30 * 24 * 3600.0
"""A file that no start has used for this time is deleted when another is made."""


def cache_folder() -> Path | None:
    """Return the folder, made if need be. None: it cannot be used, or others may write to it."""
    try:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "headstart"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except (OSError, RuntimeError):  # the second: a user without a home
        return None
    is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return folder if is_private and os.access(folder, os.W_OK) else None


def delete_unused(folder: Path, pattern: str) -> None:
    """Delete the files of a pattern without a use. One that cannot be deleted stays."""
    for path in folder.glob(pattern):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > UNUSED_S:
                path.unlink()


@contextmanager
def private_folder(parent: Path | None = None) -> Iterator[Path]:
    """Yield a folder in `parent` (default: where temporary files go) that is deleted at the end.

    Those of killed processes are deleted first: their locks ended with them.
    """
    parent = parent or Path(tempfile.gettempdir())
    for left in parent.glob("headstart-*.locked"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left, ignore_errors=True)
    new = Path(tempfile.mkdtemp(prefix="headstart-", dir=parent))
    with _locked(new):
        folder = new.rename(f"{new}.locked")  # others see it only now, with its lock
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder as long as this process lives. Raises OSError if another process has the lock."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
