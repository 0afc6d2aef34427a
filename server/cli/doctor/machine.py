"""Python, packages, and what the system allows."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from server.cli.doctor.check import Check

TESTED: Final = (3, 11)
MIN_OPEN_FILES: Final = 4096
"""A stream is two sockets of the gateway."""
MIN_FREE_BYTES: Final = 1 << 30
_REQUIREMENT: Final = re.compile(r"([\w.-]+)(?:\[[\w,-]+\])?\s*([^;]*)(?:;(.*))?")
_BOUND: Final = re.compile(r"(>=|<=|==|<|>)\s*([\d.]+)")


def checks() -> Iterator[Check]:
    yield python()
    yield packages()
    yield open_files()
    yield disk()


def python() -> Check:
    found = f"{platform.python_implementation()} {platform.python_version()} in {sys.prefix}"
    if sys.version_info[:2] != TESTED:
        return Check("python", "warn", found, "it is tested on Python 3.11 alone: with another, run `make test` first")
    return Check("python", "ok", found)


def packages() -> Check:
    """The gateway's own; the worker's are checked where they are imported."""
    try:
        needed = importlib.metadata.requires("headstart") or []
    except importlib.metadata.PackageNotFoundError:
        return Check("packages", "warn", "headstart itself is not installed", "run `make install`, or pip install it")
    wrong = []
    for requirement in needed:
        match = _REQUIREMENT.fullmatch(requirement)
        if match is None or (match[3] and "extra" in match[3]):
            continue
        if problem := _problem(match[1], match[2]):
            wrong.append(problem)
    version = importlib.metadata.version("headstart")
    if wrong:
        return Check("packages", "fail", "; ".join(wrong), "run `make install`: it installs what requirements/ pins")
    return Check("packages", "ok", f"headstart {version} and what it needs")


def _problem(name: str, bounds: str) -> str | None:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is missing"
    compare = {
        ">=": lambda a, b: a >= b,
        "<=": lambda a, b: a <= b,
        "<": lambda a, b: a < b,
        ">": lambda a, b: a > b,
        "==": lambda a, b: a == b,
    }
    own = _numbers(version)
    if all(compare[sign](own, _numbers(bound)) for sign, bound in _BOUND.findall(bounds)):
        return None
    return f"{name} {version} is not {bounds}"


def _numbers(version: str) -> tuple[int, ...]:
    """`2.13.0+cpu` -> (2, 13): trailing zeros do not count."""
    numbers = [int(part) for part in re.findall(r"\d+", re.split(r"[+a-zA-Z]", version)[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def open_files() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= MIN_OPEN_FILES:
        return Check("files", "ok", f"{'any number of' if soft == resource.RLIM_INFINITY else soft} open files allowed")
    limit = hard if hard != resource.RLIM_INFINITY else 65536
    mend = f"run `ulimit -n {limit}` before, or raise LimitNOFILE of the service"
    return Check("files", "warn", f"{soft} open files allowed: enough for about {soft // 2} streams at a time", mend)


def disk() -> Check:
    """Where temporary files go, and where models that are fetched go."""
    places = {"temporary files": Path(tempfile.gettempdir()), "fetched models": _hub_folder()}
    short = []
    for what, folder in places.items():
        if shutil.disk_usage(_existing(folder)).free < MIN_FREE_BYTES:
            short.append(f"{folder} ({what})")
    if short:
        return Check(
            "disk", "warn", f"less than 1 GiB free in {', '.join(short)}", "free some, or set TMPDIR / HF_HOME"
        )
    folder = _existing(places["fetched models"])
    return Check("disk", "ok", f"{shutil.disk_usage(folder).free / 2**30:,.0f} GiB free for fetched models in {folder}")


def _hub_folder() -> Path:
    return Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser()


def _existing(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if path.exists())
