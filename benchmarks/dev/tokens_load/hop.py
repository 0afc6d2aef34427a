"""The least that a process between two others can do: read a frame and write it. `python -m ... PORT`."""

from __future__ import annotations

import asyncio
import sys
from typing import cast

import uvloop


class Hop(asyncio.Protocol):
    """Sends each frame back."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)


async def serve(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Hop, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(serve(int(sys.argv[1])))
