"""Write all that is generated: pages, the chart's schema, the Grafana board. `make generate`, and `make check`.

python -m tools.generate          rewrites the files, and names those that changed
python -m tools.generate --check  exits with 1 and names the files that are stale
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
GENERATORS: Final = (
    *("tools.configuration", "tools.reference", "tools.values", "tools.dashboard", "tools.lines", "tools.figures"),
)


def main(argv: list[str]) -> int:
    """Run each generator in a process of its own: they import different parts."""
    failed = [name for name in GENERATORS if subprocess.run([sys.executable, "-m", name, *argv], cwd=ROOT).returncode]
    if failed and argv == ["--check"]:
        print("what is generated is stale: run `make generate`")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
