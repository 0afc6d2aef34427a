"""Check the language of the house: banned words, openings of docstrings, and long sentences.

Run by `make check` over the names, docstrings and comments of the Python files, and over the Markdown pages. Prints
every finding as FILE:LINE and exits with 1 when there is one. CONTRIBUTING.md gives the rules.
"""

from __future__ import annotations

import ast
import re
import sys
import tokenize
from collections import Counter
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
TURNS: Final = {
    r"a moment ago": "recently",
    r"alone": "only, by itself",
    r"as far as": "if, to the extent",
    r"behind (it|its|one|them)": "after",
    r"books": "accounting",
    r"by then": "at that time",
    r"complain(s|t|ts|ed)?": "warn",
    r"doomed": "dropped",
    r"drips?": "trickle",
    r"for ever": "forever",
    r"for good": "permanently",
    r"for people": "human-readable",
    r"for want of": "for lack of",
    r"from (\S+ )?here on": "starting at",
    r"from (now|then|there|that|this|it|its \w+|the \w+) on": "starting at, after",
    r"genuine": "authentic, valid",
    r"heals?|healed": "repair",
    r"hears?|heard": "receive",
    r"heed(s|ed)?": "honour",
    r"in (the )?place of": "instead of",
    r"in vain": "wasted, for nothing",
    r"knows?|knew|known to know": "has, tracks, reads",
    r"lets|letting|let (it|a|an|the|them|others|no|one|each|every|its)": "allow, or the verb itself",
    r"lies?": "is stored, is",
    r"mend(s|ed|ing)?": "fix",
    r"no more(?! than\b)": "no longer",
    r"objections?": "reason to reject",
    r"of ours|our own": "built in, Headstart's",
    r"of use": "useful",
    r"says?|said|saying": "report, state, name, show",
    r"shall": "must, will",
    r"so (many|much|long)(?! (that|as)\b)": "that many, N",
    r"spare[ds]": "exclude, skip",
    r"strangers?|strange": "unknown, external",
    r"tells?|telling": "report, show",
    r"vouch(es|ed)?": "confirm",
    r"whom": "which worker, which request",
    r"br(eak|eaks|oke|oken) off": "end early",
}
"""Turns of phrase that follow another language's grammar, each with its plain form."""
MAX_WORDS: Final = 20
"""In one sentence of a docstring or a comment."""
MAX_PAGE_WORDS: Final = 25
"""In one sentence of a page."""
MAX_TEST_NAME: Final = 60
_BANNED: Final = re.compile(rf"(?<![A-Za-z])({'|'.join(SAY_INSTEAD)})(?![a-z])", re.IGNORECASE)
_TURNS: Final = [(re.compile(rf"\b({turn})\b", re.IGNORECASE), plain) for turn, plain in TURNS.items()]
_OPENING: Final = re.compile(r"(Of|What|Who|Whose|Whether|That)\b")
_SENTENCE_END: Final = re.compile(r"(?<=[.!?:;])[)\"`*]*\s+|\s->\s|\n\s*\n|\n\s*[-`|*#]|\n {4,}(?=\S+  )")
_CODE: Final = re.compile(r"`[^`\n]*`")
_FENCE: Final = re.compile(r"^( *)(```|~~~).*?^\1\2", re.MULTILINE | re.DOTALL)
_DIAGRAM: Final = re.compile(r"\S  +\S")
_LINK: Final = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_FIGURES: Final = re.compile(r"\d+")
PUBLIC_NAMES: Final = {"headstart_requests_booked"}
"""Metrics that programs of users read, whose names have a banned word."""
SKIPPED: Final = ("tools/check_prose.py",)


def findings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield each finding in a file with its line."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".md":
        yield from in_page(text)
        return
    is_test = file.is_relative_to(ROOT / "tests") or file.name.startswith("test_")
    for number, said_text in said(text):
        yield from bad_words(said_text, number)
        yield from long_sentences(said_text, number, MAX_WORDS)
        if opening := _OPENING.match(said_text):
            yield number, f"a text begins with {opening[0]!r}: begin with a verb or the thing's name"
    nodes = list(ast.walk(ast.parse(text)))
    docstrings = {node.value for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and not is_test and node not in docstrings:
            yield from in_literal(node.value, node.lineno)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and _is_long_test(node.name):
            yield node.lineno, f"a test's name of {len(node.name)} characters: put the sentence in the docstring"
    with file.open("rb") as source:
        for token in tokenize.tokenize(source.readline):
            if token.type == tokenize.NAME:
                yield from banned_words(token.string.replace("_", " "), token.start[0])


def _is_long_test(name: str) -> bool:
    return name.startswith("test_") and len(name) > MAX_TEST_NAME


def in_page(text: str) -> Iterator[tuple[int, str]]:
    """Yield the findings of a Markdown page, without its code."""
    prose = _CODE.sub("X", _FENCE.sub(lambda fence: "\n" * fence[0].count("\n"), text))
    prose = _LINK.sub(r"\1", prose)
    yield from bad_words(prose, 1)
    yield from long_sentences(prose, 1, MAX_PAGE_WORDS)


def in_literal(text: str, number: int) -> Iterator[tuple[int, str]]:
    """Yield the findings of a string: a text for people, or a key."""
    if " " in text:
        yield from bad_words(text, number)
    elif text.isidentifier() and text not in PUBLIC_NAMES:
        yield from banned_words(text.replace("_", " "), number)


def bad_words(text: str, first_line: int) -> Iterator[tuple[int, str]]:
    """Yield the banned words and turns of a text that begins at `first_line`, without its code."""
    plain = _CODE.sub("X", text)
    yield from banned_words(plain, first_line)
    for number, line in enumerate(plain.splitlines(), first_line):
        for turn, instead in _TURNS:
            for match in turn.finditer(line):
                yield number, f"{match[0]!r}: say {instead}"


def banned_words(text: str, first_line: int) -> Iterator[tuple[int, str]]:
    """Yield the banned words of a text that begins at `first_line`."""
    for number, line in enumerate(text.splitlines(), first_line):
        for word in _BANNED.findall(line):
            yield number, f"{word!r}: say {SAY_INSTEAD[word.lower()]}"


def long_sentences(text: str, first_line: int, most: int) -> Iterator[tuple[int, str]]:
    """Yield the sentences of more than `most` words, each with the line where it begins."""
    start = 0
    for end in [*_SENTENCE_END.finditer(text), None]:
        sentence = text[start : end.start() if end else len(text)]
        words = [word for word in sentence.split() if any(map(str.isalnum, word))]
        if len(words) > most and not _DIAGRAM.search(sentence):
            number = first_line + text.count("\n", 0, start)
            yield number, f"a sentence of {len(words)} words: {' '.join(words[:6])} ..."
        start = end.end() if end else 0


def main() -> int:
    """Check the files below the paths of the command line, or all of them. `--count` prints a number for each kind."""
    named = [(ROOT / path).resolve() for path in sys.argv[1:] if path != "--count"]
    files = [
        file
        for pattern in ("*.py", "*.md")
        for file in pages(pattern)
        if not str(file.relative_to(ROOT)).startswith(SKIPPED) and any(map(file.is_relative_to, named or [ROOT]))
    ]
    found = [(file, *finding) for file in files for finding in findings(file)]
    if "--count" in sys.argv:
        for kind, count in Counter(_FIGURES.sub("N", text.split(":")[0]) for _, _, text in found).most_common():
            print(f"{count:6} {kind}")
        print(f"{len(found):6} in all")
    else:
        for file, number, text in found:
            print(f"{file.relative_to(ROOT)}:{number}: {text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
