"""One pipelined connection to Redis, owned by one task.

Callers hand in packed commands and get a future. A caller that gives up cancels its future only: the command has been
sent whole, its reply is read in its turn and dropped, so no reply can reach another caller. (A cancelled command on a
shared redis-py connection leaves its reply to the next user: CVE-2023-28858.)

    submit -> outbox -> writer -> socket ... socket -> reader -> head of `pending` -> the caller's future
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import InvalidResponse, NoPermissionError, ReadOnlyError, RedisError, ResponseError

from cache.redis_index.endpoint import Endpoint, moved_to
from cache.redis_index.schema import brief

logger = logging.getLogger(__name__)

Argument = bytes | str | int | float
Reply = Any
"""bytes, int, None, a list of replies, or the ResponseError that Redis answered."""


class LinkDownError(Exception):
    """There is no connection, it broke before the reply came, or too many commands wait for theirs."""


class GarbageError(LinkDownError):
    """Redis sent what it never sends: replies and commands no longer belong together."""


@dataclass(frozen=True, slots=True)
class LinkSettings:
    connect_timeout_s: float = 2.0
    stall_s: float = 2.0
    """A connection whose oldest reply is this late is dropped and opened anew."""
    first_backoff_s: float = 0.05
    max_backoff_s: float = 2.0
    max_pending: int = 4096


class _Call:
    """A submitted pipeline and what has come back of it."""

    __slots__ = ("future", "num_replies", "replies", "sent_at")

    def __init__(self, future: asyncio.Future[list[Reply]], num_replies: int, sent_at: float) -> None:
        self.future = future
        self.num_replies = num_replies
        self.replies: list[Reply] = []
        self.sent_at = sent_at


class Link:
    """Runs in the event loop of its `run()`, which reconnects for ever; `submit` may be called from that loop only."""

    def __init__(
        self,
        endpoint: Endpoint,
        settings: LinkSettings,
        *,
        on_change: Callable[[bool], None] = lambda up: None,
        on_garbage: Callable[[], None] = lambda: None,
    ) -> None:
        """`on_garbage` counts the connections dropped because Redis answered what no Redis answers."""
        self._endpoint = endpoint
        self._settings = settings
        self._on_change = on_change
        self._on_garbage = on_garbage
        self._distrusted: asyncio.Future[str] | None = None
        self._pending: deque[_Call] = deque()
        self._outbox: list[bytes] = []
        self._wake = asyncio.Event()
        self._connection: AbstractConnection | None = None
        self._reported_down = False
        self._in_step = False
        self.num_connects = 0

    @property
    def up(self) -> bool:
        return self._connection is not None

    @property
    def label(self) -> str:
        """Where it leads, without a password."""
        return self._endpoint.label

    def pack(self, commands: Iterable[Sequence[Argument]]) -> bytes:
        """Commands in the form in which they travel; may be kept and submitted many times."""
        return b"".join(pack_command(command) for command in commands)

    def submit(self, packed: Sequence[bytes], num_replies: int) -> asyncio.Future[list[Reply]]:
        """Send a packed pipeline. The future gives one reply per command; it fails with LinkDownError."""
        if self._connection is None:
            raise LinkDownError(f"no connection to {self._endpoint.label}")
        if len(self._pending) >= self._settings.max_pending:
            raise LinkDownError(f"{len(self._pending)} commands wait for {self._endpoint.label}")
        future = asyncio.get_running_loop().create_future()
        self._pending.append(_Call(future, num_replies, time.monotonic()))
        self._outbox.extend(packed)
        self._wake.set()
        return future

    async def call(self, *commands: Sequence[Argument], timeout_s: float) -> list[Reply]:
        """Submit and wait. Raises LinkDownError, also when the reply is late."""
        future = self.submit([self.pack(commands)], len(commands))
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise LinkDownError(f"no reply from {self._endpoint.label} within {timeout_s} s") from None

    def distrust(self, reason: str) -> None:
        """Drop the connection and open another: a reply was not of its command."""
        if self._distrusted is not None and not self._distrusted.done():
            self._distrusted.set_result(reason)

    async def run(self) -> None:
        """Keep a connection open until cancelled, whatever Redis answers."""
        backoff_s = self._settings.first_backoff_s
        while True:
            self._in_step = False
            reason = "closed"
            try:
                await self._serve()
            except* (RedisError, OSError, TimeoutError, LinkDownError) as group:
                reason = str(_first(group))
                if isinstance(_first(group), (InvalidResponse, GarbageError)):
                    self._on_garbage()
            except* Exception as group:  # the parser, on bytes that no Redis sends
                reason = f"unreadable reply: {type(_first(group)).__name__}: {_first(group)!s:.200}"
                self._on_garbage()
            finally:
                await self._drop(reason)
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # a TaskGroup prefers its children's errors to a cancellation
                raise asyncio.CancelledError
            if self._in_step:
                backoff_s = self._settings.first_backoff_s
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(self._settings.max_backoff_s, 2 * backoff_s)

    async def _serve(self) -> None:
        async with asyncio.timeout(2 * self._settings.connect_timeout_s):
            connection = await self._endpoint.open()
        self._connection = connection
        self._outbox.clear()
        self._wake.clear()
        self.num_connects += 1
        self._on_change(True)
        self._distrusted = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write(connection))
            group.create_task(self._read(connection))
            group.create_task(self._watch())
            raise GarbageError(await self._distrusted)

    async def _write(self, connection: AbstractConnection) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            batch, self._outbox = self._outbox, []
            await connection.send_packed_command(batch, check_health=False)

    async def _read(self, connection: AbstractConnection) -> None:
        pending = self._pending
        while True:
            try:
                reply = await connection.read_response(disable_decoding=True, timeout=math.inf)
            except ResponseError as error:
                if self._endpoint.is_cluster and (target := moved_to(error)) is not None:
                    self._endpoint.redirect(*target)
                    raise LinkDownError(f"slot moved to {target[0]}:{target[1]}") from None
                if isinstance(error, ReadOnlyError):
                    raise LinkDownError("connected to a read-only replica") from None
                reply = error
            if not pending:
                raise GarbageError(f"a reply that nobody asked for: {brief(reply)}")
            call = pending[0]
            call.replies.append(reply)
            if len(call.replies) == call.num_replies:
                pending.popleft()
                if not call.future.done():
                    call.future.set_result(call.replies)

    async def _watch(self) -> None:
        """Notice a server that has stopped answering, so that pending stays bounded, and replies out of step.

        A reply too many or too few gives every later caller the reply to another's command. A PING that must come back
        with its own text finds that out.
        """
        stall_s = self._settings.stall_s
        asked: tuple[bytes, asyncio.Future[list[Reply]]] | None = None
        while True:
            if asked is None and len(self._pending) < self._settings.max_pending:
                text = secrets.token_hex(8).encode()
                asked = text, self.submit([pack_command(("PING", text))], 1)
            await asyncio.sleep(stall_s / 4)
            if self._pending and time.monotonic() - self._pending[0].sent_at > stall_s:
                raise LinkDownError(f"no reply for {stall_s} s")
            if asked is not None and asked[1].done():
                (answer,) = asked[1].result()
                if answer != asked[0] and not isinstance(answer, NoPermissionError):
                    raise GarbageError(f"a reply of another command: {brief(answer)}")
                asked = None
                self._note_in_step()

    def _note_in_step(self) -> None:
        """The connection is good. That it was accepted, or gave a first reply, means little behind a proxy."""
        self._in_step = True
        if self._reported_down:
            logger.info("connected to Redis at %s again", self._endpoint.label)
            self._reported_down = False

    async def _drop(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if not reason.startswith("slot moved"):
            self._endpoint.failed()
        while self._pending:
            future = self._pending.popleft().future
            if not future.done():
                future.set_exception(LinkDownError(reason))
                future.exception()  # read here, so that a caller who has left is no "never retrieved" warning
        if connection is not None:
            self._on_change(False)
            with contextlib.suppress(Exception):  # of a socket that has failed already
                await connection.disconnect(nowait=True)
        if not self._reported_down and reason != "closed":
            logger.warning("no Redis at %s: %s", self._endpoint.label, reason)
            self._reported_down = True


def pack_command(command: Sequence[Argument]) -> bytes:
    """One command as RESP."""
    parts = [b"*%d\r\n" % len(command)]
    for argument in command:
        data = argument if isinstance(argument, bytes) else str(argument).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error: BaseException = group
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
