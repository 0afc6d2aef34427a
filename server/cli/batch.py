"""`headstart batch`: answer a file of requests in OpenAI's batch format, at any server that speaks its API.

Lines are sent in the order of their prompts: those that share a prefix follow each other and find it cached.
Answers are appended as they come. A run that was killed resumes: it skips lines that have an answer.
"""

from __future__ import annotations

import argparse
import asyncio
import fcntl
import math
import random
import signal
import sys
import time
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Final, Literal
from uuid import uuid4
from zlib import crc32

import aiohttp
import msgspec
from msgspec import Meta, Raw, Struct

from server.cli.common import CommandError, RedirectError, between, read_answer, secret_file, web_url
from worker.common.command_line import CommandParser, reason
from worker.common.tls import client_context

PREFIX_FIELDS: Final = ("model", "cache_salt", "tools", "system", "instructions", "messages", "prompt", "input")
"""The fields that make the prompt, in the order in which templates write them."""
CHUNK_BYTES: Final = 64  # about a block of 16 tokens: what is cached of a prompt are blocks
MAX_ANSWER_BYTES: Final = 256 << 20  # more than any answer has, and bounds a wrong server's
MAX_WAIT_S: Final = 30.0  # a server that is back is found within it
REPORT_S: Final = 10.0  # a log of hours stays short
ID_START: Final = b'{"id":"batch_req_'
MAX_REASONS: Final = 5  # more are mostly the same


class RequestLine(Struct):
    custom_id: Annotated[str, Meta(min_length=1)]
    method: Literal["POST"]
    url: Annotated[str, Meta(pattern="^/v1/")]
    body: dict[str, Raw]


class AnsweredLine(Struct):
    """The part of an answer that a later run needs."""

    custom_id: str
    response: Raw


class Place(Struct, order=True, frozen=True):
    """The place of a request in its file."""

    key: bytes
    offset: int
    num_bytes: int


REQUEST: Final = msgspec.json.Decoder(RequestLine)
ANSWERED: Final = msgspec.json.Decoder(AnsweredLine)


def prefix_key(line: RequestLine) -> bytes:
    """Return bytes that sort lines with a common prefix next to each other: a checksum for each piece of the prompt."""
    text = b"\0".join([line.url.encode(), *(bytes(line.body.get(name, b"")) for name in PREFIX_FIELDS)])
    return array("I", [crc32(text[at : at + CHUNK_BYTES]) for at in range(0, len(text), CHUNK_BYTES)]).tobytes()


def read_requests(file: BinaryIO, name: str, *, by_prefix: bool) -> dict[str, Place]:
    """Check every line, and return the places by `custom_id`. Raises ValueError, which names the line."""
    places: dict[str, Place] = {}
    offset = 0
    for number, text in enumerate(file, start=1):
        start, offset = offset, offset + len(text)
        if not text.strip():
            continue
        try:
            line = REQUEST.decode(text)
            if line.custom_id in places:
                raise ValueError(f"an earlier line has the custom_id {line.custom_id!r} too")
            if bytes(line.body.get("stream", b"")) == b"true":
                raise ValueError("an answer in a file cannot be streamed: leave body.stream out")
        except ValueError as error:
            raise ValueError(f"{name}, line {number}: {error}") from None
        places[line.custom_id] = Place(prefix_key(line) if by_prefix else b"", start, len(text))
    return places


class AnswerFile:
    """The file of answers, owned by one run at a time and only ever appended to."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        """Raises ValueError if the file holds other lines than answers, CommandError if another run uses it."""
        self._file = file
        self._gap = b""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.custom_ids = set(self._read(name))
        except BlockingIOError:
            raise CommandError(f"another run writes to {name}") from None

    def _read(self, name: str) -> Iterator[str]:
        self._file.seek(0)
        size = 0
        for number, text in enumerate(self._file, start=1):
            if not text.endswith(b"\n") and ID_START.startswith(text[: len(ID_START)]):  # torn by a kill
                self._file.truncate(size)
                return
            try:
                yield ANSWERED.decode(text).custom_id
            except ValueError as error:
                raise ValueError(f"{name}, line {number} is no answer of a batch: {error}") from None
            self._gap = b"" if text.endswith(b"\n") else b"\n"  # after a last line, as an editor left it
            size += len(text)

    def append(self, custom_id: str, response: dict[str, Any]) -> None:
        answer = {"id": f"batch_req_{uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}
        self._file.write(self._gap + msgspec.json.encode(answer) + b"\n")
        self._gap = b""
        self._file.flush()


@dataclass(slots=True)
class Tally:
    """Counts what a run has done."""

    num_before: int
    num_lines: int
    num_answered: int = 0
    num_refused: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    failures: list[str] = field(default_factory=list)
    started_s: float = field(default_factory=time.monotonic)

    def add(self, status: int, body: dict[str, Any]) -> None:
        self.num_answered += 1
        self.num_refused += status >= 400
        usage = body.get("usage") or {}
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        read = usage.get("cache_read_input_tokens") or 0  # which Anthropic does not count among the input tokens
        self.num_prompt_tokens += (usage.get("prompt_tokens") or usage.get("input_tokens") or 0) + read
        self.num_cached_tokens += (details.get("cached_tokens") or 0) + read
        self.num_output_tokens += usage.get("completion_tokens") or usage.get("output_tokens") or 0

    def text(self) -> str:
        elapsed_s = time.monotonic() - self.started_s
        cached = f", {self.num_cached_tokens / self.num_prompt_tokens:.0%} cached" if self.num_prompt_tokens else ""
        return (
            f"{self.num_before + self.num_answered} of {self.num_lines} lines have an answer ({self.num_before} from "
            f"before, {self.num_refused} refused); {self.num_answered / elapsed_s:.2f} lines/s, "
            f"{self.num_prompt_tokens} prompt tokens{cached}, {self.num_output_tokens} output tokens"
        )


class Batch:
    """One run: sends the requests, `concurrency` at a time, and appends what comes back."""

    def __init__(self, args: argparse.Namespace, requests: BinaryIO, answers: AnswerFile, tally: Tally) -> None:
        self._base = args.url.removesuffix("/v1")
        self._retry_s: float = args.retry_s
        self._by_prefix = args.order == "prefix"
        self._requests = requests
        self._answers = answers
        self._tally = tally
        self._answered_s = 0.0
        self._problem = ""
        """Why the server cannot be reached, as it was last shown."""

    async def run(self, session: aiohttp.ClientSession, places: Sequence[Place], concurrency: int) -> None:
        """Raises CommandError when no line can be answered."""
        # Several stretches of the order at a time, so that a fleet has several prefixes to spread over its workers.
        num_stretches = round(math.sqrt(concurrency)) if self._by_prefix else 1
        size = -(-len(places) // num_stretches)
        stretches = [deque(places[i * size : (i + 1) * size]) for i in range(num_stretches)]

        async def work(stretch: deque[Place]) -> None:
            while stretch or (stretch := max(stretches, key=len)):
                await self._answer(session, stretch.popleft())

        try:
            async with asyncio.TaskGroup() as group:
                for number in range(min(concurrency, len(places))):
                    group.create_task(work(stretches[number % num_stretches]))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _answer(self, session: aiohttp.ClientSession, place: Place) -> None:
        self._requests.seek(place.offset)
        line = REQUEST.decode(self._requests.read(place.num_bytes))
        body = msgspec.json.encode(line.body)
        failed_s, wait_s = 0.0, 0.5
        while True:
            try:
                async with session.post(self._base + line.url, data=body, allow_redirects=False) as response:
                    status, headers = response.status, response.headers
                    raw = await read_answer(response, MAX_ANSWER_BYTES)
                self._answered_s = time.monotonic()
            except RedirectError as error:
                raise CommandError(f"{self._base}{line.url}: {error} as --url") from None
            except ValueError as error:
                self._tally.failures.append(f"{line.custom_id}: {error}")
                return
            except (aiohttp.ClientError, TimeoutError) as error:
                status, failure, asked_wait_s = 0, f"{self._base}: {reason(error)}", 0.0
                if failure != self._problem:
                    print(f"headstart batch: {failure}; trying again for {self._retry_s:.0f} s", file=sys.stderr)
                    self._problem = failure
            else:
                if status < 500 and status not in (408, 429):
                    return self._take(line, status, raw, headers.get("x-request-id", ""))
                failure, asked_wait_s = f"{status} {excerpt(raw)}", seconds(headers.get("retry-after", ""))
                if headers.get("x-should-retry") == "false":
                    asked_wait_s = math.inf
            failed_s = failed_s or time.monotonic()
            wait_s = min(2.0 * wait_s, MAX_WAIT_S)
            pause_s = max(asked_wait_s, wait_s * random.uniform(0.5, 1.0))
            if time.monotonic() + pause_s - failed_s >= self._retry_s:
                if not status and self._answered_s < failed_s:  # nor to any other line
                    raise CommandError(f"{failure}, for {self._retry_s:.0f} s; run it again to go on")
                self._tally.failures.append(f"{line.custom_id}: {failure}")
                return
            await asyncio.sleep(pause_s)

    def _take(self, line: RequestLine, status: int, raw: bytes, request_id: str) -> None:
        """Append an answer. Raises CommandError if every other line would get the same error."""
        try:
            answer = msgspec.json.decode(raw)
        except (ValueError, RecursionError):
            answer = None
        if status == 401 or not isinstance(answer, dict):
            where = f"{self._base}{line.url}"
            raise CommandError(f"{where} answered {status}: {excerpt(raw)}; check --url and --api-key-file")
        body = Raw(msgspec.json.format(raw, indent=-1))
        self._answers.append(line.custom_id, {"status_code": status, "request_id": request_id, "body": body})
        self._tally.add(status, answer)


def excerpt(raw: bytes) -> str:
    return " ".join(raw[:200].decode(errors="replace").split())


def seconds(retry_after: str) -> float:
    """Read a header that may also be a date."""
    try:
        return max(0.0, float(retry_after))
    except ValueError:
        return 0.0


async def show(tally: Tally) -> None:
    """Print a line at intervals."""
    while True:
        await asyncio.sleep(REPORT_S)
        print(f"headstart batch: {tally.text()}", file=sys.stderr, flush=True)


async def run(args: argparse.Namespace, requests: BinaryIO, answers: AnswerFile, places: Sequence[Place]) -> Tally:
    """Answer the requests at these places. Raises CommandError, OSError."""
    num_before = len(answers.custom_ids)
    tally = Tally(num_before, num_before + len(places))
    headers = {"content-type": "application/json"}
    if args.api_key_file is not None:
        headers["authorization"] = f"Bearer {args.api_key_file}"
    connector = aiohttp.TCPConnector(limit=0, ssl=client_context("--ca-file", args.ca_file))
    timeout = aiohttp.ClientTimeout(total=args.timeout_s)
    shown = asyncio.create_task(show(tally))
    try:
        async with aiohttp.ClientSession(connector=connector, timeout=timeout, headers=headers) as session:
            await Batch(args, requests, answers, tally).run(session, places, args.concurrency)
    finally:
        shown.cancel()
        await asyncio.gather(shown, return_exceptions=True)
        print(tally.text())
    return tally


def parser() -> CommandParser:
    p = CommandParser(
        prog="headstart batch",
        command="batch",
        description="Answer a file of requests in OpenAI's batch format. Run it again after a kill: it goes on.",
    )
    add = p.add_argument
    add("requests", type=Path, metavar="IN", help="a line of JSON for each request: custom_id, method, url, body")
    add("answers", type=Path, metavar="OUT", help="answers are appended here, in the order in which they come")
    add("--url", type=web_url, default="http://127.0.0.1:8000", help="the server, with or without /v1")
    add("--api-key-file", type=secret_file, metavar="FILE", help="key that the server wants")
    add("--ca-file", type=Path, metavar="FILE", help="CA of its certificate (default: the system's)")
    add("--concurrency", type=between(1, 10_000), default=64, metavar="N", help="open requests (default 64)")
    add(
        "--order",
        choices=("prefix", "file"),
        default="prefix",
        help="prefix: lines that share one follow each other and find it cached; file: as they stand (default prefix)",
    )
    add("--timeout-s", type=between(1, 1e6, float), default=600.0, metavar="S", help="of one try (default 600)")
    add(
        "--retry-s",
        type=between(0, kind=float),
        default=600.0,
        metavar="S",
        help="how long a line is tried again after 408, 429, a 5xx or no answer (default 600)",
    )
    return p


def main(argv: Sequence[str]) -> int:
    args = parser().parse_args(argv)
    with args.requests.open("rb") as requests:
        places = read_requests(requests, str(args.requests), by_prefix=args.order == "prefix")
        with args.answers.open("a+b") as file:
            answers = AnswerFile(file, str(args.answers))
            if others := answers.custom_ids - places.keys():
                other = f"{args.answers} has an answer to {min(others)!r}"
                raise ValueError(f"{other}, which {args.requests} does not ask: name another OUT")
            rest = sorted(place for custom_id, place in places.items() if custom_id not in answers.custom_ids)
            try:
                tally = asyncio.run(run(args, requests, answers, rest))
            except KeyboardInterrupt:
                print("headstart batch: stopped; run it again to go on", file=sys.stderr)
                return 128 + signal.SIGINT
    for failure in tally.failures[:MAX_REASONS]:
        print(f"headstart batch: no answer to {failure}", file=sys.stderr)
    if tally.failures:
        print(f"headstart batch: {len(tally.failures)} lines are left; run it again to try them", file=sys.stderr)
    return 1 if tally.failures else 0
