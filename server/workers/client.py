"""The gateway's side of the worker's HTTP API (`worker.wire`), and the watch over its open streams."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Final, Self, TypeVar

import msgspec

from cache.records import WorkerMember, WorkerState
from cache.types import BlockHash
from server.workers.connection import (
    ConnectionPool,
    StaleConnection,
    WorkerAbsent,
    WorkerConnection,
    WorkerElsewhere,
    WorkerLost,
    WorkerRefused,
    loop_time_timeout,
)
from worker.common.frames import FrameReader
from worker.wire import (
    EngineCall,
    Failed,
    Frame,
    GenerateRequest,
    Rendered,
    TokenizerBundle,
    WireError,
    pack,
    pack_request,
    unpack,
)

MAX_REFUSAL_BYTES: Final = 64 * 1024  # a reason is a sentence
MAX_ANSWER_BYTES: Final = 256 * 1024  # answers of a worker's other routes are small
MAX_BUNDLE_BYTES: Final = 256 << 20  # tokenizers reach 35 MB
PROBE_TIMEOUT_S: Final = 2.0  # a worker answers these from its loop at once
ACTION_TIMEOUT_S: Final = 10.0  # they wait for a turn of the engine
ADOPT_TIMEOUT_S: Final = 15.0
"""More than the worker's own time for it."""
BUNDLE_TIMEOUT_S: Final = 30.0  # for a tokenizer over a slow network
RENDER_TIMEOUT_S: Final = 60.0  # an engine may be busy, and takes seconds for a long chat
NO_SUCCESSOR_TIMEOUT_S: Final = 60.0  # a paused fleet comes back, and no other worker could go on
MAX_PROBED: Final = 8
"""Workers that could resume a stream, probed at a time."""
T = TypeVar("T")


class GenerateStream:
    """One POST /generate. `read` it to its last frame; leaving the context early aborts it."""

    __slots__ = ("_connection", "_is_ours", "_pool", "_reader", "_request", "completed", "last_read_s", "url")

    def __init__(self, pool: ConnectionPool, url: str, request: GenerateRequest) -> None:
        self._pool = pool
        self.url = url
        self._request = request
        self._reader = FrameReader(pool.unpackers)
        self._connection: WorkerConnection | None = None
        self._is_ours = False
        """A frame has arrived: a worker answers."""
        self.completed = False
        """Set it after the last frame: the connection is then kept for other requests."""
        self.last_read_s = time.monotonic()
        """Time of the last frame; before the first, of the request."""

    async def __aenter__(self) -> Self:
        """Send the request. Raises WorkerRefused or WorkerLost."""
        self._connection = connection = await self._pool.send(self.url, b"POST /generate", pack_request(self._request))
        try:
            status = await connection.head()
            if status != 200:
                raise WorkerRefused(status, await _refusal(self.url, status, connection))
        except WorkerRefused:
            connection.release()
            raise
        except BaseException:
            connection.close()
            raise
        return self

    async def __aexit__(self, *raised: object) -> None:
        if self._connection is None:
            return
        if self.completed:
            self._connection.release()
        else:
            self._connection.close()

    def give_up(self) -> None:
        """Raise WorkerLost in the task that reads. Called by the watch over silent streams."""
        if self._connection is not None:
            self._connection.fail("silent and unreachable")

    async def read(self) -> list[Frame]:
        """Return the frames that have arrived, at least one. Raises WorkerLost when the connection breaks or ends.

        Raises WorkerAbsent if the connection ends before any frame: no worker answers like that.
        """
        assert self._connection is not None, "not entered"
        frames: list[Frame] = []
        error_of = WorkerLost if self._is_ours else WorkerAbsent
        try:
            while not frames:
                data = await self._connection.read()
                if not data:
                    raise error_of(f"{self.url}: the stream ended without its last frame")
                frames.extend(self._reader.feed(data))
        except WireError as error:
            raise error_of(f"{self.url}: {error}") from error
        self._is_ours, self.last_read_s = True, time.monotonic()
        return frames


class WorkerClient(ConnectionPool):
    """Calls workers over kept connections. Owned by the gateway, which closes it."""

    async def abort(self, url: str, request_id: str, choice: int | None) -> None:
        """End one choice, or the request. Raises WorkerLost."""
        body = msgspec.msgpack.encode({"request_id": request_id, "choice": choice})
        await self._exchange(url, b"POST /abort", PROBE_TIMEOUT_S, body)

    async def state(self, url: str) -> WorkerState:
        """Return the worker's member and load. Raises WorkerLost.

        If the worker there is registered under another URL, its state is read there.
        """
        try:
            answer = await self._exchange(url, b"GET /state", PROBE_TIMEOUT_S)
        except WorkerElsewhere as there:
            answer = await self._exchange(there.proven_url, b"GET /state", PROBE_TIMEOUT_S)
        return _decoded(url, answer, WorkerState)

    async def adopt(self, url: str, peer: WorkerMember, root: BlockHash, hashes: Sequence[BlockHash]) -> int:
        """Ask a worker to fetch a chain from a peer. Return the number of blocks that came. Raises WorkerLost."""
        chain = {"root": root, "hashes": b"".join(hashes)}
        body = {"url": peer.url, "epoch": peer.epoch, "layout": peer.layout, "chains": [chain]}
        answer = await self._exchange(url, b"POST /adopt", ADOPT_TIMEOUT_S, msgspec.msgpack.encode(body))
        return _decoded(url, answer, dict[str, int]).get("adopted_blocks", 0)

    async def bundle(self, url: str) -> TokenizerBundle:
        """Return the worker's tokenizer bundle. Raises WorkerLost."""
        data = await self._exchange(url, b"GET /bundle", BUNDLE_TIMEOUT_S, max_bytes=MAX_BUNDLE_BYTES)
        return _decoded(url, data, TokenizerBundle)

    async def render(self, url: str, call: EngineCall) -> Rendered:
        """Return the prompts of a call, as the worker's engine renders them. Raises WorkerRefused or WorkerLost."""
        answer = await self._exchange(
            url, b"POST /render", RENDER_TIMEOUT_S, pack(call), max_bytes=MAX_BUNDLE_BYTES, may_refuse=True
        )
        return _decoded(url, answer, Rendered)

    async def act(self, url: str, action: str) -> dict[str, Any]:
        """Do an operator's action, "drain" or "purge", and return the worker's answer. Raises WorkerError."""
        data = await self._exchange(url, b"POST /" + action.encode(), ACTION_TIMEOUT_S, may_refuse=True)
        try:
            return msgspec.json.decode(data, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise WorkerLost(f"{url}: {error}") from error

    async def is_alive(self, url: str) -> bool:
        """Return whether the worker answers that its engine lives. A process that is no worker answers otherwise."""
        try:
            answer = await self._exchange(url, b"GET /health/live", PROBE_TIMEOUT_S, needs_proof=False)
        except WorkerLost:
            return False
        return not answer or answer.startswith(b"{")

    async def _exchange(
        self,
        url: str,
        call: bytes,
        timeout_s: float,
        body: bytes = b"",
        *,
        max_bytes: int = MAX_ANSWER_BYTES,
        needs_proof: bool = True,
        may_refuse: bool = False,
    ) -> bytes:
        """Send a request and return the body of its answer. Raises WorkerLost, and WorkerRefused if it `may_refuse`."""

        async def ask() -> bytes:
            while True:
                with suppress(StaleConnection):  # closed while idle, or before the worker could prove itself
                    with await self.send(url, call, body, needs_proof=needs_proof) as connection:
                        status = await connection.head()
                        if status != 200 and may_refuse:
                            raise WorkerRefused(status, await _refusal(url, status, connection))
                        answer = await connection.read_all(max_bytes)
                    if status != 200:
                        raise WorkerLost(f"{url}: status {status}")
                    return answer

        try:
            return await loop_time_timeout(ask(), timeout_s)
        except TimeoutError as error:
            raise WorkerLost(f"{url}: no answer within {timeout_s:g} s") from error


class StallWatch:
    """Finds hung workers: probes the worker of a stream that has been silent for long.

    Silence by itself proves nothing (a long queue, a long prefill), and a stopped process keeps its connections open.
    A worker that does not answer loses its streams if another one lives that could resume them. If none does, the
    fleet may be paused (a suspended machine, a network cut), so the streams wait for `no_successor_timeout_s`.
    One task calls `run`.
    """

    def __init__(self, client: WorkerClient, workers: Callable[[], Sequence[WorkerMember]], silent_s: float) -> None:
        """`workers` returns all known workers."""
        self._client = client
        self._workers = workers
        self._silent_s = silent_s
        self._no_successor_timeout_s = NO_SUCCESSOR_TIMEOUT_S
        self._streams: set[GenerateStream] = set()

    @contextmanager
    def watching(self, stream: GenerateStream) -> Iterator[GenerateStream]:
        """Watch a stream from before it is entered: a worker may hang before its headers."""
        self._streams.add(stream)
        try:
            yield stream
        finally:
            self._streams.discard(stream)

    async def run(self) -> None:
        """Probe the workers of silent streams until cancelled, and end the streams of workers that do not answer."""
        while True:
            await asyncio.sleep(min(1.0, self._silent_s / 5))
            await self._probe()  # a frame of its own keeps no stream alive

    async def _probe(self) -> None:
        before_s = time.monotonic() - self._silent_s
        silent: defaultdict[str, list[GenerateStream]] = defaultdict(list)
        for stream in self._streams:
            if stream.last_read_s < before_s:
                silent[stream.url].append(stream)
        if silent:
            await asyncio.gather(*(self._check(url, streams, before_s) for url, streams in silent.items()))

    async def _check(self, url: str, streams: list[GenerateStream], before_s: float) -> None:
        """End the streams that have been silent since `before_s` if their worker does not answer two probes."""
        if await self._client.is_alive(url):
            return
        # At the same time: a fleet that wakes from a pause answers both.
        lives, *can_resume = await asyncio.gather(*map(self._client.is_alive, [url, *self._successors(url)]))
        if lives:
            return
        if not any(can_resume):
            before_s = time.monotonic() - self._no_successor_timeout_s
        for stream in self._streams.intersection(streams):  # others have ended, and their connection may be reused
            if stream.last_read_s < before_s:
                stream.give_up()

    def _successors(self, url: str) -> list[str]:
        """Return the URLs of workers that could resume a stream of the worker at `url`."""
        workers = self._workers()
        kinds = {(worker.namespace, worker.numerics) for worker in workers if worker.url == url}
        urls = [worker.url for worker in workers if worker.url != url and (worker.namespace, worker.numerics) in kinds]
        return random.sample(urls, min(len(urls), MAX_PROBED))


def _decoded(url: str, data: bytes, kind: type[T]) -> T:
    try:
        return unpack(data, kind)
    except WireError as error:
        raise WorkerLost(f"{url}: {error}") from error


async def _refusal(url: str, status: int, connection: WorkerConnection) -> Failed:
    """Return the Failed frame in the body of a refusal. Raises WorkerAbsent for any other body."""
    try:
        data = await loop_time_timeout(connection.read_all(MAX_REFUSAL_BYTES), PROBE_TIMEOUT_S)
        match FrameReader().feed(data):
            case [Failed() as failed]:
                return failed
    except (WireError, WorkerLost, TimeoutError) as error:
        raise WorkerAbsent(f"{url}: status {status}, and no refusal of a worker: {error}") from error
    raise WorkerAbsent(f"{url}: status {status}, and no refusal of a worker")
