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
NOT_BENCHES: Final = {"__main__", "device_rates", "private_redis", "progress", "random_model", "report", "requantised"}
FOLDER: Final = Path(__file__).parent
PACKAGES: Final = {"benchmarks": FOLDER, "benchmarks.dev": FOLDER / "dev"}
"""The wheel has only the first."""


def modules() -> dict[str, str]:
    """Return the module of each bench: it has `main(argv) -> exit code`."""
    found = [
        (module.name, f"{package}.{module.name}")
        for package, folder in PACKAGES.items()
        for module in pkgutil.iter_modules([str(folder)])
        if not module.ispkg and module.name not in NOT_BENCHES
    ]
    return dict(sorted(found))


def main(argv: list[str]) -> int:
    benches = modules()
    if not argv or argv[0] not in benches:
        print(f"usage: headstart bench {{{','.join(benches)}}} [--json] [--plot FILE] [OPTIONS]", file=sys.stderr)
        if argv and not PACKAGES["benchmarks.dev"].is_dir():
            print(f"not installed: clone the repository and run `make bench ARGS={argv[0]}` there", file=sys.stderr)
        return 2
    name, *arguments = argv
    try:
        module = importlib.import_module(benches[name])
    except ImportError as error:
        print(f"headstart bench {name}: {missing_extra(error)}", file=sys.stderr)
        return 2
    if name in HAVE_A_BAR:
        return int(module.main(arguments))
    with elapsed(f"headstart bench {name} is measuring"):
        return int(module.main(arguments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
