"""A gateway that gives Redis all the time it needs: no verdict depends on a busy machine."""

from __future__ import annotations

import sys
from functools import partial

import server.gateway
from cache.redis_index import ReaderSettings
from tests.waiting import HANG_S

server.gateway.ReaderSettings = partial(ReaderSettings, deadline_s=HANG_S)  # type: ignore[misc, assignment]

if __name__ == "__main__":
    sys.exit(server.gateway.main(sys.argv[1:]))
