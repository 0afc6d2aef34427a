"""Nothing of a request outlives its answer: reference counts free it, whatever the route and the reason."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from server.auth.limits import AuthThrottle
from server.request.request import Generation
from server.workers.fleet import Fleet
from tests.refusals import GOOD_KEY, KEYS, Case, cases, frozen, no_collections, sent
from tests.server.gateway_app import RunningGateway, gateway
from tests.server.http.test_tls import LIMITS, Port
from tests.server.scripted_worker import Die, Refuse, Script, ScriptedWorker, script_of
from tests.waiting import until
from worker.wire import Failed, Frame, GenerateRequest, Started, Tokens

pytestmark = pytest.mark.e2e

BODY_BYTES = 400_000
LARGE_BYTES = 50_000
KINDS = (str, bytes, bytearray, list, tuple, dict)
PRODUCT = str(Path(__file__).parents[2] / "server")


def large_objects() -> dict[int, Any]:
    """Every reachable object of many bytes, by its id."""
    found = {}
    for holder in gc.get_objects():
        for each in gc.get_referents(holder):
            if type(each) in KINDS and sys.getsizeof(each) > LARGE_BYTES:
                found[id(each)] = each
    return found


def garbage() -> list[str]:
    """Name the product's frames and objects that only the collector frees, and the exceptions."""
    gc.collect()
    names = set()
    for each in gc.garbage:
        if isinstance(each, FrameType):
            if each.f_code.co_filename.startswith(PRODUCT):
                names.add(f"{each.f_code.co_qualname} {each.f_lineno}")
        elif isinstance(each, BaseException):
            if not isinstance(each, (asyncio.CancelledError, ExceptionGroup, Die)):  # of the scripted worker's server
                names.add(f"{each!r:.100}")
        elif type(each).__module__.startswith("server."):
            names.add(type(each).__name__)
    gc.garbage.clear()
    return sorted(names)


class Ports:
    """The gateways of a test, by the name of the port that a case asks."""

    def __init__(self, worker: ScriptedWorker, gateways: dict[str, RunningGateway], ops: int) -> None:
        self._worker = worker
        self._gateways = list(gateways.values())
        self.numbers = {name: int(each.url.rpartition(":")[2]) for name, each in gateways.items()} | {"ops": ops}

    async def idle(self) -> None:
        """Wait until every request has ended; the parts of the tests forget them too."""
        await until(lambda: not any(each.metrics.num_in_flight for each in self._gateways))
        await until(lambda: not self._worker.num_running)
        for _ in range(5):  # until callbacks of tasks that have ended have run
            await asyncio.sleep(0.001)
        self._worker.received.clear()
        self._worker.aborted.clear()
        for each in self._gateways:
            each.router.placements.clear()


@asynccontextmanager
async def ports(tmp_path: Path, worker: ScriptedWorker) -> AsyncIterator[Ports]:
    keys, ops_key = tmp_path / "keys.toml", tmp_path / "ops_key"
    keys.write_text(KEYS)
    ops_key.write_text(GOOD_KEY)
    options: dict[str, Any] = {"api_keys": str(keys), "ops_key_file": str(ops_key), "throttle": AuthThrottle(1e6)}
    async with (
        gateway(worker, **options) as target,
        gateway(**options) as empty,
        Port(None, LIMITS, target.ops) as ops,
    ):
        yield Ports(worker, {"public": target, "empty": empty}, ops.port)


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No probes of workers, which may fail as they like, and no log records, which pytest keeps with exceptions."""
    monkeypatch.setattr(Fleet, "run", lambda fleet: asyncio.Event().wait())
    monkeypatch.setattr("server.request.request.PAUSE_S", 0.01)
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.usefixtures("quiet")
async def test_nothing_of_a_request_outlives_its_answer(tmp_path: Path, worker: ScriptedWorker) -> None:
    worker.pace_s = 0.002
    wrong: dict[str, Any] = {}
    async with ports(tmp_path, worker) as target, AsyncExitStack() as connections:
        before = large_objects()
        with frozen():
            for case in cases():
                async with sent(case, target.numbers[case.port], partial(case.body, BODY_BYTES)):
                    await target.idle()  # the first one fills caches
                with no_collections():
                    one = sent(case, target.numbers[case.port], partial(case.body, BODY_BYTES))
                    status = await connections.enter_async_context(one)  # it stays open
                    await target.idle()
                    if (cycles := garbage()) or status not in (case.statuses or (0,)):
                        wrong[str(case)] = status, cycles
        left = [f"{type(each).__name__} {each!r:.80}" for at, each in large_objects().items() if at not in before]
    assert not wrong, "\n".join(f"{case}: {what}" for case, what in wrong.items())
    assert not left, "\n".join([f"{len(left)} large objects, among them:", *left[:10]])


async def fails_late(asked: GenerateRequest) -> AsyncIterator[Frame]:
    yield Started(0)
    yield Tokens(0, (65,))
    await asyncio.sleep(0.01)
    raise Die


def refuses(status: int, code: str) -> Script:
    async def behave(asked: GenerateRequest) -> AsyncIterator[Frame]:
        if status:
            raise Refuse(status, code)
        yield Started(0)

    return behave


BEHAVIOURS: dict[str, Script] = {
    "full": refuses(429, "queue_full"),
    "draining": refuses(503, "draining"),
    "wrong epoch": refuses(409, "wrong_epoch"),
    "invalid": refuses(400, "invalid_request"),
    "too large": refuses(413, "payload_too_large"),
    "broken": refuses(500, "internal"),
    "fails": script_of(Started(0), Failed("internal", "broken", retryable=False)),
    "dies": fails_late,
}


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("name", BEHAVIOURS)
async def test_nothing_of_a_request_outlives_the_failure_of_its_worker(
    name: str, tmp_path: Path, worker: ScriptedWorker
) -> None:
    """One prompt or two, whole or streamed."""
    worker.behave = BEHAVIOURS[name]
    one, two = {"prompt": "Hi"}, {"prompt": ["Hi", "There"]}
    bodies = [{"model": "tiny", **prompt, "stream": stream} for prompt in (one, two) for stream in (False, True)]
    async with ports(tmp_path, worker) as target:
        with frozen():
            for body in bodies:
                case = Case("/v1/completions", name, (), lambda size, body=body: json.dumps(body).encode())  # type: ignore[misc]
                async with sent(case, target.numbers["public"], partial(case.body, 0)):
                    await target.idle()
                with no_collections():
                    async with sent(case, target.numbers["public"], partial(case.body, 0)):
                        await target.idle()
                        alive = any(type(each) is Generation for each in gc.get_objects())
                        assert (alive, garbage()) == (False, [])
