"""The user's cache folder: what a start makes and the next one finds."""

from __future__ import annotations

import os
import time
from contextlib import suppress
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
