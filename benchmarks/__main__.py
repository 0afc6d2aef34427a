"""`headstart bench NAME`: runs one measurement."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from pathlib import Path
from typing import Final

from benchmarks.progress import elapsed
from worker.common.extras import missing_extra

HAVE_A_BAR: Final = {"replay", "route"}
NOT_BENCHES: Final = {"__main__", "progress", "report"}


def names() -> list[str]:
    """Every module of this package that is a bench: it has `main(argv) -> exit code`."""
    modules = pkgutil.iter_modules([str(Path(__file__).parent)])
    return sorted(module.name for module in modules if not module.ispkg and module.name not in NOT_BENCHES)


def main(argv: list[str]) -> int:
    if not argv or argv[0] not in names():
        print(f"usage: headstart bench {{{','.join(names())}}} [--json] [--plot FILE] [OPTIONS]", file=sys.stderr)
        return 2
    try:
        module = importlib.import_module(f"benchmarks.{argv[0]}")
    except ImportError as error:
        print(f"headstart bench {argv[0]}: {missing_extra(error)}", file=sys.stderr)
        return 2
    if argv[0] in HAVE_A_BAR:
        return int(module.main(argv[1:]))
    with elapsed(f"headstart bench {argv[0]} is measuring"):
        return int(module.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
