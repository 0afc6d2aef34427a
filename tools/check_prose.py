"""Check the language of the house: banned words, openings of docstrings, and long sentences.

Run by `make check` over the names, docstrings and comments of the Python files, and over the Markdown pages. Prints
every finding as FILE:LINE and exits with 1 when there is one. CONTRIBUTING.md gives the rules.
"""

from __future__ import annotations

import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tools.check_docs import pages, said  # noqa: E402 (also run as a script)

SAY_INSTEAD: Final = {
    "adrift": "finished in flight",
    "anew": "again",
    "beside": "next to, with",
    "booked": "counted, assigned",
    "buried": "failed",
    "bury": "fail all",
    "flights": "in-flight batches",
    "foresee": "plan",
    "foreseen": "planned",
    "foresight": "plan",
    "hurry": "shut down",
    "meanwhile": "while that runs",
    "nobody": "no request, no client, ...",
    "overlay": "pending prefixes",
    "patience": "timeout",
    "somebody": "a client, a tenant, ...",
    "stems": "prefix tree",
    "told": "report, show",
    "vetting": "verification",
}
"""Words of a private dialect, each with what to say instead."""
MAX_WORDS: Final = 25
"""In one sentence of a docstring. The rule is twenty; names and figures make a strict count unfair."""
_BANNED: Final = re.compile(rf"(?<![A-Za-z])({'|'.join(SAY_INSTEAD)})(?![a-z])", re.IGNORECASE)
_OPENING: Final = re.compile(r"(Of|What|Who|Whose|Whether)\b")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?:;])\s+|\s->\s|\n\s*\n|\n\s*[-`|]|\n {4,}(?=\S+  )")
_CODE: Final = re.compile(r"`[^`\n]*`")
_DIAGRAM: Final = re.compile(r"\S  +\S")
SKIPPED: Final = ("tests/third_party", "tools/check_prose.py")


def findings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each finding in a file with its line."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        yield from banned_words(_CODE.sub("", text), 1)
        return
    for number, said_text in said(text):
        yield from banned_words(said_text, number)
        if not said_text.startswith("#"):
            yield from bad_docstring(said_text, number)
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.NAME:
                yield from banned_words(token.string.replace("_", " "), token.start[0])


def banned_words(text: str, first_line: int) -> Iterator[tuple[int, str]]:
    """Yield the banned words of a text that begins at `first_line`."""
    for number, line in enumerate(text.splitlines(), first_line):
        for word in _BANNED.findall(line):
            yield number, f"{word!r}: say {SAY_INSTEAD[word.lower()]}"


def bad_docstring(text: str, number: int) -> Iterator[tuple[int, str]]:
    """Yield a forbidden opening and the sentences that are too long."""
    if opening := _OPENING.match(text):
        yield number, f"a docstring begins with {opening[0]!r}: begin with a verb or the thing's name"
    for sentence in _SENTENCE_END.split(text):
        num_words = len(sentence.split())
        if num_words > MAX_WORDS and not _DIAGRAM.search(sentence):
            yield number, f"a sentence of {num_words} words: {' '.join(sentence.split()[:6])} ..."


def main() -> int:
    files = [
        file
        for pattern in ("*.py", "*.md")
        for file in pages(pattern)
        if not str(file.relative_to(ROOT)).startswith(SKIPPED)
    ]
    found = [(file, *finding) for file in files for finding in findings(file)]
    for file, number, text in found:
        print(f"{file.relative_to(ROOT)}:{number}: {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
