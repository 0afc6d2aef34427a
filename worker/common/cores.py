"""The processors of this process: how many it may use, how its threads wait, and how long they waited for one."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Final

SPINS: Final = 3000
"""Rounds for which a thread of OpenMP waits in a loop before it sleeps: some 50 to 200 us, the time between two parts
of a step. By default it waits for 10 ms and more, for as long as its peer waits for a processor."""
_WAITING: Final = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
MAX_WAIT_SHARE: Final = 0.2
"""Above it other programs slow a model down."""
_CGROUPS: Final = Path("/sys/fs/cgroup")
_PROC: Final = Path("/proc/self")


def bound_spinning(environ: MutableMapping[str, str] = os.environ) -> None:
    """Bound the time for which threads of OpenMP wait in a loop, unless the user has. Call it before torch is imported.

    libgomp, which torch has on Linux, reads the first variable. The OpenMP of Intel and LLVM reads milliseconds.
    """
    if not any(name in environ for name in _WAITING):
        environ.update({"GOMP_SPINCOUNT": str(SPINS), "KMP_BLOCKTIME": "1"})


def num_cores(num_sharing: int = 1, cgroups: Path = _CGROUPS, own: Path = _PROC / "cgroup") -> int:
    """Return the processors for one of `num_sharing` processes: by affinity, within the cgroup's quota. At least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, math.ceil(min([allowed, *_quotas(cgroups, own)])) // max(1, num_sharing))


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Yield the quotas of this process's cgroup, and of those around it, in processors."""
    lines = own.read_text().splitlines() if own.exists() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if "cpu" in (controllers or "cpu").split(","):
            inner = PurePosixPath(path.lstrip("/"))  # in a container it may be the host's, and only the root exists
            yield from (_read_quota(cgroups / controllers / folder) for folder in (inner, *inner.parents))


def _read_quota(folder: Path) -> float:
    """Return the processors that a cgroup of version 2 or 1 allows."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):
        with suppress(OSError, ValueError, ZeroDivisionError):  # no such file, or "max"
            quota, period = map(int, " ".join((folder / name).read_text() for name in names).split())
            if quota > 0:
                return quota / period
    return math.inf


def thread_times() -> tuple[int, ...]:
    """Return the nanoseconds for which the threads of this process have run, and have waited to run."""
    times = [(0, 0)]  # elsewhere than on Linux nothing counts them
    for file in (_PROC / "task").glob("*/schedstat"):
        with suppress(OSError):  # the thread has ended
            ran, waited, _ = file.read_text().split()
            times.append((int(ran), int(waited)))
    return tuple(map(sum, zip(*times, strict=True)))


def busy_advice(begun: tuple[int, ...]) -> str:
    """Return a warning when threads have waited for much of their time since `begun`, a `thread_times`; else ""."""
    ran, waited = (max(0, now - then) for now, then in zip(thread_times(), begun, strict=True))
    share = waited / max(1, ran + waited)
    text = f"other programs use the processors: the model waits for {share:.0%} of its time"
    return text if share > MAX_WAIT_SHARE else ""
