"""Run every suite of the Makefile, one after the other, and print one table.

python -m tools.test_all [SUITE ...]        `make test-all` runs it, with all suites

A suite that fails or ends early does not stop the others. The results of a commit are kept in .venv/test-all: started
again, it goes on with the suites that have none. Exit code 1: something failed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
SUITES: Final = (
    *("test", "test-e2e", "test-k8s", "test-faults", "test-clients", "test-browser", "test-vllm", "test-deep"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one suite."""

    suite: str
    num_passed: int
    num_failed: int
    num_skipped: int
    took_s: float
    commit: str

    def __str__(self) -> str:
        counts = f"{self.num_passed:7,} {self.num_failed:7,} {self.num_skipped:7,}"
        return f"{self.suite:14} {counts} {self.took_s:8,.0f}  {self.commit}"


HEADER: Final = f"{'suite':14} {'passed':>7} {'failed':>7} {'skipped':>7} {'seconds':>8}  commit"


def read(suite: str, file: Path, commit: str) -> Row:
    """Return the result in pytest's file of JUnit's form. One that is missing or broken counts as a failure."""
    try:
        found = list(ET.parse(file).getroot().iter("testsuite"))
    except (OSError, ET.ParseError):
        return Row(suite, 0, 1, 0, 0.0, commit)

    def total(name: str) -> float:
        return sum(float(each.get(name, 0)) for each in found)

    num_failed, num_skipped = int(total("failures") + total("errors")), int(total("skipped"))
    return Row(suite, int(total("tests")) - num_failed - num_skipped, num_failed, num_skipped, total("time"), commit)


def run(suite: str, file: Path) -> None:
    """Run a suite, which writes the file when it ends."""
    print(f"== make {suite}", flush=True)
    begun_s = time.monotonic()
    partial = file.with_suffix(".partial")
    partial.unlink(missing_ok=True)
    code = subprocess.run(["make", suite, f"ARGS=--junitxml={partial}"], cwd=ROOT, check=False).returncode
    print(f"== make {suite}: exit code {code} after {time.monotonic() - begun_s:,.0f} s", flush=True)
    if partial.exists():
        partial.rename(file)


def current_commit() -> str:
    """Return the commit of the checkout, with a `+` if files have changed since."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")


def main(argv: Sequence[str]) -> int:
    """Return 1 if a suite failed."""
    parser = argparse.ArgumentParser(description="Run every suite, and print one table.")
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help="(default: all)")
    suites = parser.parse_args(argv).suites or SUITES
    commit = current_commit()
    folder = ROOT / ".venv" / "test-all" / commit
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for suite in suites:
        file = folder / f"{suite}.xml"
        if not file.exists():
            run(suite, file)
        rows.append(read(suite, file, commit))
    print("\n".join([HEADER, *map(str, rows)]))
    return int(any(row.num_failed for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
