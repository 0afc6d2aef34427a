"""Each bill of materials lists what its lock pins, with its hashes."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tools import sbom
from tools.lock import LOCKS, REQUIREMENTS


def test_every_pin_is_listed_with_its_hashes(tmp_path: Path) -> None:
    files = sbom.write(tmp_path)
    assert len(files) == len(LOCKS)
    for name, file in zip(LOCKS, files, strict=True):
        bill = json.loads(file.read_text())
        assert bill["bomFormat"] == "CycloneDX"
        assert bill["metadata"]["component"]["name"] == "headstart"
        pins = re.findall(r"^([\w.-]+)==(\S+) ", (REQUIREMENTS / name).read_text(), re.MULTILINE)
        listed = {(part["name"], part["version"]): part for part in bill["components"]}
        assert listed.keys() == set(pins)
        for part in listed.values():
            hashes = [each for reference in part["externalReferences"] for each in reference["hashes"]]
            assert {each["alg"] for each in hashes} == {"SHA-256"}


def test_equal_locks_give_equal_files(tmp_path: Path) -> None:
    first, second = (sbom.write(tmp_path / name)[0].read_bytes() for name in ("a", "b"))
    assert first == second
