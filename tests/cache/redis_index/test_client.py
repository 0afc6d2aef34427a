"""The Redis client survives any reply, and detects when replies and commands are out of step."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
from redis.asyncio.connection import Connection

from cache.redis_index.client import RedisClient, RedisDownError, diagnose
from cache.redis_index.connection import MAX_REPLY_BYTES, ClientSettings
from tests.redis_server import until
from tests.running import listening, running
from tests.waiting import HANG_S

Answer = Callable[[list[bytes]], bytes]


class Scripted:
    """A server that replies `answer(words of the command)` and counts its connections."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.num_connections = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        while True:
            num_words = int((await reader.readuntil(b"\r\n"))[1:])
            words = []
            for _ in range(num_words):
                size = int((await reader.readuntil(b"\r\n"))[1:])
                words.append((await reader.readexactly(size + 2))[:-2])
            writer.write(self.answer(words))
            await writer.drain()


def sane(words: list[bytes]) -> bytes:
    """Reply like Redis to PING with a text; echo the first word of any other command."""
    return b"$%d\r\n%b\r\n" % (len(words[-1]), words[-1]) if words[0] == b"PING" else b"+%b\r\n" % words[0]


@asynccontextmanager
async def connected(answer: Answer, stall_s: float = 1.0) -> AsyncIterator[tuple[Scripted, RedisClient, list[str]]]:
    scripted, garbage = Scripted(answer), []
    settings = ClientSettings(stall_s=stall_s, connect_timeout_s=HANG_S, first_backoff_s=0.01, max_backoff_s=0.02)
    async with listening(scripted.serve) as port:
        client = RedisClient(f"redis://127.0.0.1:{port}", settings, count=garbage.append)
        async with running(client):
            await until(lambda: client.up)
            yield scripted, client, garbage


async def call(client: RedisClient, word: str) -> object:
    return (await client.call((word,), timeout_s=HANG_S))[0]


@pytest.mark.parametrize(
    "junk",
    [
        b"+OK\r\n",
        b"-ERR server closing\r\n",
        b"-MOVED x\r\n",
        b"-MOVED 1 127.0.0.1:99999\r\n",
        b"*1\r\n" * 5000,
        b"$9999999999999\r\n",
        b"$-7\r\n",
        b":x\r\n",
        b"\0\xff\r\n",
        b">2\r\n$10\r\ninvalidate\r\n*0\r\n+OK\r\n",
    ],
)
async def test_unexpected_reply_costs_only_the_connection(junk: bytes) -> None:
    sent = []

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"JUNK" and not sent:
            sent.append(junk)
            return b"+JUNK\r\n" + junk
        return sane(words)

    async with connected(answer) as (scripted, client, garbage):
        with suppress(RedisDownError):
            await call(client, "JUNK")
        await until(lambda: scripted.num_connections > 1 and client.up)
        assert await call(client, "HELLO") == b"HELLO"
        assert len(garbage) <= 1


@pytest.mark.parametrize("surplus", [b"", b"+X\r\n+X\r\n"], ids=["missing", "surplus"])
async def test_replies_out_of_step_are_detected_under_constant_load(surplus: bytes) -> None:
    """Each caller gets the reply to another's command, and no call ever waits long."""
    sent = []

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"BREAK" and not sent:
            sent.append(surplus)
            return surplus
        return sane(words)

    async with connected(answer, stall_s=2.0) as (scripted, client, _):
        broken = asyncio.create_task(call(client, "BREAK"))
        await asyncio.sleep(0)

        async def caller(name: str) -> None:
            while True:
                await asyncio.sleep(0)
                with suppress(RedisDownError):
                    if await call(client, name) == name.encode() and scripted.num_connections > 1:
                        return

        async with asyncio.timeout(HANG_S):
            await asyncio.gather(*(caller(f"CALLER{n}") for n in range(4)))
        broken.cancel()


@pytest.mark.parametrize(("kind", "refusal"), [(b"$", "more than"), (b"*", "millions of elements")])
async def test_oversized_reply_is_refused(kind: bytes, refusal: str) -> None:
    size = MAX_REPLY_BYTES + (1 << 20)  # its beginning may be read together with the reply before it
    sent = []

    def answer(words: list[bytes]) -> bytes:
        if words[0] == b"HUGE" and not sent:
            sent.append(size)
            return b"%b%d\r\n" % (kind, size) + bytes(size) + b"\r\n"
        return sane(words)

    async with connected(answer, stall_s=HANG_S) as (_, client, garbage):
        await call(client, "HELLO")  # the first PING has its reply, too: only the start of a long read is searched
        with pytest.raises(RedisDownError, match=refusal):
            await call(client, "HUGE")
        assert garbage == ["invalid"]
        await until(lambda: client.up)
        assert await call(client, "HELLO") == b"HELLO"


async def test_cancellation_during_a_failure_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """A TaskGroup raises its children's errors before a cancellation."""
    client = RedisClient("redis://127.0.0.1:1", ClientSettings())
    failing = asyncio.Event()

    async def serve() -> None:
        async def fail() -> None:
            await failing.wait()
            raise RedisDownError("now")

        async with asyncio.TaskGroup() as group:
            group.create_task(fail())
            await asyncio.Event().wait()

    monkeypatch.setattr(client, "_serve", serve)
    task = asyncio.create_task(client.run())
    await asyncio.sleep(0.01)
    failing.set()
    await asyncio.sleep(0)
    task.cancel()
    done, _ = await asyncio.wait([task], timeout=HANG_S)
    assert done, "it reconnects for ever"
    assert task.cancelled()


async def test_silent_server_is_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(lambda words: b"") as (scripted, client, garbage):
        with pytest.raises(RedisDownError, match="no reply for"):
            await call(client, "HELLO")
        await until(lambda: scripted.num_connections > 1)
        gc.collect()
        assert "never retrieved" not in caplog.text
        assert not garbage


@pytest.mark.parametrize("refusal", [b"MISCONF Redis cannot save.", b"BUSY Redis is busy running a script."])
async def test_a_refused_ping_keeps_the_connection(refusal: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """A Redis with a full disk refuses PING, but answers all that only reads."""
    num_pings = []

    def answer(words: list[bytes]) -> bytes:
        if words[0] != b"PING":
            return sane(words)
        num_pings.append(words)
        return b"-" + refusal + b"\r\n"

    async with connected(answer, stall_s=0.04) as (scripted, client, garbage):
        await until(lambda: len(num_pings) > 3)
        assert await call(client, "HELLO") == b"HELLO"
        assert (scripted.num_connections, garbage) == (1, [])
    assert not caplog.messages, "the end of a client is no failure"


@pytest.mark.parametrize(
    ("moved_to", "seeds"),
    [
        pytest.param(":{owner}", "127.0.0.1:{first}", id="without a host, to the same host"),
        pytest.param("127.0.0.1:1", "127.0.0.1:{first},127.0.0.1:{owner}", id="to a node that is down, so to the next"),
    ],
)
async def test_a_client_goes_on_where_a_slot_has_moved(moved_to: str, seeds: str) -> None:
    owner = Scripted(sane)
    async with listening(owner.serve) as port:
        moved = f"-MOVED 1 {moved_to.format(owner=port)}\r\n".encode()
        first = Scripted(lambda words: sane(words) if words[0] != b"HELLO" else moved)
        async with listening(first.serve) as first_port:
            settings = ClientSettings(first_backoff_s=0.01, max_backoff_s=0.02)
            client = RedisClient(f"redis+cluster://{seeds.format(first=first_port, owner=port)}", settings)
            async with running(client):
                await until(lambda: client.up)
                with pytest.raises(RedisDownError, match="slot moved"):
                    await call(client, "HELLO")
                await until(lambda: client.up)
                assert await call(client, "HELLO") == b"HELLO"
                assert (first.num_connections, owner.num_connections) == (1, 1)


async def test_number_of_waiting_commands_is_limited() -> None:
    """A stopped Redis does not fill our memory."""
    client = RedisClient("redis://h:1", ClientSettings(max_pending=3))
    with pytest.raises(RedisDownError, match="no connection"):
        client.submit([b"PING"], 1)
    client._connection = Connection()
    for _ in range(3):
        client.submit([b"PING"], 1)
    with pytest.raises(RedisDownError, match="3 commands wait"):
        client.submit([b"PING"], 1)


@pytest.mark.parametrize(
    ("reply", "fields"), [(b"$17\r\nredis_version:7\r\n\r\n", {"redis_version": "7"}), (b"-NOPERM no INFO\r\n", {})]
)
async def test_a_diagnosis_closes_its_connection(reply: bytes, fields: dict[str, str]) -> None:
    ended: list[asyncio.Event] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        ended.append(asyncio.Event())
        with suppress(asyncio.IncompleteReadError):
            await Scripted(lambda words: reply if words[0] == b"INFO" else sane(words)).serve(reader, writer)
        ended[-1].set()
        writer.close()

    async with listening(serve) as port:
        url = f"redis://127.0.0.1:{port}?decode_responses=True"
        begun_s = time.perf_counter()
        ping_s, info = await diagnose(url, ClientSettings(connect_timeout_s=HANG_S))
        assert 0 < ping_s < time.perf_counter() - begun_s
        assert info == fields
        async with asyncio.timeout(HANG_S):
            await ended[0].wait()
    with pytest.raises(RedisDownError):
        await diagnose(f"redis://127.0.0.1:{port}", ClientSettings(connect_timeout_s=HANG_S))
