"""Where the tools are that tools/install_k8s_tools.py has installed."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent.parent
DEST: Final = ROOT / ".k8s"
CHART: Final = ROOT / "helm" / "headstart"
HELM_VERSIONS: Final = ("helm3", "helm4")
PYTHON: Final = DEST / "tools" / "bin" / "python"
HADOLINT: Final = DEST / "tools" / "bin" / "hadolint"
CHECKOV: Final = DEST / "checkov" / "bin" / "checkov"


def call(*command: str | Path, **options: object) -> subprocess.CompletedProcess[str]:
    """Run to the end, output captured; never raises on an exit status."""
    words = [str(word) for word in command]
    return subprocess.run(words, capture_output=True, text=True, check=False, **options)  # type: ignore[call-overload,no-any-return]


def succeed(*command: str | Path, **options: object) -> str:
    """The standard output of a command that must not fail."""
    done = call(*command, **options)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
