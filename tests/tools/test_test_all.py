"""The table of all suites."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.test_all import SUITES, Row, main, read


def test_the_counts_of_a_suite(tmp_path: Path) -> None:
    file = tmp_path / "test.xml"
    file.write_text(
        '<testsuites><testsuite tests="12" failures="1" errors="2" skipped="3" time="4.5"/></testsuites>',
        encoding="utf-8",
    )
    assert read("test", file, "abc") == Row("test", 6, 3, 3, 4.5, "abc")


@pytest.mark.parametrize("content", [None, "", "<testsuites>"])
def test_a_suite_without_a_result_has_failed(content: str | None, tmp_path: Path) -> None:
    file = tmp_path / "test.xml"
    if content is not None:
        file.write_text(content)
    assert read("test", file, "abc").num_failed == 1


def test_every_suite_is_a_target() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    assert all(f"\n{suite}: " in makefile for suite in SUITES)


def test_an_unknown_suite_is_refused() -> None:
    with pytest.raises(SystemExit):
        main(["test-nothing"])
