"""The count of files that mention a feature."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

from tools.spread import FEATURES, ROOT, Feature, foreign_lines


def test_own_files_and_folders_are_not_counted(tmp_path: Path) -> None:
    texts = {
        "cache/store.py": "x",
        "server/room/a.py": "class Copies",
        "worker/b.py": "x\nuses = Copies",
        "tools/c.py": "Copies",
    }
    for name, text in texts.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    found = foreign_lines(Feature("copies", r"\bCopies\b", ("server/room/",)), tmp_path)
    assert found == {"worker/b.py": ["2: uses = Copies"]}


def test_each_feature_has_its_room() -> None:
    """A renamed file or class would leave a feature that nothing mentions."""
    for feature in FEATURES:
        texts = [
            file.read_text()
            for name in feature.own
            for file in ((ROOT / name).rglob("*.py") if name.endswith("/") else [ROOT / name])
        ]
        assert any(re.search(feature.pattern, text) for text in texts), feature.name
