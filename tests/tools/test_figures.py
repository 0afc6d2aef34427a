"""The figures of the pages are those of the benches' results: a changed digit, or a changed command, is stale."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import figures, picture


@pytest.mark.parametrize("page", figures.PAGES)
def test_a_changed_digit_is_stale(page: str) -> None:
    text = (figures.ROOT / page).read_text(encoding="utf-8")
    assert figures.written(text) == text
    for block in re.finditer(r"<!-- figures: .*?<!-- end of figures -->", text, re.DOTALL):
        for digit in re.compile(r"\d").finditer(text, block.start(), block.end()):
            changed = text[: digit.start()] + str((int(digit[0]) + 1) % 10) + text[digit.end() :]
            assert figures.written(changed) == text


def test_a_missed_goal_is_shown() -> None:
    run = {"missed": {"a": "<= 1"}, "figures": {"a": 1.5}}
    assert figures.missed(run) == "Goals that this run **missed**: `a` 1.5 (goal <= 1)."
    assert figures.missed({"missed": {}, "figures": {}}) == "It met all its goals."


@pytest.mark.deep
def test_the_router_still_gives_the_figures_of_the_pages() -> None:
    run = figures.result("chats")
    command = [Path(sys.executable).with_name("headstart"), *run["command"].split()[1:], "--jobs", "1"]
    printed = subprocess.run(command, cwd=figures.ROOT, check=True, capture_output=True, text=True).stdout
    assert json.loads(printed.splitlines()[-1])["figures"] == pytest.approx(run["figures"], rel=1e-6)
    recorded = {policy: picture.record(policy) for policy in picture.POLICIES_SHOWN}
    assert picture.figures(recorded) == pytest.approx(figures.result("agents")["figures"], rel=1e-6)
