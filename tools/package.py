"""Write the files of a release: wheel, source archive, chart, bills of materials, and the digests of them all.

python -m tools.package FOLDER [--registry ghcr.io/OWNER]

With a registry, the chart names the images there. SHA256SUMS has the digest of each file.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tools import sbom
from tools.install_k8s_tools import DEST

ROOT: Final = Path(__file__).parents[1]
BUILD: Final = "import sys; from hatchling import build; build.build_wheel(sys.argv[1]); build.build_sdist(sys.argv[1])"
SUMS: Final = "SHA256SUMS"


def write(folder: Path, registry: str = "") -> list[Path]:
    """Return the files of an emptied folder. The chart has the version of its Chart.yaml."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", BUILD, folder.resolve()], cwd=ROOT, check=True, capture_output=True)
    pack_chart(folder, registry)
    sbom.write(folder)
    files = sorted(folder.iterdir())
    sums = folder / SUMS
    sums.write_text("".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in files))
    return [*files, sums]


def pack_chart(folder: Path, registry: str) -> None:
    helm = next((str(path) for name in ("helm4", "helm3", "helm") if (path := DEST / name).exists()), "helm")
    with tempfile.TemporaryDirectory() as copy:
        chart = Path(shutil.copytree(ROOT / "helm" / "headstart", Path(copy) / "headstart"))
        values = chart / "values.yaml"
        if registry:
            text = values.read_text(encoding="utf-8")
            named = text.replace("repository: headstart-", f"repository: {registry}/headstart-")
            values.write_text(named, encoding="utf-8")
        environment = {"SOURCE_DATE_EPOCH": "1580601600", **os.environ}
        subprocess.run(
            [helm, "package", chart, "--destination", folder], env=environment, check=True, capture_output=True
        )


def main() -> None:
    p = argparse.ArgumentParser(description="Write the files of a release.")
    p.add_argument("folder", type=Path)
    p.add_argument("--registry", default="", help="where the images are: ghcr.io/OWNER")
    options = p.parse_args()
    write(options.folder, options.registry)
    print((options.folder / SUMS).read_text(), end="")


if __name__ == "__main__":
    main()
