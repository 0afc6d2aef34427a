"""A gateway that waits longer for a lookup: less than the least delay of a fault, and enough on a busy machine."""

from __future__ import annotations

import sys
from functools import partial
from typing import Final

import server.gateway
from cache.redis_index import ReaderSettings

LOOKUP_S: Final = 0.15
assert server.gateway.ReaderSettings is ReaderSettings
server.gateway.ReaderSettings = partial(ReaderSettings, deadline_s=LOOKUP_S)  # type: ignore[misc, assignment]

if __name__ == "__main__":
    sys.exit(server.gateway.main(sys.argv[1:]))
