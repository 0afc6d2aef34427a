"""Check the pages, docstrings and comments against the repository.

In pages: links and anchors, files, tests, make targets, commands, metrics, measured claims, tables, width and length.
In docstrings and comments: sections, files, modules and classes.
Run by `make check`. Prints each finding as FILE:LINE and exits with 1 when there is one.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
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
METRIC: Final = re.compile(r"^headstart_[a-z_]+(?=$|[{*])")
LISTED: Final = re.compile(r"(?:^|\s{3})([a-z][a-z_]+)  +\S", re.MULTILINE)
HEADING: Final = re.compile(r"^#+ (.+)$", re.MULTILINE)
DASHES: Final = re.compile(r"^\|(?: *:?-+:? *\|)+$")
RESULTS: Final = re.compile(r"RESULTS\.md(?!#)")
MAX_WIDTH: Final = 120
"""The width of a line that Markdown can wrap."""
MAX_LINES: Final = 300
MAX_WORDS: Final = 24_000
"""The bound of all pages by hand together, without code blocks and targets of links."""


def pages(pattern: str = "*.md") -> list[Path]:
    """Return every Markdown page, or file of another pattern, that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", pattern]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return [ROOT / line for line in listed.splitlines() if (ROOT / line).is_file()]


def bounded_pages() -> list[Path]:
    """Return the pages whose width and length have a bound: those in docs and at the top."""
    return [page for page in pages() if page.parent == ROOT or page.is_relative_to(ROOT / "docs")]


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def commands() -> set[str]:
    from server.cli.commands import COMMANDS

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
            found |= dead_links(page, line)
        for text in sorted(found):
            yield number, text


def dead_links(page: Path, line: str) -> set[str]:
    """Return the problems of a line's links into the repository: a file or an anchor that does not exist."""
    found = set()
    for target in LINK.findall(line):
        file, _, anchor = target.partition("#")
        linked = page.parent / file if file else page
        if "://" in target:
            continue
        if not linked.exists():
            found.add(f"the link to {file} leads nowhere")
        elif anchor and linked.suffix == ".md" and anchor not in anchors(linked):
            found.add(f"{file or page.name} has no anchor #{anchor}")
    return found


@cache
def anchors(page: Path) -> frozenset[str]:
    """Return the anchors that GitHub gives a page's headings."""
    titles = HEADING.findall(page.read_text(encoding="utf-8"))
    return frozenset(re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles)


def unknown_metrics(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the metrics of a page that the generated list of all metrics lacks. A name may be a beginning (`_*`)."""
    listed = (ROOT / "docs" / "kubernetes" / "all_metrics.md").read_text(encoding="utf-8")
    for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), start=1):
        for name in (match[0] for span in CODE.findall(line) if (match := METRIC.match(span))):
            end = "" if name.endswith("_") else "`"
            if f"`{re.sub('_(bucket|count|sum)$', '', name)}{end}" not in listed:
                yield number, f"there is no metric {name}"


def unproven(text: str) -> Iterator[tuple[int, str]]:
    """Yield the sentences that call something measured and name the page of results, but no section of it."""
    start = 0
    for end in [*re.finditer(r"(?<=[.;:])\s|\n\s*\n|\n\s*[-|*]", text), None]:
        sentence = text[start : end.start() if end else len(text)]
        if re.search(r"\bmeasured\b", sentence, re.IGNORECASE) and RESULTS.search(sentence):
            yield text.count("\n", 0, start) + 1, "a measured claim names no section of RESULTS.md"
        start = end.end() if end else 0


def oversized(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the lines of prose that are too wide, and a page that is too long."""
    lines = page.read_text(encoding="utf-8").splitlines()
    in_fence = False
    for number, line in enumerate(lines, start=1):
        in_fence ^= line.lstrip().startswith("```")
        can_wrap = not in_fence and not line.startswith(("|", "#", "![")) and " " in line[:MAX_WIDTH].strip()
        if can_wrap and len(line) > MAX_WIDTH:
            yield number, f"a line of {len(line)} characters"
    if len(lines) > MAX_LINES:
        yield len(lines), f"a page of {len(lines)} lines"


def broken_tables(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the first rows of tables that no line of dashes follows: they are shown as plain text."""
    before, in_fence = "", False
    lines = page.read_text(encoding="utf-8").splitlines()
    for number, (line, after) in enumerate(zip(lines, [*lines[1:], ""], strict=True), start=1):
        in_fence ^= line.lstrip().startswith("```")
        is_first = line.startswith("|") and not before.startswith("|")
        if is_first and not in_fence and not DASHES.match(after):
            yield number, "a row without the head of a table"
        before = line


def num_words(page: Path) -> int:
    """Return the words of a page, 0 of one that is generated."""
    text = page.read_text(encoding="utf-8")
    if page.name in ("CHANGELOG.md", "values.md") or "Written by tools/" in text:
        return 0
    text = re.sub(r"^ *```.*?^ *```|(?<=\])\([^)]*\)", "", text, flags=re.DOTALL | re.MULTILINE)
    return sum(re.search(r"\w", word) is not None for word in text.split())


def said(source: str) -> Iterator[tuple[int, str]]:
    """Yield the docstrings and comments of a module, with their first lines."""
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
    found += [(page, *problem) for page in pages() for problem in unproven(page.read_text(encoding="utf-8"))]
    found += [(page, *problem) for page in bounded_pages() for problem in oversized(page)]
    found += [(page, *problem) for page in bounded_pages() for problem in unknown_metrics(page)]
    found += [(page, *problem) for page in pages() for problem in broken_tables(page)]
    if (words := sum(map(num_words, bounded_pages()))) > MAX_WORDS:
        found.append(
            (ROOT / "docs", 1, f"the pages by hand have {words:,} words, of at most {MAX_WORDS:,}: cut others")
        )
    for page, number, text in found:
        print(f"{page.relative_to(ROOT)}:{number}: {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
