"""Pages, docstrings and comments that contradict the repository are found; correct ones are not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.check_docs import ROOT, broken_tables, dead_links, dead_references, unknown_metrics

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


@pytest.mark.parametrize(
    ("line", "problems"),
    [
        ("[a](nothing.md) and [b](https://example.com/nothing.md#x)", {"the link to nothing.md leads nowhere"}),
        ("[a](CONTRIBUTING.md#no-section)", {"CONTRIBUTING.md has no anchor #no-section"}),
        ("[a](#no-section)", {"README.md has no anchor #no-section"}),
        ("[a](CONTRIBUTING.md#where-to-add-what), [b](#one-command), [c](docs/images)", set()),
    ],
)
def test_links(line: str, problems: set[str]) -> None:
    assert dead_links(ROOT / "README.md", line) == problems


def test_metrics_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "`headstart_usage_*`, `headstart_workers{state}`, `headstart_request_seconds_count`\n"
        "`headstart_inter_token_latency_seconds`, `headstart_work`, `headstart_used_*`\n"
    )
    unknown = "headstart_inter_token_latency_seconds", "headstart_work", "headstart_used_"
    assert list(unknown_metrics(page)) == [(2, f"there is no metric {name}") for name in unknown]


def test_a_row_that_an_empty_line_parts_from_its_table(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("| a | b |\n| --- |:-:|\n| 1 | 2 |\n\n| 3 | 4 |\n| 5 | 6 |\n\n```\n| not a table |\n```\n| end |\n")
    assert [number for number, _ in broken_tables(page)] == [5, 11]
