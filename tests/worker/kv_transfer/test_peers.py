"""The client of peers, against a real worker, and against peers that cheat, trickle, hang and end early."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

import pytest

from cache.block_record import RecordFormat
from cache.hashing import hash_chain
from cache.types import ChainLink
from tests.certificates import Authority
from tests.running import listening
from tests.waiting import until
from tests.worker.kv_transfer.moving_engine import BLOCK_SIZE, LAYOUT, PAYLOAD_BYTES, RECORD, SECRET
from tests.worker.kv_transfer.moving_worker import HASHES, LINKS, PAYLOADS, PROMPT, TOKEN, moving_worker
from tests.worker.scheduler.engine import ROOT
from worker.common.proof import gateway_token
from worker.common.tls import ca_files, certificate_files
from worker.contracts.exchange import ChainsWanted, Handover, OfferedChain, frame_head
from worker.kv_transfer import peers
from worker.kv_transfer.peers import FetchError, PeerClient, PeerStream
from worker.wire import pack


@dataclass
class Fetched:
    payloads: list[bytes]
    error: Exception | None = None


def fetch(client: PeerClient, url: str, epoch: str = "e1", links: Sequence[ChainLink] = LINKS) -> Fetched:
    """As a load does: up to the first miss."""
    got = Fetched([])
    payload = memoryview(bytearray(PAYLOAD_BYTES))
    try:
        with client.fetching(url, epoch, links) as reader:
            for number, link in enumerate(links, 1):
                if not reader.read(link, payload, lambda room: got.payloads.append(bytes(room))):
                    break
                assert len(got.payloads) == number, "a block that did not come"
    except (FetchError, OSError, HTTPException, ValueError) as error:
        got.error = error
    return got


async def fetched(url: str, client: PeerClient | None = None, **options) -> Fetched:
    return await asyncio.to_thread(fetch, client or PeerClient(RECORD, TOKEN), url, **options)


async def test_a_worker_gives_its_blocks() -> None:
    async with moving_worker() as worker:
        got = await fetched(worker.url)
        assert got == Fetched(PAYLOADS)
        got = await fetched(worker.url, links=LINKS[3:])
        assert got == Fetched(PAYLOADS[3:])


async def test_up_to_the_first_that_it_does_not_have() -> None:
    longer = [*PROMPT, *range(7)]
    hashes = hash_chain(ROOT, longer, BLOCK_SIZE)
    links = [ChainLink(each, hashes[n - 1] if n else ROOT, n) for n, each in enumerate(hashes)]
    async with moving_worker() as worker:
        got = await fetched(worker.url, links=links)
    assert got == Fetched(PAYLOADS[: len(got.payloads)])
    assert len(got.payloads) == 8


async def test_a_block_under_a_false_place_is_a_miss() -> None:
    """A request is not signed: the record holds the parent and depth that its sender has."""
    async with moving_worker() as worker:
        for links in ([ChainLink(HASHES[2], HASHES[0], 1)], [ChainLink(HASHES[2], HASHES[1], 5)]):
            assert await fetched(worker.url, links=links) == Fetched([])


@pytest.mark.parametrize("token", ["", "wrong", gateway_token(b"of another fleet")])
async def test_without_the_fleets_token_it_gives_none(token: str) -> None:
    async with moving_worker() as worker:
        got = await fetched(worker.url, PeerClient(RECORD, token))
    assert got.payloads == []
    assert "401" in str(got.error)


async def test_blocks_of_another_epoch_layout_or_secret_are_not_given() -> None:
    async with moving_worker() as worker:
        got = await fetched(worker.url, epoch="e0")
        assert "409" in str(got.error)
        for record in (RecordFormat(b"other" + LAYOUT[5:], PAYLOAD_BYTES, SECRET), RecordFormat(LAYOUT, PAYLOAD_BYTES)):
            got = await fetched(worker.url, PeerClient(record, TOKEN))
            assert "409" in str(got.error)
            assert got.payloads == []


async def test_a_purge_ends_what_peers_get() -> None:
    async with moving_worker() as worker:
        async with worker.http.post(worker.url + "/purge") as response:
            epoch = (await response.json())["epoch"]
        assert await fetched(worker.url, epoch=epoch) == Fetched([])


# --- peers that are none -----------------------------------------------------------------------------------------


def frame(number: int, record: RecordFormat = RECORD, payload: bytes | None = None) -> bytes:
    data = PAYLOADS[number] if payload is None else payload
    return frame_head(len(data)) + record.header(LINKS[number], memoryview(data)) + data


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/msgpack\r\n"
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
WHOLE = b"".join(chunk(frame(n)) for n in range(8)) + b"0\r\n\r\n"


@asynccontextmanager
async def answering(
    *parts: bytes | Callable[[asyncio.StreamWriter], object], tls: ssl.SSLContext | None = None
) -> AsyncIterator[str]:
    """A peer that sends this to anybody, and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for part in parts:
            if isinstance(part, bytes):
                writer.write(part)
                await writer.drain()
            else:
                await part(writer)

    async with listening(serve, tls) as port:
        yield f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"


async def test_the_scripted_peer_is_understood() -> None:
    async with answering(CHUNKED + WHOLE) as url:
        assert await fetched(url) == Fetched(PAYLOADS)
    async with answering(HEAD + b"\r\n" + b"".join(frame(n) for n in range(8))) as url:  # up to its end
        assert await fetched(url) == Fetched(PAYLOADS)


def damaged(number: int, at: int) -> bytes:
    data = bytearray(frame(number))
    data[at] ^= 1
    return bytes(data)


@pytest.mark.parametrize(
    ("parts", "num_good"),
    [
        pytest.param([CHUNKED, chunk(frame(0)), chunk(damaged(1, -1)), chunk(frame(2))], 1, id="damaged payload"),
        pytest.param([CHUNKED, chunk(damaged(0, 40))], 0, id="damaged header"),
        pytest.param([CHUNKED, chunk(damaged(0, 0))], 0, id="damaged head"),
        pytest.param([CHUNKED, chunk(frame(1))], 0, id="another block"),
        pytest.param([CHUNKED, chunk(frame(0, payload=PAYLOADS[0] * 2))], 0, id="too long"),
        pytest.param([CHUNKED, chunk(frame(0)[:30])], 0, id="too short"),
        pytest.param([CHUNKED, chunk(frame(0) + frame(1)[:-1]), b"0\r\n\r\n"], 1, id="truncated"),
        pytest.param([CHUNKED, chunk(frame(0)), chunk(frame(1))[:-9]], 1, id="broken off in a record"),
        pytest.param([CHUNKED, b"zz\r\n", frame(0)], 0, id="no chunk"),
        pytest.param([CHUNKED, b"-5\r\n", frame(0)], 0, id="negative chunk"),
        pytest.param([CHUNKED, b"f" * 70_000], 0, id="endless chunk size"),
        pytest.param([CHUNKED, b"ffffffffffffffff\r\n", b"\0" * 100_000], 0, id="huge chunk"),
        pytest.param([HEAD + b"content-length: 40\r\n\r\n", frame(0)], 0, id="short length"),
        pytest.param([HEAD + b"content-length: 999999999999\r\n\r\n", frame(0)], 1, id="long length"),
        pytest.param([b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 5000 + b"\r\n"], 0, id="many headers"),
        pytest.param([b"\0\1\2 nonsense"], 0, id="no HTTP"),
        pytest.param([], 0, id="closed"),
        pytest.param([b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\n\r\n"], 0, id="redirect"),
    ],
)
async def test_what_is_not_a_record_is_a_miss(parts: list[bytes], num_good: int) -> None:
    async with answering(*parts) as url:
        got = await fetched(url)
    assert got.payloads == PAYLOADS[:num_good]


async def test_records_under_another_secret_are_misses() -> None:
    other = RecordFormat(LAYOUT, PAYLOAD_BYTES, b"of another fleet")
    async with answering(CHUNKED, chunk(frame(0, other))) as url:
        assert (await fetched(url)).payloads == []
    async with answering(CHUNKED, chunk(frame(0, RecordFormat(LAYOUT, PAYLOAD_BYTES)))) as url:
        assert (await fetched(url)).payloads == []


@pytest.mark.parametrize("start", [b"", CHUNKED, CHUNKED + chunk(frame(0)) + chunk(frame(1))[:40]])
async def test_a_peer_that_hangs_is_given_up(start: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_FETCH_TIMEOUT_S", 0.2)
    hangs = asyncio.Event()

    async def hang(writer: asyncio.StreamWriter) -> None:
        await hangs.wait()

    async with answering(start, hang) as url:
        got = await fetched(url)
        assert isinstance(got.error, TimeoutError)
        assert got.payloads in ([], PAYLOADS[:1])


@pytest.mark.parametrize(
    ("start", "slow"), [(HEAD, b"x: y\r\n"), (HEAD, b"x"), (CHUNKED, chunk(b"x"))], ids=["fields", "field", "body"]
)
async def test_a_peer_that_drips_is_given_up(start: bytes, slow: bytes) -> None:
    """Each receive is in time, and the answer never is."""
    num_dripped, wanted = 0, ChainsWanted("e1", RECORD.fingerprint, 8)

    async def drip(writer: asyncio.StreamWriter) -> None:
        nonlocal num_dripped
        for _ in range(60):
            writer.write(slow)
            await writer.drain()
            await asyncio.sleep(0.1)
            num_dripped += 1

    async with answering(start, drip) as url:
        with pytest.raises((HTTPException, OSError, ValueError)):
            await asyncio.to_thread(PeerClient(RECORD, TOKEN).ask, url, "e1", wanted, Handover, 0.3)
    assert num_dripped < 40, "it was read to its end"


async def test_a_large_offer_may_take_longer_than_to_connect(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_CONNECT_TIMEOUT_S", 0.2)
    offer = Handover("http://me", "e1", RECORD.fingerprint, (OfferedChain(ROOT, bytes(8 << 20)),))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)  # as an event loop behind a step
        await reader.readexactly(8 << 20)
        writer.write(HEAD + b"content-length: 1\r\n\r\n" + pack({}))
        await writer.drain()

    async with listening(serve) as port:
        url = f"http://127.0.0.1:{port}"
        answer = await asyncio.to_thread(PeerClient(RECORD, TOKEN).ask, url, "e1", offer, dict[str, int], 5.0)
    assert answer == {}


async def test_an_interrupt_ends_a_read_that_waits() -> None:
    """A load that ends frees its thread."""
    asked, hangs = asyncio.Event(), asyncio.Event()

    async def hang(writer: asyncio.StreamWriter) -> None:
        asked.set()
        await hangs.wait()

    def read(url: str, opened: list[PeerStream]) -> bool:
        with PeerClient(RECORD, TOKEN).fetching(url, "e1", LINKS) as reader:
            opened.append(reader)
            return reader.read(LINKS[0], memoryview(bytearray(PAYLOAD_BYTES)), bytes)

    opened: list[PeerStream] = []
    async with answering(hang) as url:
        reading = asyncio.create_task(asyncio.to_thread(read, url, opened))
        await asked.wait()
        await until(lambda: len(opened) == 1)
        opened[0].interrupt()
        with pytest.raises((HTTPException, OSError, ValueError)):
            await reading


async def test_what_a_stranger_sees_opens_nothing_else() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))

    async with listening(serve) as port:
        await fetched(f"http://127.0.0.1:{port}", epoch="e0")
    assert TOKEN.encode() not in seen[0]
    shown = seen[0].partition(b"authorization: ")[2].partition(b"\r\n")[0].decode()
    assert shown
    async with moving_worker() as worker:
        for epoch in (None, "e0", "e1"):
            for path in ("/blocks", "/adopt", "/purge", "/state", "/generate"):
                headers = {"authorization": shown} | ({} if epoch is None else {"x-headstart-epoch": epoch})
                async with worker.http.post(worker.url + path, headers=headers, data=b"") as answer:
                    assert answer.status in (401, 409), (path, epoch)


@pytest.mark.parametrize(
    "url", ["", "ftp://127.0.0.1", "http://", "http://127.0.0.1:99999", "http://127.0.0.1:x", "http://[", "/x"]
)
async def test_an_address_that_is_none(url: str) -> None:
    got = await fetched(url)
    assert got.payloads == []
    assert got.error is not None


async def test_a_peer_shows_the_certificate_of_the_workers(tmp_path: Path) -> None:
    """All workers share one, for `--worker-tls-name`, and are called by their addresses."""
    authority = Authority(tmp_path)
    tls = certificate_files(*map(str, authority.issue("workers", "workers.example"))).context
    trusted, other = authority.path, Authority(tmp_path / "other").path
    async with answering(CHUNKED + WHOLE, tls=tls) as url:
        for ca, name, num_fetched in (
            (trusted, "workers.example", 8),
            (trusted, None, 0),
            (other, "workers.example", 0),
        ):
            got = await fetched(url, PeerClient(RECORD, TOKEN, ca_files(str(ca), name).context))
            assert len(got.payloads) == num_fetched
            assert num_fetched or isinstance(got.error, ssl.SSLCertVerificationError)


async def test_with_tls_the_token_never_leaves_in_the_clear() -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read(1))

    async with listening(serve) as port:
        client = PeerClient(RECORD, TOKEN, ssl.create_default_context())
        got = await fetched(f"http://127.0.0.1:{port}", client)
    assert isinstance(got.error, FetchError)
    assert seen == []
