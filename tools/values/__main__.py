"""Write helm/headstart/values.schema.json and the tables in docs/kubernetes/values.md from the values' descriptions.

python -m tools.values          rewrites both
python -m tools.values --check  writes nothing and exits with 1 when something would change
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Final

import yaml

from tools.values.schema import schema
from tools.values.tables import with_tables

ROOT: Final = Path(__file__).parents[2]
CHART: Final = ROOT / "helm" / "headstart"
DOCS: Final = ROOT / "docs" / "kubernetes" / "values.md"


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m tools.values", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    stale = False
    for path, content in (
        (CHART / "values.schema.json", json.dumps(schema(), indent=1) + "\n"),
        (DOCS, with_tables(DOCS.read_text(), defaults)),
    ):
        if not path.exists() or path.read_text() != content:
            stale = True
            print(f"{'stale' if check else 'wrote'}: {path.relative_to(ROOT)}")
            if not check:
                path.write_text(content)
    return int(check and stale)


if __name__ == "__main__":
    sys.exit(main())
