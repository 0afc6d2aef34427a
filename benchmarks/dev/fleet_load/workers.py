"""Workers without a model: `python -m benchmarks.dev.fleet_load.workers --bundle FILE --redis URL --secret FILE`.

All are in one process, each on an address of its own (127.x.y.z). They publish in turn, pipelined over one connection.
Every entry is signed before it is due. A line "restart N S" on the standard input ends the first N of them: their
connections break, and after S seconds they come back in a new epoch with an empty pool. Prints a line when all are
registered, and one when those are again: the epochs by worker, as JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import uvloop

from benchmarks.dev.fleet_load.registry import Published, restarted
from benchmarks.dev.gateway_load import stub
from benchmarks.dev.gateway_load.processes import free_ports
from cache.hashing import hash_chain, index_entry
from cache.records import WorkerLoad, WorkerState, signed
from cache.redis_index.schema import Keys, Signer
from cache.types import BlockHash
from worker.common.proof import PROVE_PATH, gateway_token, new_instance, prove
from worker.wire import Failed, Started, TokenizerBundle, pack, unpack, unpack_request

TICK_S: Final = 0.01
_KIND: Final = b"application/msgpack"
_WRONG_EPOCH: Final = b"HTTP/1.1 409 Conflict\r\ncontent-length: %d\r\ncontent-type: application/msgpack\r\n\r\n%b"


class FakeWorker:
    """One worker: its registry entry, and its open connections."""

    def __init__(self, published: Published, token: str, shared: stub.Worker) -> None:
        """`shared`: the bundle and the paced answers of all workers."""
        self.published = published
        self.token = token
        self.shared = shared
        self.instance = new_instance()
        self.connections: set[Connection] = set()
        self.server: asyncio.Server | None = None

    async def listen(self) -> None:
        parts = urlsplit(self.published.member.url)
        self.server = await asyncio.get_running_loop().create_server(
            partial(Connection, self), parts.hostname, parts.port or 0, reuse_address=True
        )

    def die(self) -> None:
        assert self.server is not None
        self.server.close()
        for connection in list(self.connections):
            connection.transport.abort()


class Connection(stub.Connection):
    def __init__(self, worker: FakeWorker) -> None:
        stub.Connection.__init__(self, worker.shared)
        self._fake = worker

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        stub.Connection.connection_made(self, transport)
        self._fake.connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        stub.Connection.connection_lost(self, exc)
        self._fake.connections.discard(self)

    def _answer(self, path: bytes, body: bytes) -> None:
        worker, member = self._fake, self._fake.published.member
        if path == PROVE_PATH.encode():
            self._plain(pack(prove(worker.token, body, member.url, worker.instance)), _KIND)
        elif path == b"/state":
            self._plain(pack(WorkerState(member, WorkerLoad(prefill_tokens_per_s=20_000.0))), _KIND)
        elif path == b"/generate":
            self._generate(body)
        else:
            stub.Connection._answer(self, path, body)

    def _generate(self, body: bytes) -> None:
        worker, request = self._fake, unpack_request(body)
        member = worker.published.member
        if request.epoch not in ("", member.epoch):
            frame = pack(Failed("wrong_epoch", f"epoch: this is {member.epoch}", retryable=True))
            self.transport.write(_WRONG_EPOCH % (len(frame), frame))
            return
        hashes = hash_chain(BlockHash(request.root), request.prompt_ids, member.block_size)
        num_cached = worker.published.hold([index_entry(h) for h in hashes]) * member.block_size
        num_left = request.sampling.max_tokens - len(request.choices[0].output_ids)
        self._stream(num_left, _KIND, pack(Started(num_cached)), stub.TOKEN_FRAME, stub.END)


class FakeFleet:
    """All workers, their one connection to Redis, and the clock of their publishes."""

    def __init__(self, workers: Sequence[FakeWorker], keys: Keys, every_s: float, seconds: float) -> None:
        self._workers = workers
        self._keys = keys
        self._every_s = every_s
        self._num_publishes = int(seconds / every_s) + 2
        self._silent: set[int] = set()
        """Workers that do not run."""
        self._redis: asyncio.StreamWriter

    async def run(self, redis: str, shared: stub.Worker) -> None:
        parts = urlsplit(redis)
        reader, self._redis = await asyncio.open_connection(parts.hostname, parts.port)
        now_ms = time.time_ns() // 1_000_000 + 3000 + len(self._workers)  # when they have all been signed
        for number, worker in enumerate(self._workers):
            self._sign(number, worker, now_ms)
        for worker in self._workers:
            await worker.listen()
            self._redis.write(worker.published.registration())
        await self._redis.drain()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._discard(reader))
            self._say("registered")
            group.create_task(self._publish(now_ms))
            group.create_task(shared.tick())
            group.create_task(self._obey())

    def _sign(self, number: int, worker: FakeWorker, first_ms: int) -> None:
        every_ms = int(self._every_s * 1000)
        offset_ms = number * every_ms // len(self._workers)
        worker.published.sign(first_ms + offset_ms, every_ms, self._num_publishes)

    async def _discard(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(1 << 16):
            if b"\r\n-" in data or data.startswith(b"-"):
                raise SystemExit(f"Redis: {data[:300]!r}")
        raise SystemExit("Redis has closed the connection")

    async def _publish(self, first_ms: int) -> None:
        """Publish each worker every `every_s`, in turn. One that is late waits for its next turn."""
        await asyncio.sleep(max(0.0, first_ms / 1000 - time.time()))
        begun_s, done, count = time.monotonic(), 0, len(self._workers)
        while True:
            await asyncio.sleep(TICK_S)
            due = int((time.monotonic() - begun_s) / self._every_s * count)
            numbers = [number % count for number in range(done, due) if number % count not in self._silent]
            done = due
            commands = [self._workers[n].published.publish() for n in numbers if self._workers[n].published.states]
            self._redis.write(b"".join(commands))
            await self._redis.drain()

    async def _obey(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(partial(asyncio.StreamReaderProtocol, reader), sys.stdin)
        while line := await reader.readline():
            _, count, down_s = line.decode().split()
            await self._restart(range(int(count)), float(down_s))

    async def _restart(self, numbers: range, down_s: float) -> None:
        self._silent.update(numbers)
        for number in numbers:
            self._workers[number].die()
        begun_s, now_ms = time.monotonic(), time.time_ns() // 1_000_000 + int(down_s * 1000)
        for number in numbers:
            worker = self._workers[number]
            old = worker.published
            worker.published = Published(restarted(old.member, now_ms), old.keys, old.signer)
            self._sign(number, worker, now_ms)
            worker.instance = new_instance()
        await asyncio.sleep(max(0.0, begun_s + down_s - time.monotonic()))
        for number in numbers:
            await self._workers[number].listen()
            self._redis.write(self._workers[number].published.registration())
        await self._redis.drain()
        self._silent.difference_update(numbers)
        self._say("restarted")

    def _say(self, event: str) -> None:
        epochs = {worker.published.member.worker_id: worker.published.member.epoch for worker in self._workers}
        print(json.dumps({"event": event, "url": self._workers[-1].published.member.url, "epochs": epochs}), flush=True)


async def serve(options: argparse.Namespace) -> None:
    bundle = unpack(options.bundle.read_bytes(), TokenizerBundle)
    secret = options.secret.read_bytes().strip()
    keys, signer = Keys("headstart", 0), Signer(secret, "headstart", 0)
    shared = stub.Worker(bundle, options.token_s)
    (port,) = free_ports(1)
    workers = []
    for number in range(options.workers):
        url = f"http://127.0.{1 + number // 250}.{1 + number % 250}:{port}"
        member = stub.make_member(bundle, f"fake-{number:04}", f"{number:016x}", url)
        published = Published(signed(secret, member), keys, signer)
        workers.append(FakeWorker(published, gateway_token(secret), shared))
    fleet = FakeFleet(workers, keys, options.workers / options.publishes, options.seconds)
    await fleet.run(options.redis, shared)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--bundle", type=Path, required=True)
    parser.add_argument("--redis", required=True)
    parser.add_argument("--secret", type=Path, required=True)
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--publishes", type=float, default=2000.0, help="a second, of all workers together")
    parser.add_argument("--seconds", type=float, default=300.0, help="for which states are signed")
    parser.add_argument("--token-s", type=float, default=0.05)
    uvloop.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
