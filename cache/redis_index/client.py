"""A multiplexed Redis client: one pipelined connection, owned by one task.

Callers submit packed commands and get a future. A caller that gives up cancels only its future: the command has been
sent, and its reply is read in order and dropped. So no reply ever reaches another caller. (A cancelled command on a
shared redis-py connection leaves its reply to the next user: CVE-2023-28858.)
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import math
import random
import secrets
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import hiredis
from redis.asyncio.connection import AbstractConnection
from redis.exceptions import InvalidResponse, MovedError, NoPermissionError, ReadOnlyError, RedisError, ResponseError

from cache.redis_index import schema
from cache.redis_index.connection import MAX_REPLY_BYTES, ClientSettings, Endpoint
from cache.redis_index.schema import brief

logger = logging.getLogger(__name__)

_READ_ONLY: Final = "connected to a read-only replica"
_SETTLED_S: Final = 10.0
"""Workers write at least once a second."""

Argument = bytes | str | int | float
Reply = Any
"""bytes, int, None, a list of replies, or a ResponseError from Redis."""

_NUM_PINGS: Final = 20  # their median hides a slow one
Command = Sequence[Argument]


class RedisDownError(Exception):
    """There is no connection, it was lost before the reply, or too many commands wait."""


class RedisProtocolError(RedisDownError):
    """A reply that Redis never sends: replies and commands are out of step."""


@dataclass(slots=True, eq=False)
class _Call:
    """A submitted pipeline and its replies so far."""

    future: asyncio.Future[list[Reply]]
    num_replies: int
    sent_at: float
    max_reply_bytes: int
    replies: list[Reply] = field(default_factory=list)


class RedisClient:
    """Runs in the event loop of its `run()`, which reconnects forever; call `submit` from that loop only.

    submit -> outbox -> _write -> socket ... socket -> _read -> head of `pending` -> the caller's future
    """

    def __init__(
        self,
        url: str,
        settings: ClientSettings,
        *,
        count: Callable[[str], None] = lambda event: None,
        on_change: Callable[[bool], None] = lambda up: None,
    ) -> None:
        """`count` counts "invalid" for a connection dropped because of impossible replies. Raises ValueError."""
        self._endpoint = Endpoint(url, settings)
        self.label = self._endpoint.label
        self._settings = settings
        self._on_change = on_change
        self._count = count
        self._reconnect_reason: asyncio.Future[str] | None = None
        self._pending: deque[_Call] = deque()
        self._outbox: list[bytes] = []
        self._wake = asyncio.Event()
        self._connection: AbstractConnection | None = None
        self._reported = ""
        self._in_step = False

    @property
    def up(self) -> bool:
        return self._connection is not None

    def submit(
        self, packed: Sequence[bytes], num_replies: int, max_reply_bytes: int = MAX_REPLY_BYTES
    ) -> asyncio.Future[list[Reply]]:
        """Send a packed pipeline. The future returns one reply per command; it fails with RedisDownError."""
        if self._connection is None:
            raise RedisDownError(f"no connection to {self.label}")
        if len(self._pending) >= self._settings.max_pending:
            raise RedisDownError(f"{len(self._pending)} commands wait for {self.label}")
        future = asyncio.get_running_loop().create_future()
        self._pending.append(_Call(future, num_replies, time.monotonic(), max_reply_bytes))
        self._outbox.extend(packed)
        self._wake.set()
        return future

    async def call(
        self, *commands: Sequence[Argument], timeout_s: float, max_reply_bytes: int = MAX_REPLY_BYTES
    ) -> list[Reply]:
        """Submit and wait. Raises RedisDownError, also for a late reply or one above the limit."""
        future = self.submit([pack(commands)], len(commands), max_reply_bytes)
        try:
            async with asyncio.timeout(timeout_s):
                return await future
        except TimeoutError:
            raise RedisDownError(f"no reply from {self.label} within {timeout_s} s") from None

    def reconnect(self, reason: str) -> None:
        """Drop the connection and open another: a reply did not match its command."""
        if self._reconnect_reason is not None and not self._reconnect_reason.done():
            self._reconnect_reason.set_result(reason)

    async def run(self) -> None:
        """Keep a connection open until cancelled."""
        backoff_s = self._settings.first_backoff_s
        while True:
            self._in_step = False
            reason = "closed"
            try:
                await self._serve()
            except* Exception as group:
                reason = self._reason(group)
            finally:
                await self._drop(reason)
            task = asyncio.current_task()
            if task is not None and task.cancelling():  # a TaskGroup prefers its children's errors to a cancellation
                raise asyncio.CancelledError
            if self._in_step:
                backoff_s = self._settings.first_backoff_s
            await asyncio.sleep(backoff_s * random.uniform(0.5, 1.0))
            backoff_s = min(self._settings.max_backoff_s, 2 * backoff_s)

    def _reason(self, error: BaseException) -> str:
        """Describe why the connection ended, and count an error that only garbage causes."""
        while isinstance(error, BaseExceptionGroup):
            error = error.exceptions[0]
        is_readable = isinstance(error, (RedisError, OSError, RedisDownError))  # else the parser's, on any bytes
        if not is_readable or isinstance(error, (InvalidResponse, RedisProtocolError)):
            self._count("invalid")
        return str(error) if is_readable else f"unreadable reply: {type(error).__name__}: {error!s:.200}"

    async def _serve(self) -> None:
        async with asyncio.timeout(2 * self._settings.connect_timeout_s):
            connection = await self._endpoint.open(self._reply_limit)
        self._connection = connection
        self._outbox.clear()
        self._on_change(True)
        self._reconnect_reason = asyncio.get_running_loop().create_future()
        async with asyncio.TaskGroup() as group:
            group.create_task(self._write(connection))
            group.create_task(self._read(connection))
            group.create_task(self._watch())
            raise RedisProtocolError(await self._reconnect_reason)

    def _reply_limit(self) -> int:
        return self._pending[0].max_reply_bytes if self._pending else MAX_REPLY_BYTES

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
                if self._endpoint.is_cluster and isinstance(error, MovedError):
                    host = error.host or getattr(connection, "host", "")  # empty: the same host
                    self._endpoint.redirect(host, error.port)
                    raise RedisDownError(f"slot moved to {error.host}:{error.port}") from None
                if isinstance(error, ReadOnlyError):
                    raise RedisDownError(_READ_ONLY) from None
                reply = error
            if not pending:
                raise RedisProtocolError(f"a reply without a command: {brief(reply)}")
            call = pending[0]
            call.replies.append(reply)
            if len(call.replies) == call.num_replies:
                pending.popleft()
                if not call.future.done():
                    call.future.set_result(call.replies)

    async def _watch(self) -> None:
        """Detect a server that has stopped answering, which bounds `pending`, and replies that are out of step.

        One reply too many or too few gives every later caller the reply to another command. A PING with a text of its
        own detects that.
        """
        stall_s, begun_s = self._settings.stall_s, time.monotonic()
        ping: tuple[bytes, asyncio.Future[list[Reply]]] | None = None
        while True:
            if ping is None and len(self._pending) < self._settings.max_pending:
                text = secrets.token_hex(8).encode()
                ping = text, self.submit([pack([("PING", text)])], 1)
            await asyncio.sleep(stall_s / 4)
            if self._pending and time.monotonic() - self._pending[0].sent_at > stall_s:
                raise RedisDownError(f"no reply for {stall_s} s")
            if ping is not None and ping[1].done():
                (answer,) = ping[1].result()
                if answer != ping[0] and not _refuses_any(answer):
                    raise RedisProtocolError(f"a reply to another command: {brief(answer)}")
                ping = None
                self._in_step = True  # the proof: a proxy accepts connections without a server
                # A replica answers each PING, and refuses the next write: it is back only after a while without one.
                if self._reported and (self._reported != _READ_ONLY or time.monotonic() > begun_s + _SETTLED_S):
                    logger.info("connected to Redis at %s again", self.label)
                    self._reported = ""

    async def _drop(self, reason: str) -> None:
        connection, self._connection = self._connection, None
        if not reason.startswith("slot moved"):
            self._endpoint.failed()
        while self._pending:
            future = self._pending.popleft().future
            if not future.done():
                future.set_exception(RedisDownError(reason))
                future.exception()  # read here, to avoid a "never retrieved" warning after the caller has left
        if connection is not None:
            self._on_change(False)
            with contextlib.suppress(Exception):  # the socket may have failed already
                await connection.disconnect(nowait=True)
        if not self._reported and reason != "closed":
            logger.warning("no Redis at %s: %s", self.label, reason)
            self._reported = reason


def _refuses_any(reply: Reply) -> bool:
    """Return whether Redis refuses a PING: by an ACL, while it cannot save (MISCONF), or during a script (BUSY)."""
    is_error = isinstance(reply, ResponseError)
    return is_error and (isinstance(reply, NoPermissionError) or str(reply).startswith(("MISCONF ", "BUSY ")))


def pack(commands: Iterable[Sequence[Argument]]) -> bytes:
    """Return commands as RESP, for one or more submissions."""
    # The stub of hiredis allows one argument.
    return b"".join([hiredis.pack_command(tuple(command)) for command in commands])  # type: ignore[arg-type]


async def diagnose(url: str, settings: ClientSettings) -> tuple[float, dict[str, str]]:
    """Return the median time of a PING, and the fields of INFO; these are empty if an ACL forbids INFO.

    Uses a connection of its own, within the connect timeout. Raises RedisDownError, and ValueError for a bad URL.
    """
    endpoint = Endpoint(url, settings)
    connection: AbstractConnection | None = None
    try:
        async with asyncio.timeout(settings.connect_timeout_s):
            connection = await endpoint.open()
            pings_s = []
            for _ in range(_NUM_PINGS):
                started_s = time.perf_counter()
                await connection.send_command("PING")
                await connection.read_response(disable_decoding=True, timeout=math.inf)
                pings_s.append(time.perf_counter() - started_s)
            info: dict[str, str] = {}
            with contextlib.suppress(ResponseError):  # an ACL forbids it
                await connection.send_command("INFO")
                text = bytes(await connection.read_response(disable_decoding=True, timeout=math.inf))
                info = dict(line.split(":", 1) for line in text.decode(errors="replace").splitlines() if ":" in line)
            return statistics.median(pings_s), info
    except TimeoutError:
        raise RedisDownError(f"no answer within {settings.connect_timeout_s:g} s") from None
    except (RedisError, OSError) as error:
        raise RedisDownError(str(error) or type(error).__name__) from error
    finally:
        if connection is not None:
            await connection.disconnect(nowait=True)


class Transactions:
    """Sends commands of one worker. Owned by its `IndexWriter`."""

    def __init__(self, client: RedisClient, timeout_s: float, name: str, count: Callable[[str], None]) -> None:
        """`name` is the worker's, for the log; `count` counts "refused"."""
        self._client = client
        self._timeout_s = timeout_s
        self._name = name
        self._count = count
        self._is_refused = False

    async def ask(self, *commands: Command) -> list[Reply] | None:
        """Return one reply per command, or None without a connection or in time."""
        try:
            return await self._client.call(*commands, timeout_s=self._timeout_s)
        except RedisDownError as error:
            logger.debug("not published: %s", error)
            return None

    async def run(self, commands: list[Command]) -> list[Reply] | None:
        """Return the replies of one MULTI, one per command, or None after any error."""
        replies = await self.ask(("MULTI",), *commands, ("EXEC",))
        if replies is None:
            return None
        results = replies[-1]
        if not isinstance(results, list) or len(results) != len(commands):
            refusals = [reply for reply in replies if isinstance(reply, ResponseError)]
            if refusals:
                self._refused(refusals[0])
            else:
                self._client.reconnect(f"{schema.brief(results)} to a MULTI of {len(commands)} commands")
            return None
        errors = [result for result in results if isinstance(result, ResponseError)]
        if not errors:
            return results
        self._refused(errors[0])
        is_other_type = [isinstance(r, ResponseError) and str(r).startswith("WRONGTYPE") for r in results]
        if any(is_other_type):  # such keys are foreign
            await self.ask(("UNLINK", *{command[1] for command in itertools.compress(commands, is_other_type)}))
        return None

    def accepted(self) -> None:
        """Log the next refusal again."""
        self._is_refused = False

    def _refused(self, reply: Reply) -> None:
        self._count("refused")
        if not self._is_refused:
            self._is_refused = True
            logger.warning("Redis refuses what %s publishes: %s", self._name, schema.brief(reply))
