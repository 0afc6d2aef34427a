"""The budget of lines by folder."""

from __future__ import annotations

from pathlib import Path

from tools.check_sizes import PACKAGES, budget, problems, write


def tree(root: Path, rows: str, total: str = "9,000", **files: int) -> Path:
    for package in PACKAGES:
        (root / package).mkdir(parents=True)
    for name, num_lines in files.items():
        file = root / f"{name.replace('__', '/')}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("x = 1\n" * num_lines)
    (root / "CONTRIBUTING.md").write_text(
        f"# Title\n\n| folder | lines |\n| --- | --- |\n| all of it | {total} |\n{rows}\nEnd.\n"
    )
    return root


def test_a_folder_above_its_row_is_named(tmp_path: Path) -> None:
    rows = "| `server/` | 3 |\n| `server/api/` | 1,003 |\n"
    files = {"server__a": 3, "server__api__b": 1000, "server__api__deep__c": 4}
    [line] = problems(tree(tmp_path, rows, **files))
    assert line.startswith("server/api has 1,004 lines, and its budget in CONTRIBUTING.md is 1,003")


def test_rows_and_folders_belong_together(tmp_path: Path) -> None:
    found = problems(tree(tmp_path, "| `cache/old/` | 5 |\n", cache__new__a=5))
    assert found == [f"cache/{name} is missing in the table or the tree" for name in ("new", "old")]


def test_the_sum_counts_too(tmp_path: Path) -> None:
    [line] = problems(tree(tmp_path, "| `cache/` | 5 |\n| `server/` | 5 |\n", "6", cache__a=3, server__a=4))
    assert line.startswith("all of it has 7 lines, and its budget in CONTRIBUTING.md is 6")


def test_folders_get_their_room_again_and_the_sum_stays(tmp_path: Path) -> None:
    root = tree(tmp_path, "| `cache/old/` | 5 |\n| `server/` | 1 |\n", "2,000", cache__a=3, server__a=1000)
    write(root)
    assert budget(root) == {"all of it": 2000, "cache": 50, "server": 1050}
    assert not problems(root)
    assert (root / "CONTRIBUTING.md").read_text().endswith("| `server/` | 1,050 |\n\nEnd.\n")
