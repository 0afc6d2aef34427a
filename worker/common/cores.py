"""The processors of this process: how many it may use, how its threads wait, and how long they waited for one."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path, PurePosixPath
from typing import Final

SPINS: Final = 2000
"""Rounds for which a thread of OpenMP waits in a loop before it sleeps: some 30 to 150 us, the time between two parts
of a step. By default it waits for 10 ms and more, and a thread whose peer waits for a processor takes that long."""
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
        environ |= {"GOMP_SPINCOUNT": str(SPINS), "KMP_BLOCKTIME": "1"}


def num_cores(num_sharing: int = 1, cgroups: Path = _CGROUPS, own: Path = _PROC / "cgroup") -> int:
    """Return the processors for one of `num_sharing` processes: by affinity, within the cgroup's quota. At least 1."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [math.ceil(quota) for quota in _quotas(cgroups, own)]
    return max(1, min([allowed, *quotas]) // max(1, num_sharing))


def _quotas(cgroups: Path, own: Path) -> Iterator[float]:
    """Yield the quotas that bound this process, in processors: those of its cgroup and of the cgroups around it."""
    try:
        lines = own.read_text().splitlines()
    except OSError:  # no Linux
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        inner = PurePosixPath(path.lstrip("/"))  # a container may see the path of its host, and only the root exists
        for folder in (inner, *inner.parents):
            quota = _read_quota(cgroups / controllers / folder)
            if quota is not None:
                yield quota


def _read_quota(folder: Path) -> float | None:
    """Return the processors that a cgroup allows; None: any number. Version 2 has one file, version 1 two."""
    try:
        if (file := folder / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((folder / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such folder, or "max"
        return None


class ProcessorWait:
    """Measures which part of their time this process's threads wait for a processor, from its construction on."""

    def __init__(self) -> None:
        self._begun = _thread_times()

    def share(self) -> float:
        """Return the waits over the time in which a thread could have run; 0.0 where the system does not count it."""
        ran, waited = (now - begun for now, begun in zip(_thread_times(), self._begun, strict=True))
        return waited / (ran + waited) if waited > 0 else 0.0


def _thread_times() -> tuple[int, int]:
    """Return the nanoseconds for which the threads have run, and have waited to run."""
    ran = waited = 0
    for file in (_PROC / "task").glob("*/schedstat"):
        try:
            times = file.read_text().split()
        except OSError:  # the thread has ended
            continue
        ran, waited = ran + int(times[0]), waited + int(times[1])
    return ran, waited


def busy_advice(share: float) -> str:
    """Return what to say when threads wait for this share of their time; "" below MAX_WAIT_SHARE."""
    if share <= MAX_WAIT_SHARE:
        return ""
    return (
        f"other programs use the processors: the model's threads wait for {share:.0%} of their time, and its tokens "
        f"take {1.0 / max(0.01, 1.0 - share):.1f} times as long"
    )
