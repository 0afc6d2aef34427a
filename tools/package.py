"""Write what a release has next to its wheel: the packed chart, and the bills of materials.

python -m tools.package FOLDER
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

from tools import sbom
from tools.install_k8s_tools import DEST

CHART: Final = Path(__file__).parents[1] / "helm" / "headstart"


def write(folder: Path) -> list[Path]:
    """Return the files. The chart has the version of its Chart.yaml; push it with `helm push FILE oci://REGISTRY`."""
    folder.mkdir(parents=True, exist_ok=True)
    helm = next((str(path) for name in ("helm4", "helm3", "helm") if (path := DEST / name).exists()), "helm")
    subprocess.run([helm, "package", CHART, "--destination", folder], check=True, capture_output=True)
    return [*sorted(folder.glob("headstart-*.tgz")), *sbom.write(folder)]


if __name__ == "__main__":
    for written in write(Path(sys.argv[1])):
        print(written)
