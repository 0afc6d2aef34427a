"""Docstrings and comments that name what is not there are found; what is there is not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_docs import dead_references

NAMES = {"CancelOnDisconnect", "Models"}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('Source: docs/architecture.md, "Resume".', 'docs/architecture.md has no section "Resume"'),
        ("Source: docs/nothing.md.", "docs/nothing.md does not exist"),
        ("See `WaitingQueue`.", "there is no class WaitingQueue"),
        ("See `server.http.nothing`.", "there is no server.http.nothing"),
        ("See `server.http.stream.Nothing`.", "there is no server.http.stream.Nothing"),
        ("Run by tests/server/test_nothing.py.", "tests/server/test_nothing.py does not exist"),
        ('Source: docs/architecture/blocks.md, "The block hash".', None),
        ("See `CancelOnDisconnect.end`, `Models` and `None`.", None),
        ("See `server.http.stream.CancelOnDisconnect.end`, `server.http` and `cache`.", None),
        ("See docs/api.md and tests/server/test_app.py.", None),
    ],
)
@pytest.mark.parametrize("kind", ["module", "class", "comment"])
def test_references(text: str, problem: str | None, kind: str, tmp_path: Path) -> None:
    file = tmp_path / "module.py"
    file.write_text(
        {"module": f'"""{text}\n"""\n', "class": f"class A:\n    '''{text}'''\n", "comment": f"# {text}\n"}[kind]
    )
    assert [found for _, found in dead_references(file, NAMES)] == ([] if problem is None else [problem])


def test_modules_that_a_package_lists(tmp_path: Path) -> None:
    (tmp_path / "pieces.py").touch()
    package = tmp_path / "__init__.py"
    package.write_text('"""Parts.\n\npieces     what is told apart     reasoning  thoughts\n"""\n')
    assert list(dead_references(package, NAMES)) == [(1, "there is no module reasoning here")]
