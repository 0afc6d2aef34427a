"""Checks what the pages promise: links lead somewhere, named files, tests and make targets exist, commands are real;
and that docstrings and comments name no section, file, module or class that is not there.

Run by `make check`. Prints every broken promise as FILE:LINE and exits with 1 when there is one.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
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
SECTION: Final = re.compile(r'([\w/]+\.md),\s+"([^"]+)"')
MODULE: Final = re.compile(r"`((?:server|cache|worker|benchmarks|tools)(?:\.\w+)+)")
CLASS: Final = re.compile(r"`([A-Z][a-z0-9]+(?:[A-Z][a-z0-9]+)+)\b")
FILE: Final = re.compile(rf"(?<![\w/.])((?:{'|'.join(FOLDERS)})[\w./-]+\.(?:py|md|sh|yaml|json))\b")
LISTED: Final = re.compile(r"(?:^|\s{3})([a-z][a-z_]+)  +\S", re.MULTILINE)


def pages(pattern: str = "*.md") -> list[Path]:
    """Every Markdown page, or file of another pattern, of ours that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern, ":!tests/third_party"]
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


def said(source: str) -> Iterator[tuple[int, str]]:
    """The docstrings and comments of a module, with their first lines."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string


def names_in(source: str) -> set[str]:
    """Return the names in code, without texts."""
    return {
        token.string for token in tokenize.generate_tokens(io.StringIO(source).readline) if token.type == tokenize.NAME
    }


def is_defined(dotted: str) -> bool:
    """A module, or a name that a module or class holds."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:count])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return set(parts[count:]) <= names_in(file.read_text(encoding="utf-8"))
    return ROOT.joinpath(*parts).is_dir()


def has_section(page: str, title: str) -> bool:
    path = ROOT / page
    return path.is_file() and re.search(rf"^#+ {re.escape(title)}$", path.read_text(), re.MULTILINE) is not None


def dead_references(file: Path, names: set[str]) -> Iterator[tuple[int, str]]:
    """Yield what a module's docstrings and comments name and what does not exist."""
    for number, text in said(file.read_text(encoding="utf-8")):
        found = {
            f'{page} has no section "{title}"' for page, title in SECTION.findall(text) if not has_section(page, title)
        }
        found |= {f"there is no {name}" for name in MODULE.findall(text) if not is_defined(name)}
        found |= {f"there is no class {name}" for name in CLASS.findall(text) if name not in names}
        found |= {f"{path} does not exist" for path in FILE.findall(text) if not exists(path)}
        if file.name == "__init__.py" and number == 1:
            listed = LISTED.findall(text)
            here = {path.stem for path in file.parent.iterdir()}
            if here.intersection(listed):
                found |= {f"there is no module {name} here" for name in listed if name not in here}
        for problem in sorted(found):
            yield number, problem


def main() -> int:
    sys.path.insert(0, str(ROOT))
    targets, names = make_targets(), commands()
    found = [(page, *problem) for page in pages() for problem in problems(page, targets, names)]
    modules = pages("*.py")
    known = set[str]().union(*(names_in(module.read_text(encoding="utf-8")) for module in modules))
    found += [(module, *problem) for module in modules for problem in dead_references(module, known)]
    for page, number, text in found:
        print(f"{page.relative_to(ROOT)}:{number}: {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
