"""Folders of one process, of which none is left, however the process ends."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


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
