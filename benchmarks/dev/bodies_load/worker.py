"""Workers without a model that also embed. Prints their URLs.

Run as `python -m benchmarks.dev.bodies_load.worker CONTEXT...`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
from functools import partial
from typing import Final

import uvloop

from benchmarks.dev.gateway_load import stub
from benchmarks.dev.gateway_load.processes import make_bundle
from worker.common.capabilities import EMBEDDINGS, TOKENS
from worker.wire import (
    Embedding,
    End,
    Finished,
    Started,
    pack,
    unpack_request,
)

SIZE: Final = 4
_EMBEDDED: Final = pack(Started(0)) + pack(Embedding(bytes(4 * SIZE)))
_END: Final = pack(Finished(0, "length")) + pack(End(0.0, 0.0, 0.0))


class Connection(stub.Connection):
    def _answer(self, path: bytes, body: bytes) -> None:
        if path == b"/generate" and unpack_request(body).embed is not None:
            self._stream(0, b"application/msgpack", _EMBEDDED, b"", _END)
            return
        super()._answer(path, body)
        self._worker.computed.clear()


async def serve(contexts: list[int]) -> None:
    """Serve two workers for each context: one of them embeds."""
    loop = asyncio.get_running_loop()
    made, _ = make_bundle()
    async with asyncio.TaskGroup() as group:
        for context in contexts:
            bundle = dataclasses.replace(made, max_model_len=context)
            urls = []
            for size in (0, SIZE):
                worker = stub.Worker(bundle, 0.0)
                server = await loop.create_server(partial(Connection, worker), "127.0.0.1", 0)
                urls.append(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
                worker.member = dataclasses.replace(
                    stub.make_member(bundle, f"stub-{context}-{size}", "1", urls[-1]),
                    capabilities=(EMBEDDINGS if size else TOKENS,),
                    embedding_size=size,
                )
                group.create_task(server.serve_forever())
            print(*urls, flush=True)


if __name__ == "__main__":
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve([int(context) for context in sys.argv[1:]]))
