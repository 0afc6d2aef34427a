"""Banned words, forbidden openings and long sentences are found; plain prose is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_prose import findings


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ('"""Send it anew."""', "'anew': say again"),
        ("# Nobody waits.", "'Nobody': say no request, no client, ..."),
        ("def foresee_step() -> None: ...", "'foresee': say plan"),
        ('"""What a worker holds."""', "a docstring begins with 'What': begin with a verb or the thing's name"),
        ('"""Send ' + "one word " * 13 + '."""', "a sentence of 28 words: Send one word one word one ..."),
        ('"""Send it again: no request waits. What follows is plain."""', None),
        ('text = "anew"', None),
    ],
)
def test_python(source: str, problem: str | None, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(source + "\n")
    assert [text for _, text in findings(file)] == ([] if problem is None else [problem])


def test_pages_are_checked_outside_of_code(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("It is sent.\nIt is sent anew, as `overlay_tokens` says.\n")
    assert list(findings(page)) == [(2, "'anew': say again")]
