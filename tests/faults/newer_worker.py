"""A worker of a version to come: it no longer speaks this protocol."""

from __future__ import annotations

import sys

import worker.loading.engine
import worker.wire

for module in (worker.wire, worker.loading.engine):
    module.PROTOCOL_VERSION = module.OLDEST_PROTOCOL = 99  # type: ignore[misc, attr-defined]

from worker.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
