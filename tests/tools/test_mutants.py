"""Changes of a small product: which are made, and what its tests notice. It needs requirements/mutants.txt."""

from __future__ import annotations

import math
import random
from pathlib import Path

import pytest

pytest.importorskip("mutmut", reason="`make mutants` installs it")

from tools import mutants

PRODUCT = '''"""A product."""

import logging

log = logging.getLogger(__name__)
LIMIT: Final = 3


def bounded(value: int | None, limit: int = LIMIT) -> int:
    """Return at most `limit`."""
    assert value is not None and limit > 0
    log.info("a value: %d", value)
    if value > limit:
        raise ValueError(f"{value} is too large")
    return value + 1


def forgotten(value):
    return value - 1


def typed() -> str:
    text: str = "a b"
    return text
'''
TEST = """import pytest
from product.numbers import bounded

@pytest.mark.parametrize("value", range(4))
def test_small(value):
    assert bounded(value) == value + 1

def test_large():
    with pytest.raises(ValueError, match="4 is too large"):
        bounded(4)
"""
PROFILE = "from hypothesis import settings\nsettings.register_profile('mutants', derandomize=True)\n"


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files = {
        "product/numbers.py": PRODUCT.replace("import logging", "import logging\nfrom typing import Final", 1),
        "tests/test_numbers.py": TEST,
        "tests/test_others.py": "def test_others(): assert False",
        "tests/conftest.py": PROFILE,
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "TESTS", {"product": ("tests/test_*.py",)})
    return tmp_path


def test_what_changes() -> None:
    """Each statement at most once, and none that no test should hold."""
    changes = {}
    for seed in range(20):
        found = [draw() for draw in mutants.draws_of("p.py", PRODUCT, random.Random(seed))]
        made = [mutant for mutant in found if mutant is not None]
        lines = [mutant.line for mutant in made]
        assert len(set(lines)) == len(lines)
        changes |= {(mutant.line, mutant.after): mutant for mutant in made}
    assert {line for line, _ in changes} == {13, 14, 15, 19, 23}
    assert {"if value >= limit:", "pass", "return value - 1", "return value + 2"} <= {after for _, after in changes}


def test_what_tests_notice(tree: Path) -> None:
    before = {file: file.read_bytes() for file in tree.rglob("*.py")}
    sampled = mutants.sample(["product"], 100, seed=1)
    assert sampled == mutants.sample(["product"], 100, seed=1)
    results = list(mutants.run(sampled, math.inf))
    assert {mutant.line: outcome for mutant, outcome in results if mutant.line > 9} == {
        16: "killed",
        14: "killed",
        15: "killed",
        20: "survived",
        24: "mistyped",
    }
    text = mutants.report(results, len(sampled))
    assert "survived:\nproduct/numbers.py:20: return value - 1  ->  return value" in text
    assert {file: file.read_bytes() for file in tree.rglob("*.py")} == before
