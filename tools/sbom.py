"""Write a CycloneDX bill of materials for each lock of the images: `python -m tools.sbom FOLDER`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.lock import LOCKS, REQUIREMENTS


def write(folder: Path) -> list[Path]:
    """Return the files, one for each lock. Equal locks give equal files."""
    folder.mkdir(parents=True, exist_ok=True)
    pyproject = REQUIREMENTS.parent / "pyproject.toml"
    files = []
    for name in LOCKS:
        file = folder / Path(name).with_suffix(".cdx.json")
        options = ["--no-validate", "--output-reproducible", "--short-PURLs", "--pyproject", pyproject, "-o", file]
        command = [sys.executable, "-m", "cyclonedx_py", "requirements", *options, REQUIREMENTS / name]
        subprocess.run(command, check=True, capture_output=True)
        files.append(file)
    return files


if __name__ == "__main__":
    for written in write(Path(sys.argv[1])):
        print(written)
