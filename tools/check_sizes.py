"""Compare the product's lines of Python with the budget by folder in CONTRIBUTING.md.

python tools/check_sizes.py        list the folders that are above their row; `make check` runs it
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("cache", "server", "worker")
_ROW: Final = re.compile(r"^\| `(?P<folder>[\w/]+)/` \| (?P<lines>[\d,]+) \|", re.MULTILINE)


def lines_by_folder(root: Path) -> Counter[str]:
    """Return the lines of each folder, at most two levels deep: `server/api` has those of the folders in it."""
    found: Counter[str] = Counter()
    for package in PACKAGES:
        for file in (root / package).rglob("*.py"):
            folder = "/".join(file.relative_to(root).parent.parts[:2])
            found[folder] += len(file.read_text(encoding="utf-8").splitlines())
    return found


def budget(root: Path) -> dict[str, int]:
    """Return the rows of CONTRIBUTING.md."""
    page = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return {row["folder"]: int(row["lines"].replace(",", "")) for row in _ROW.finditer(page)}


def problems(root: Path) -> list[str]:
    """Return a line for each folder above its row, and for each row or folder without the other."""
    lines, rows = lines_by_folder(root), budget(root)
    above = [
        f"{folder}/ has {lines[folder]:,} lines, and its budget in CONTRIBUTING.md is {rows[folder]:,}: remove some, or"
        f" raise the row in a commit of its own"
        for folder in sorted(lines.keys() & rows.keys())
        if lines[folder] > rows[folder]
    ]
    return above + [f"{name}/ is missing in the table or the tree" for name in sorted(lines.keys() ^ rows.keys())]


def main() -> int:
    """Return 1 if there is a problem."""
    found = problems(ROOT)
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
