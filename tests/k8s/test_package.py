"""`make package`: the files of a release, their digests, and a chart that names the images of the registry."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from tests.k8s.tools import DEST, succeed
from tools import package


def test_a_release_has_its_files_and_their_digests(tmp_path: Path) -> None:
    registry = "registry.example/owner"
    files = package.write(tmp_path / "dist", registry)
    names = {file.name for file in files}
    assert {re.sub(r"\d+\.\d+\.\d+", "V", name) for name in names} >= {
        *("headstart-V-py3-none-any.whl", "headstart-V.tar.gz", "headstart-V.tgz"),
        *("gateway.cdx.json", "worker-cpu.cdx.json", "worker-cuda.cdx.json", package.SUMS),
    }
    lines = (tmp_path / "dist" / package.SUMS).read_text().splitlines()
    for digest, name in (line.split() for line in lines):
        assert hashlib.sha256((tmp_path / "dist" / name).read_bytes()).hexdigest() == digest
    assert {line.split()[1] for line in lines} == names - {package.SUMS}
    again = package.write(tmp_path / "again", registry)
    assert again[-1].read_text() == files[-1].read_text()
    [chart] = (tmp_path / "dist").glob("*.tgz")
    rendered = succeed(DEST / "helm4", "template", "chat", chart)
    images = set(re.findall(r"image: (\S+/headstart-\w+)", rendered))
    assert images == {f"{registry}/headstart-gateway", f"{registry}/headstart-worker"}
