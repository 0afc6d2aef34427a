"""The table of docs/architecture.md that shows which engines the product's lines serve."""

from __future__ import annotations

import pytest

from tools import lines


@pytest.mark.parametrize(
    ("path", "begins"),
    [
        ("worker/scheduler/plan.py", "Headstart's own"),
        ("server/text/formats/table.py", "the gateway's own text"),
        ("worker/adapter/vllm.py", "other engines"),
        ("server/auth/limits.py", "both"),
        ("worker/engine_room.py", "both"),
    ],
)
def test_a_file_has_the_row_of_its_folder(path: str, begins: str) -> None:
    assert lines.owner_of(path).startswith(begins)


def test_a_page_is_stale_when_a_row_or_a_number_is_off() -> None:
    found = lines.lines()
    assert not lines.is_stale(lines.table(found), found)
    moved = found.copy()
    moved[next(iter(lines.OWNERS))] += lines.MAX_OFF + 1
    assert lines.is_stale(lines.table(moved), found)
    assert lines.is_stale(lines.table(found).replace("both", "all"), found)
