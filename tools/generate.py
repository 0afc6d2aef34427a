"""Write all that is generated: pages, the chart's schema, the Grafana board. `make generate`, and `make check`.

python -m tools.generate          rewrites the files, and names those that changed
python -m tools.generate --check  exits with 1 and names the files that are stale
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from tools import configuration, dashboard, figures, lines, reference, values

ROOT: Final = Path(__file__).parent.parent
GENERATORS: Final[tuple[Callable[[], dict[Path, str]], ...]] = (
    *(configuration.files, reference.files, values.files, dashboard.files, lines.files, figures.files),
)
"""Each returns the text of its files, as the code has it now."""


def main(argv: list[str]) -> int:
    check = argv == ["--check"]
    written = [file for files in GENERATORS for file in files().items()]
    stale = [(path, text) for path, text in written if not path.is_file() or path.read_text(encoding="utf-8") != text]
    for path, text in stale:
        print(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}")
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and stale:
        print("what is generated is stale: run `make generate`")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
