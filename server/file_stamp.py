"""Whether files have changed since they were last looked at."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

Stamp = tuple[tuple[int, ...], ...]


def stamp(paths: Iterable[Path]) -> Stamp:
    """Changes with the content; a Kubernetes secret changes by a new inode behind a link."""
    return tuple(_stamp(path) for path in paths)


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        status = os.stat(path)
    except OSError:
        return ()
    return (status.st_mtime_ns, status.st_size, status.st_ino)
