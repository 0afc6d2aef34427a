"""One reader decides where a message ends: nothing of a body is ever a head, on any port, however the input is cut."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from tests.server.http.pipelines import Pipeline, mutated, pieces, pipeline
from tests.server.http.readers import NodeReader, OurPort, read_by_h11
from worker.common import http_reader
from worker.common.http_reader import RequestHead

PORTS = ["public", "ops", "worker", "adapter"]


async def check(port: OurPort, case: Pipeline, node: NodeReader | None) -> None:
    read, statuses, has_ended = await port.read(case.pieces)
    data = b"".join(case.pieces)
    assert read == case.expected, data
    assert statuses[: len(read)] == [200] * len(read), data
    refusals = statuses[len(read) :]
    assert len(refusals) == case.is_refused, data
    assert all(status in (400, 431, 505) for status in refusals), data
    assert has_ended == (case.is_refused or case.is_closed), data
    agree(read, data, node)


def agree(read: list[Any], data: bytes, node: NodeReader | None) -> None:
    """A second reader may refuse more or less. What both take is the same."""
    for other in (read_by_h11(data), node.read(data) if node else []):
        num_both = min(len(read), len(other))
        assert read[:num_both] == other[:num_both], data


def check_many(name: str, seed: str, num_cases: int, node: NodeReader | None) -> None:
    async def scenario() -> None:
        port, rng = OurPort(name), random.Random(seed)
        for _ in range(num_cases):
            case = pipeline(rng)
            await check(port, case, node)
            data = mutated(b"".join(case.pieces), rng)
            read, statuses, _ = await port.read(pieces(data, rng))
            assert statuses[: len(read)] == [200] * len(read), data
            assert len(statuses) <= len(read) + 1, data
            agree(read, data, node)

    asyncio.run(scenario())


@pytest.mark.parametrize(("kind", "num_cases"), [("short", 250), pytest.param("long", 7500, marks=pytest.mark.deep)])
@pytest.mark.parametrize("name", PORTS)
def test_pipelines_are_read_as_they_are_framed(name: str, kind: str, num_cases: int) -> None:
    """One answer a request, and consumed is what the head declares, in pieces of any size. Each is mutated, too."""
    with NodeReader() if kind == "long" or shutil.which("node") else nullcontext() as node:
        check_many(name, f"{kind} {name}", num_cases, node)


def skips_the_body_of_an_upgrade(head: RequestHead) -> bool:
    return any(name == b"connection" and b"upgrade" in value.lower() for name, value in head.headers)


def skips_the_body_of_connect(head: RequestHead) -> bool:
    return head.method == "CONNECT"


@pytest.fixture(params=[skips_the_body_of_an_upgrade, skips_the_body_of_connect])
def faulty_reader(request: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read as a parser that takes a message for the last of its protocol, and has no body then."""
    skips: Callable[[RequestHead], bool] = request.param
    whole = http_reader.read_head

    def faulty(data: bytes) -> RequestHead:
        is_connect = data.startswith(b"CONNECT ")
        head = whole(data.replace(b"CONNECT ", b"ODDPOST ", 1))
        head = head._replace(method="CONNECT") if is_connect else head
        if is_connect and skips is not skips_the_body_of_connect:
            raise http_reader.MessageError
        return head._replace(length=0) if skips(head) else head

    monkeypatch.setattr(http_reader, "read_head", faulty)


@pytest.mark.usefixtures("faulty_reader")
@pytest.mark.parametrize("name", PORTS)
def test_a_reader_that_skips_a_body_is_found(name: str) -> None:
    with pytest.raises(AssertionError):
        check_many(name, f"faulty {name}", 1000, None)
