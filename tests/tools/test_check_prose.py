"""Each rule of the check of prose finds its example, and plain prose passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_prose import findings

LONG = "Send " + "one word " * 13 + "."
FOUND_LONG = "a sentence of 27 words: Send one word one word one ..."


def problems(file: Path, text: str) -> list[str]:
    """Return the findings of a file with this text."""
    file.write_text(text + "\n")
    return [found for _, found in findings(file)]


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('"""Send it anew."""', "'anew': say again"),
        ("# Nobody waits.", "'Nobody': say no request, no client, ..."),
        ("def foresee_step() -> None: ...", "'foresee': say plan"),
        ('"""What a worker holds."""', "a text begins with 'What': begin with a verb or the thing's name"),
        ('"""That is sent."""', "a text begins with 'That': begin with a verb or the thing's name"),
        (f'"""{LONG}"""', FOUND_LONG),
        (f"# {LONG}", FOUND_LONG),
        ('"""Send it again: no request waits. What follows is plain."""', None),
        ('"""Wait for ever."""', "'for ever': say forever"),
        ("# It stays for good.", "'for good': say permanently"),
        ('text = "it waits for ever"', "'for ever': say forever"),
        ('text = f"worker {name} waits for ever"', "'for ever': say forever"),
        ('row = {"overlay_blocks": 1}', "'overlay': say pending prefixes"),
        ('text = "/v1/overlay"', None),
        ('"""Set `for ever` and `overlay`."""', None),
    ],
)
def test_python(source: str, problem: str | None, tmp_path: Path) -> None:
    assert problems(tmp_path / "module.py", source) == ([] if problem is None else [problem])


@pytest.mark.parametrize(("words", "problem"), [(25, False), (26, True)])
def test_sentences_of_pages_have_25_words(words: int, problem: bool, tmp_path: Path) -> None:
    text = " ".join(["word"] * words) + "."
    found = problems(tmp_path / "page.md", f"# A title\n\n- {text}\n- {text}")
    assert found == [f"a sentence of {words} words: word word word word word word ..."] * 2 * problem


def test_pages_are_checked_outside_of_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "It is sent.\nIt is sent anew, as `overlay` has it.\n\n```\nMend it for ever.\n```\nMend it.\n"
    page.write_text(text)
    assert list(findings(page)) == [(2, "'anew': say again"), (7, "'Mend': say fix")]
