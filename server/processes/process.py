"""One of the processes of `headstart gateway --processes N`; its sockets come from the parent.

python -m server.processes.process NUMBER PUBLIC_FD OPS_FD LIMITS_FILE [options of `headstart gateway`]
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import uvloop

from server.auth.limit_table import LimitTable
from server.config import GatewayConfig, parse
from server.gateway import REFUSED, Gateway
from server.logs import configure_logging

PATIENCE_S: Final = 5.0
"""A process in another's place answers nobody before it knows the workers that the other knew."""


def share_of(config: GatewayConfig) -> GatewayConfig:
    """What one of the processes may do: bounds of the whole are divided."""
    count = config.processes
    return replace(
        config,
        processes=1,
        max_queued_tokens=max(1, config.max_queued_tokens // count),
        max_connections=max(1, config.max_connections // count),
    )


async def _serve(config: GatewayConfig, limits: LimitTable, public: socket.socket, ops: socket.socket) -> None:
    gateway = Gateway(config, limits)
    await gateway.run(gateway.front(public), ops, PATIENCE_S)


def main(argv: Sequence[str]) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    number, public_fd, ops_fd, limits_file, *options = argv
    try:
        config = parse(options)
        configure_logging(config.log_level, config.log_format)
        limits = LimitTable.shared(Path(limits_file), int(number))
        with (
            socket.socket(fileno=int(public_fd)) as public,
            socket.socket(fileno=int(ops_fd)) as ops,
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            runner.run(_serve(share_of(config), limits, public, ops))
    except (ValueError, OSError) as error:
        print(f"headstart gateway: {error}", file=sys.stderr)
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
