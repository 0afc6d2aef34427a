"""One streamed response: keep-alives between its events, and what cancels an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import ClientDisconnect
from starlette.types import Message

from server.errors import ShuttingDownError
from server.http.stream import (
    DONE,
    PING,
    CancelOnDisconnect,
    SseWriter,
    escape_line_ends,
    sse,
)
from tests.waiting import until
from worker.common.http_protocol import AnswerCycle


class Client:
    """An ASGI `send` to a client that reads on command."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self.reads = asyncio.Event()
        self.reads.set()

    async def __call__(self, message: Message) -> None:
        self.messages.append(message)
        await self.reads.wait()

    @property
    def parts(self) -> list[Any]:
        return [message.get("body", message.get("status")) for message in self.messages]


def writer_to(client: Client) -> SseWriter:
    return SseWriter(client, lambda: [])


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_no_keep_alive_while_an_event_is_written() -> None:
    client = Client()
    writer = writer_to(client)
    client.reads.clear()
    write = asyncio.create_task(writer.write(b"event"))
    await turns()
    writer.ping()
    await turns()
    client.reads.set()
    await write
    await turns()
    assert client.parts == [200, b"event"]
    writer.ping()
    await turns()
    assert client.parts == [200, b"event", PING]


async def test_an_event_waits_for_the_keep_alive_before_it() -> None:
    client = Client()
    writer = writer_to(client)
    client.reads.clear()
    writer.ping()
    await turns()
    write = asyncio.create_task(writer.write(b"event"))
    await turns()
    assert client.parts == [200]
    client.reads.set()
    await write
    assert client.parts == [200, PING, b"event"]


async def test_a_silent_stream_is_kept_alive_until_it_is_left() -> None:
    client = Client()
    writer = writer_to(client)
    with writer.kept_alive(0.02):
        await until(lambda: client.parts.count(PING) >= 2)
        written_s = writer.last_write_s
        await writer.write(b"event")
        assert writer.last_write_s > written_s
    client.messages.clear()
    await asyncio.sleep(0.1)
    assert client.parts == []


async def test_only_a_silent_stream_is_kept_alive() -> None:
    client = Client()
    writer = writer_to(client)
    with writer.kept_alive(60.0):
        await turns()
        assert client.parts == []
        writer.last_write_s -= 61.0
        writer._watch(60.0)
        await turns()
    assert client.parts == [200, PING]


async def test_a_probe_never_begins_an_answer() -> None:
    client = Client()
    writer = writer_to(client)
    writer.probe()
    await turns()
    await writer.write(b"event")
    writer.probe()
    await turns()
    assert client.parts == [200, b"event", PING]


async def test_unread_keep_alive_blocks_nothing() -> None:
    client = Client()
    writer = writer_to(client)
    client.reads.clear()
    with writer.kept_alive(60.0):
        writer.ping()
        await turns()
        writer.ping()  # one at a time
    write = asyncio.create_task(writer.write(b"last"))
    await turns()
    assert client.parts == [200, b"last"]
    client.reads.set()
    await write


def connection() -> AnswerCycle:
    cycle = AnswerCycle.__new__(AnswerCycle)
    cycle.disconnected, cycle.message_event = False, asyncio.Event()
    return cycle


async def answer(guard: CancelOnDisconnect, *events: Callable[[], None]) -> None:
    """One that never ends by itself, while these things happen."""
    with guard:
        for happens in events:
            happens()
        await asyncio.sleep(60)


async def test_disconnect_ends_the_answer() -> None:
    client = connection()
    with pytest.raises(ClientDisconnect):
        await answer(CancelOnDisconnect(client), client.lose)
    with pytest.raises(ClientDisconnect):
        await answer(CancelOnDisconnect(client), lambda: pytest.fail("it has gone before"))


async def test_an_answer_ends_at_its_deadline_or_with_the_process() -> None:
    with pytest.raises(TimeoutError):
        await answer(CancelOnDisconnect(connection(), timeout_s=0.01))
    guard = CancelOnDisconnect(connection())
    guard.end(ShuttingDownError)  # it has not begun
    with pytest.raises(ShuttingDownError):
        await answer(guard, lambda: guard.end(ShuttingDownError))


async def test_the_first_reason_counts_and_the_task_goes_on() -> None:
    client = connection()
    guard = CancelOnDisconnect(client, timeout_s=60.0)
    with pytest.raises(ClientDisconnect):
        await answer(guard, client.lose, lambda: guard.end(ShuttingDownError))
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_a_group_that_failed_hides_no_deadline() -> None:
    async def fail() -> None:
        raise RuntimeError

    async def answer_again() -> None:
        with CancelOnDisconnect(connection(), timeout_s=0.01):
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(fail())
            except ExceptionGroup:
                await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await answer_again()


async def test_complete_answer_is_not_cancelled() -> None:
    client = connection()
    guard = CancelOnDisconnect(client, timeout_s=0.02)
    with guard:
        pass
    assert guard._timer is None or guard._timer.cancelled(), "it would keep the request in memory"
    client.lose()
    guard.end(ShuttingDownError)
    await asyncio.sleep(0.05)


async def test_foreign_cancellation_stays_a_cancellation() -> None:
    task = asyncio.create_task(answer(CancelOnDisconnect(connection(), timeout_s=60.0)))
    await turns()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@given(st.text(alphabet=st.one_of(st.sampled_from("\u2028\u2029\x85\u2027\u202a\xc2a"), st.characters(codec="utf-8"))))
@example("\u2028\u2029\x85")
def test_each_event_is_one_line_for_every_client(text: str) -> None:
    events = escape_line_ends(sse(msgspec.json.encode(text)) + PING)
    line, *rest = events.decode().splitlines()
    assert json.loads(line.removeprefix("data: ")) == text
    assert rest == ["", ": ping"]
    if not {"\u2028", "\u2029", "\x85"} & set(text):
        assert events == sse(msgspec.json.encode(text)) + PING


def test_readers_that_know_no_comments_see_no_empty_event() -> None:
    events = [sse(b'{"a": 1}'), sse(b'{"b": 2}', "name"), DONE]
    stream = PING + PING.join(events) + PING
    blocks = [block.splitlines() for block in stream.split(b"\n\n")]
    given_out = [[line for line in block if not line.startswith(b":")] for block in blocks[:-1]]
    assert given_out == [event.splitlines()[:-1] for event in events]
    assert blocks[-1] == [b": ping"]
