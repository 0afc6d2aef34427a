"""What the parent knows of its processes: their metrics, their totals and their decisions, over unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, Final

import aiohttp
from prometheus_client import CollectorRegistry, generate_latest

from server.cli.serve.child import Child
from server.ops.decisions import DecisionLog
from server.ops.traffic import Totals
from server.processes.summing import Page, counted, read_page, summed, written

SCRAPE_TIMEOUT_S: Final = 2.0
_URL: Final = "http://process"
RETRY_S: Final = 0.5
MAX_LINE_BYTES: Final = 1 << 22


class Member:
    """One process, whichever life it is in."""

    def __init__(self, path: Path, child: Child) -> None:
        self._path = path
        self._child = child
        self._life = 0
        self._page: Page = {}
        self._retired: Page = {}
        """What earlier lives had counted when they were last asked."""
        self.totals: Totals | None = None
        """As its feed last told; None while nobody follows."""

    async def pages(self) -> list[Page]:
        """Of this life and of those before; of one that does not answer, what it last said."""
        try:
            async with self._session() as session, session.get(f"{_URL}/metrics") as response:
                text = await response.text()
        except (aiohttp.ClientError, TimeoutError, OSError):
            return [self._page, self._retired]
        if (life := self._child.num_restarts) != self._life:
            self._retired = summed([self._retired, counted(self._page)])
            self._life = life
        self._page = read_page(text)
        return [self._page, self._retired]

    async def follow(self, decisions: DecisionLog) -> None:
        """Pass on what the process's own feed says, for ever."""
        while True:
            before = self.totals
            with contextlib.suppress(aiohttp.ClientError, TimeoutError, OSError, ValueError):
                async for name, data in self._events():
                    if name == "decisions":
                        decisions.pass_on(data)
                    elif name == "snapshot":
                        totals = Totals(**data["totals"])
                        self.totals = totals if before is None else totals.plus(replace(before, in_flight=0.0))
            await asyncio.sleep(RETRY_S)

    async def _events(self) -> AsyncIterator[tuple[str, Any]]:
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=SCRAPE_TIMEOUT_S)
        connector = aiohttp.UnixConnector(str(self._path))
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=MAX_LINE_BYTES) as session,
            session.get(f"{_URL}/events") as response,
        ):
            name = ""
            async for line in response.content:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])

    def _session(self) -> aiohttp.ClientSession:
        timeout = aiohttp.ClientTimeout(total=SCRAPE_TIMEOUT_S)
        return aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(self._path)), timeout=timeout)


class Members:
    """All processes. Owned by the parent's event loop."""

    def __init__(self, members: Sequence[Member]) -> None:
        self._members = members
        self._followers: list[asyncio.Task[None]] = []

    async def metrics(self, own: CollectorRegistry) -> bytes:
        """Everybody's, the parent's included."""
        pages = [read_page(generate_latest(own).decode())]
        for each in await asyncio.gather(*(member.pages() for member in self._members)):
            pages += each
        return written(summed(pages))

    def watch(self, decisions: DecisionLog | None) -> None:
        """Follow the processes' feeds for somebody who looks, or no longer."""
        for task in self._followers:
            task.cancel()
        self._followers = []
        for member in self._members:
            member.totals = None
            if decisions is not None:
                self._followers.append(asyncio.create_task(member.follow(decisions)))

    def added_to(self, own: Totals) -> Totals:
        """The parent's totals and those of the processes, as last heard of."""
        known = [member.totals for member in self._members if member.totals is not None]
        return reduce(Totals.plus, known, own)
