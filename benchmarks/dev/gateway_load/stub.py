"""Workers without a model: `python -m benchmarks.dev.gateway_load.stub --bundle FILE --redis URL [--num-workers N]`.

One raw asyncio protocol serves the wire protocol (/generate, /state, /bundle, /health/live), and OpenAI's chat for
proxies. An answer is `max_tokens` times one token, at once, or paced: one frame a stream at every tick. Prints the URL
of the first worker.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Final, cast

import uvloop

from cache.hashing import Namespace, hash_chain, index_entry
from cache.records import WorkerLoad, WorkerMember, WorkerState
from cache.redis_index import IndexWriter, SetChange
from cache.types import BlockHash, Epoch, IndexEntry, WorkerId
from worker.wire import (
    PROTOCOL_VERSION,
    End,
    Finished,
    GenerateRequest,
    Started,
    TokenizerBundle,
    Tokens,
    pack,
    unpack,
    unpack_request,
)

PUBLISH_S: Final = 0.1
"""Interval of one worker's publishes. Sixty-four workers share the process."""
TOKEN_ID: Final = 260  # " the" in SmolLM2's vocabulary, as in the stub's OpenAI answers
_CHUNKED: Final = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: %b\r\n\r\n"
_PLAIN: Final = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\ncontent-type: %b\r\n\r\n%b"
_LAST: Final = b"0\r\n\r\n"
_HEAD: Final = b'{"id":"chatcmpl-x","object":"chat.completion%b","created":1,"model":"bench","choices":[{"index":0,'


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


TOKEN_FRAME: Final = pack(Tokens(0, (TOKEN_ID,)))
_STARTED: Final = pack(Started(0))
END: Final = pack(Finished(0, "length")) + pack(End(0.0, 0.0, 0.0))
_EVENT: Final = (
    b"data: " + _HEAD % b".chunk" + b'"delta":{"content":" the"},"logprobs":null,"finish_reason":null}]}\n\n'
)


class Worker:
    """State that all connections share."""

    def __init__(self, bundle: TokenizerBundle, pace_s: float, *, tells_cached: bool = False) -> None:
        """`tells_cached`: hash each prompt to answer what is held of it, which takes time before the answer."""
        self.bundle = bundle
        self.tells_cached = tells_cached
        self.pace_s = pace_s
        self.member: WorkerMember | None = None
        self.computed: list[GenerateRequest] = []
        """Prompts that are not in the index yet. They are hashed when they are published, so answers come at once."""
        self.held: dict[IndexEntry, None] = {}
        self.streams: dict[Connection, tuple[int, bytes, bytes]] = {}
        """Frames left, the frame, and the end of paced streams."""

    def hold_computed(self) -> None:
        requests, self.computed = self.computed, []
        for request in requests:
            hashes = hash_chain(BlockHash(request.root), request.prompt_ids, self.bundle.block_size)
            self.held.update(dict.fromkeys(map(index_entry, hashes)))

    def started(self, request: GenerateRequest) -> bytes:
        """The first frame of an answer."""
        if not self.tells_cached:
            return _STARTED
        block_size = self.bundle.block_size
        entries = map(index_entry, hash_chain(BlockHash(request.root), request.prompt_ids, block_size))
        num_held = sum(1 for _ in takewhile(self.held.__contains__, entries))
        return pack(Started(num_held * block_size))

    async def tick(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            due_s += self.pace_s
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            for connection, (left, frame, end) in list(self.streams.items()):
                connection.transport.write(frame if left > 1 else frame + end)
                if left > 1:
                    self.streams[connection] = (left - 1, frame, end)
                else:
                    del self.streams[connection]


class Connection(asyncio.Protocol):
    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._received = b""
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's is none by inheritance

    def connection_lost(self, exc: Exception | None) -> None:
        self._worker.streams.pop(self, None)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while True:
            head, found, rest = self._received.partition(b"\r\n\r\n")
            if not found:
                return
            if head.startswith(b"PRI "):  # HTTP/2, which a peer tries first
                self.transport.close()
                return
            lowered = head.lower()
            mark = lowered.find(b"content-length:")
            size = int(lowered[mark + 15 :].split(b"\r\n", 1)[0]) if mark >= 0 else 0
            if len(rest) < size:
                return
            self._received = rest[size:]
            self._answer(head.split(b" ", 2)[1], rest[:size])

    def _answer(self, path: bytes, body: bytes) -> None:
        worker = self._worker
        match path:
            case b"/generate":
                request = unpack_request(body)
                worker.computed.append(request)
                first = worker.started(request)
                self._stream(request.sampling.max_tokens, b"application/msgpack", first, TOKEN_FRAME, END)
            case b"/v1/chat/completions":
                asked = json.loads(body)
                num_tokens = asked.get("max_tokens") or asked["max_completion_tokens"]  # peers rewrite the body
                if asked.get("stream"):
                    end = b"data: " + _HEAD % b".chunk" + b'"delta":{},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
                    self._stream(num_tokens, b"text/event-stream", b"", _EVENT, end)
                else:
                    text = json.dumps(" the" * num_tokens).encode()
                    message = b'"message":{"role":"assistant","content":' + text + b'},"finish_reason":"length"}]}'
                    self._plain(_HEAD % b"" + message, b"application/json")
            case b"/state":
                assert worker.member is not None
                self._plain(pack(WorkerState(worker.member, _load())), b"application/msgpack")
            case b"/bundle":
                self._plain(pack(worker.bundle), b"application/msgpack")
            case b"/v1/models":
                models = {"object": "list", "data": [{"id": worker.bundle.model, "root": "", "parent": None}]}
                self._plain(json.dumps(models).encode(), b"application/json")
            case _:  # health, and what other routers ask a server about its model
                self._plain(b'{"model_path":"bench","served_model_name":"bench"}', b"application/json")

    def _plain(self, body: bytes, kind: bytes) -> None:
        self.transport.write(_PLAIN % (len(body), kind, body))

    def _stream(self, num_tokens: int, kind: bytes, first: bytes, frame: bytes, end: bytes) -> None:
        head = _CHUNKED % kind + (chunk(first) if first else b"")
        if self._worker.pace_s and num_tokens > 1:
            self.transport.write(head + chunk(frame))
            self._worker.streams[self] = (num_tokens - 1, chunk(frame), chunk(end) + _LAST)
        else:
            self.transport.write(head + chunk(frame * num_tokens + end) + _LAST)


def make_member(bundle: TokenizerBundle, worker_id: str, epoch: str, url: str) -> WorkerMember:
    space = Namespace(bundle.model, bundle.revision, bundle.fingerprint, bundle.block_size)
    return WorkerMember(
        worker_id=WorkerId(worker_id),
        epoch=Epoch(epoch),
        url=url,
        model=bundle.model,
        namespace=space.fingerprint,
        numerics="none",
        block_size=bundle.block_size,
        max_model_len=bundle.max_model_len,
        protocol=PROTOCOL_VERSION,
        epoch_started_ms=1,
    )


def _load() -> WorkerLoad:
    return WorkerLoad(prefill_tokens_per_s=20_000.0, num_free_blocks=100_000, num_blocks=100_000)


async def _publish(worker: Worker, redis: str, member: WorkerMember, every_s: float) -> None:
    """Keep the index as a worker would: what is held is published soon after it was stored."""
    writer = IndexWriter(redis, member)
    link = asyncio.create_task(writer.run())
    published = 0
    try:
        while True:
            worker.hold_computed()
            if writer.in_doubt:
                held = list(worker.held)
                if await writer.rewrite(held, _load()):
                    published = len(held)
            else:
                fresh = list(worker.held)[published:]
                if await writer.publish([SetChange(fresh, (), published + len(fresh))], _load()):
                    published += len(fresh)
            await asyncio.sleep(every_s)
    finally:
        link.cancel()


async def serve(bundle: TokenizerBundle, redis: str, pace_s: float, num_workers: int) -> None:
    loop = asyncio.get_running_loop()
    async with asyncio.TaskGroup() as group:
        for number in range(num_workers):
            worker = Worker(bundle, pace_s, tells_cached=num_workers > 1)
            server = await loop.create_server(partial(Connection, worker), "127.0.0.1", 0, backlog=4096)
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            worker.member = make_member(bundle, f"stub-{number}", "1", url)
            if number == 0:
                print(url, flush=True)
            if pace_s:
                group.create_task(worker.tick())
            group.create_task(_publish(worker, redis, worker.member, max(PUBLISH_S, num_workers / 64)))
            group.create_task(server.serve_forever())


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--pace-s", type=float, default=0.0)
    parser.add_argument("--num-workers", type=int, default=1)
    options = parser.parse_args()
    bundle = unpack(options.bundle.read_bytes(), TokenizerBundle)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(serve(bundle, options.redis, options.pace_s, options.num_workers))


if __name__ == "__main__":
    main()
