"""A worker of a version to come: it speaks another protocol."""

from __future__ import annotations

import sys

import worker.assembly
import worker.wire

worker.wire.PROTOCOL_VERSION = 99  # type: ignore[misc]
worker.assembly.PROTOCOL_VERSION = 99  # type: ignore[misc]

from worker.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
