"""The figures of the pages are those of the benches' results: a changed digit, or a changed command, is stale."""

from __future__ import annotations

import re

import pytest

from tools import figures

DIGIT = re.compile(r"\d")


@pytest.mark.parametrize("page", figures.PAGES)
def test_a_changed_digit_is_stale(page: str) -> None:
    text = (figures.ROOT / page).read_text(encoding="utf-8")
    assert figures.written(text) == text
    for block in re.finditer(r"<!-- figures: .*?<!-- end of figures -->", text, re.DOTALL):
        for digit in DIGIT.finditer(text, block.start(), block.end()):
            changed = text[: digit.start()] + str((int(digit[0]) + 1) % 10) + text[digit.end() :]
            assert figures.written(changed) == text


def test_a_missed_goal_is_shown() -> None:
    run = {"missed": {"a": "<= 1"}, "figures": {"a": 1.5}}
    assert figures.missed(run) == "Goals that this run **missed**: `a` 1.5 (goal <= 1)."
    assert figures.missed({"missed": {}, "figures": {}}) == "It met all its goals."
