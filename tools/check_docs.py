"""Checks what the pages promise: links lead somewhere, named files, tests and make targets exist, commands are real.

Run by `make check`. Prints every broken promise as FILE:LINE and exits with 1 when there is one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
LINK: Final = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
TEST: Final = re.compile(r"^(tests/[\w/]+\.py)::(test_\w+)$")
CODE: Final = re.compile(r"`([^`\n]+)`")
MAKE: Final = re.compile(r"^(?:\$ )?make ([a-z][a-z0-9-]*)")
HEADSTART: Final = re.compile(r"^(?:\$ )?headstart ([a-z]+)\b")
FOLDERS: Final = tuple(
    f"{name}/"
    for name in (
        "server",
        "cache",
        "worker",
        "tests",
        "docs",
        "benchmarks",
        "helm",
        "tools",
        "requirements",
        "examples",
    )
)
PATH: Final = re.compile(rf"^(?:{'|'.join(FOLDERS)})[\w./-]*$")


def pages() -> list[Path]:
    """Every Markdown page of ours that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md", ":!tests/third_party"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands() -> set[str]:
    from server.cli import COMMANDS

    return set(COMMANDS)


def exists(path: str) -> bool:
    """A file or folder of the repository; a module may be named without its suffix."""
    return (ROOT / path).exists() or (ROOT / f"{path}.py").exists()


def is_test(file: str, name: str) -> bool:
    path = ROOT / file
    return path.is_file() and re.search(rf"^(async )?def {name}\(", path.read_text(), re.MULTILINE) is not None


def problems(page: Path, targets: set[str], names: set[str]) -> Iterator[tuple[int, str]]:
    in_fence = False
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_fence = not in_fence
            continue
        spans = [line.strip()] if in_fence else CODE.findall(line)
        found = {
            f"there is no `make {target}`" for span in spans for target in MAKE.findall(span) if target not in targets
        }
        found |= {
            f"there is no `headstart {name}`" for s in spans for name in HEADSTART.findall(s) if name not in names
        }
        if not in_fence:
            found |= {f"{span} does not exist" for span in spans if PATH.match(span) and not exists(span)}
            tests = [match for span in spans if (match := TEST.match(span)) is not None]
            found |= {f"there is no test {match[0]}" for match in tests if not is_test(match[1], match[2])}
            files = [target.split("#")[0] for target in LINK.findall(line) if "://" not in target]
            found |= {f"the link to {file} leads nowhere" for file in files if not (page.parent / file).exists()}
        for text in sorted(found):
            yield number, text


def main() -> int:
    sys.path.insert(0, str(ROOT))
    targets, names = make_targets(), commands()
    found = [(page, *problem) for page in pages() for problem in problems(page, targets, names)]
    for page, number, text in found:
        print(f"{page.relative_to(ROOT)}:{number}: {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
