"""Compare the product's lines of Python with the budget in CONTRIBUTING.md: a sum, and a row for each folder.

python tools/check_sizes.py            list what is above its row; `make check` runs it
python tools/check_sizes.py --write    give each folder its lines and some room again; the sum stays
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PACKAGES: Final = ("cache", "server", "worker")
SUM: Final = "all of it"
_ROW: Final = re.compile(r"^\| (?P<name>`[\w/]+/`|all of it) \| (?P<lines>[\d,]+) \|\n", re.MULTILINE)
# The room of a folder: a recipe fits into it, and what grows for long is seen.
_ROOM_SHARE: Final = 20
_LEAST_ROOM: Final = 40


def lines_by_folder(root: Path) -> Counter[str]:
    """Return the lines of each folder, at most two levels deep: `server/api` has those of the folders in it."""
    found: Counter[str] = Counter()
    for package in PACKAGES:
        for file in (root / package).rglob("*.py"):
            folder = "/".join(file.relative_to(root).parent.parts[:2])
            found[folder] += len(file.read_text(encoding="utf-8").splitlines())
    return found


def budget(root: Path) -> dict[str, int]:
    """Return the rows of CONTRIBUTING.md, with the sum under `SUM`."""
    page = (root / "CONTRIBUTING.md").read_text(encoding="utf-8")
    return {row["name"].strip("`/"): int(row["lines"].replace(",", "")) for row in _ROW.finditer(page)}


def problems(root: Path) -> list[str]:
    """Return a line for each row that is exceeded, and for each row or folder without the other."""
    lines, rows = lines_by_folder(root), budget(root)
    lines[SUM] = lines.total()
    above = [
        f"{name} has {lines[name]:,} lines, and its budget in CONTRIBUTING.md is {rows[name]:,}: see The budget there"
        for name in sorted(lines.keys() & rows.keys())
        if lines[name] > rows[name]
    ]
    return above + [f"{name} is missing in the table or the tree" for name in sorted(lines.keys() ^ rows.keys())]


def write(root: Path) -> None:
    """Give each folder a row of its lines and its room, in tens."""
    page = root / "CONTRIBUTING.md"
    text = page.read_text(encoding="utf-8")
    table = f"| {SUM} | {budget(root)[SUM]:,} |\n"
    for folder, lines in sorted(lines_by_folder(root).items()):
        room = max(lines // _ROOM_SHARE, _LEAST_ROOM)
        table += f"| `{folder}/` | {-(-(lines + room) // 10) * 10:,} |\n"
    first = next(_ROW.finditer(text))
    page.write_text(text[: first.start()] + table + _ROW.sub("", text[first.start() :]), encoding="utf-8")


def main(arguments: list[str]) -> int:
    """Return 1 if there is a problem."""
    if arguments == ["--write"]:
        write(ROOT)
    found = problems(ROOT)
    print("\n".join(found), end="\n" if found else "")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
