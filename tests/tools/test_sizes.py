"""Modules of the product stay small: CONTRIBUTING.md gives the bounds, and ruff's C901 those of a function."""

from __future__ import annotations

from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[2]
MAX_LINES = 400
MAX_MEDIAN_LINES = 150


def test_no_module_is_too_long() -> None:
    lines = {
        file.relative_to(ROOT).as_posix(): len(file.read_text(encoding="utf-8").splitlines())
        for part in ("cache", "server", "worker")
        for file in (ROOT / part).rglob("*.py")
    }
    assert not {file: count for file, count in lines.items() if count > MAX_LINES}
    assert median(lines.values()) <= MAX_MEDIAN_LINES
