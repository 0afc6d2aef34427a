"""Something else listens at the address of a server: the commands end with an error, and send nothing elsewhere."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from server.cli import common
from tests.running import listening
from tests.server.cli.commands import status_of
from tests.server.request.test_strangers import Answer, http, repeats, sends, stranger

KEY = "sk-only-for-the-address-that-was-given"
JSON = "content-type: application/json"
FEED = b"HTTP/1.1 200 X\r\ncontent-type: text/event-stream\r\n\r\n"
COMMANDS = {
    "index": ("index", "--ops", "URL", "--ops-key-file", "KEY"),
    "prefixes": ("index", "prefixes", "--ops", "URL", "--ops-key-file", "KEY"),
    "purge": ("index", "purge", "w0", "--ops", "URL", "--ops-key-file", "KEY"),
    "top": ("top", "--ops", "URL", "--json"),
}


@pytest.fixture(autouse=True)
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "MAX_ANSWER_BYTES", 1 << 20)


def words(command: str, url: str, folder: Path) -> list[str]:
    """Return a command line, and write the key that it names."""
    key = folder / "key"
    key.write_text(KEY)
    return [{"URL": url, "KEY": str(key)}.get(word, word) for word in COMMANDS[command]]


async def run(command: str, answer: Answer, folder: Path) -> int:
    async with stranger(answer) as there:
        return await asyncio.to_thread(status_of, *words(command, there.url, folder))


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
async def test_no_command_follows_a_redirect(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, status: int
) -> None:
    seen: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.read(65536))
        writer.write(http(200, b'{"workers": [], "prefixes": []}', JSON))

    async with listening(serve) as port:
        location = f"location: http://127.0.0.1:{port}/elsewhere"
        assert await run(command, sends(http(status, b'{"workers": []}', JSON, location)), tmp_path) == 1
    assert seen == []
    error = capsys.readouterr().err
    assert str(status) in error or "redirects" in error


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("part", [b" ", b"[", b'{"a":'], ids=["blank", "lists", "maps"])
async def test_an_endless_answer_ends_the_command(tmp_path: Path, command: str, part: bytes) -> None:
    """Without a length it is as long as its sender likes."""
    start = FEED + b"data: " if command == "top" else b"HTTP/1.1 200 X\r\ncontent-type: application/json\r\n\r\n"
    assert await run(command, repeats(start, part * 16_384), tmp_path) == 1


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("body", [b"[" * 100_000, b'{"a":' * 50_000, b"\xff", b"", b"<p>", b"1" * 5000, b"[NaN]", b"7"])
async def test_an_answer_of_another_kind_is_an_error(tmp_path: Path, command: str, body: bytes) -> None:
    answer = FEED + b"data: " + body + b"\n" if command == "top" else http(200, body, JSON)
    assert await run(command, closes(answer), tmp_path) == 1


def closes(answer: bytes) -> Answer:
    async def send(writer: asyncio.StreamWriter) -> None:
        writer.write(answer)
        await writer.drain()
        writer.close()

    return send
