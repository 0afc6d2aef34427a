"""Each rule of the check of prose finds its example, and plain prose passes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_prose
from tools.check_prose import ROOT, TURNS, findings

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


@pytest.mark.parametrize("kind", ["docstring", "comment", "string", "page"])
def test_turns(kind: str, tmp_path: Path) -> None:
    """A turn is found in every kind of text, and only by its own rule."""
    texts = {"docstring": '"""Mend it."""', "comment": "# Mend it.", "string": 'x = "mend it"', "page": "Mend it."}
    file = tmp_path / ("page.md" if kind == "page" else "module.py")
    assert problems(file, texts[kind]) in (["'Mend': say fix"], ["'mend': say fix"])


def test_every_rule_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without their rules the examples pass."""
    monkeypatch.setattr(check_prose, "_TURNS", [])
    assert problems(tmp_path / "module.py", '"""Mend it."""\n# Wait for ever.\nx = "it waits for ever"') == []
    monkeypatch.setattr(check_prose, "MAX_PAGE_WORDS", 99)
    assert problems(tmp_path / "page.md", LONG) == []
    monkeypatch.setattr(check_prose, "MAX_TEST_NAME", 99)
    assert problems(tmp_path / "test_module.py", f"def test_{'x' * 60}() -> None: ...") == []
    monkeypatch.setattr(check_prose, "in_literal", lambda text, number: iter(()))
    assert problems(tmp_path / "module.py", 'row = {"overlay_blocks": 1}') == []


def test_each_docstring_is_reported_once(tmp_path: Path) -> None:
    """A docstring is a string too: only one of the two rules reads it."""
    source = '"""Mend it."""\n\n\nclass Box:\n    """Mend it."""\n\n    size: int\n    """Mend it."""\n'
    (tmp_path / "module.py").write_text(source)
    assert list(findings(tmp_path / "module.py")) == [(line, "'Mend': say fix") for line in (1, 5, 8)]


def test_the_rules_name_a_plain_form() -> None:
    assert all(TURNS.values())


@pytest.mark.parametrize(("words", "problem"), [(25, False), (26, True)])
def test_sentences_of_pages_have_25_words(words: int, problem: bool, tmp_path: Path) -> None:
    text = " ".join(["word"] * words) + "."
    found = problems(tmp_path / "page.md", f"# A title\n\n- {text}\n- {text}")
    assert found == [f"a sentence of {words} words: word word word word word word ..."] * 2 * problem


@pytest.mark.parametrize(("length", "problem"), [(60, False), (61, True)])
def test_names_of_tests_have_60_characters(length: int, problem: bool, tmp_path: Path) -> None:
    name = "test_" + "x" * (length - 5)
    for form in ("def", "async def"):
        found = problems(tmp_path / "module.py", f"{form} {name}() -> None: ...")
        assert found == [f"a test's name of {length} characters: put the sentence in the docstring"] * problem


def test_pages_are_checked_outside_of_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    text = "It is sent.\nIt is sent anew, as `overlay` has it.\n\n```\nMend it for ever.\n```\nMend it.\n"
    page.write_text(text)
    assert list(findings(page)) == [(2, "'anew': say again"), (7, "'Mend': say fix")]


def test_strings_of_tests_are_free() -> None:
    """Tests write what others send, so only their docstrings and comments are read."""
    assert not [text for _, text in findings(ROOT / "tests" / "tools" / "test_check_prose.py")]
