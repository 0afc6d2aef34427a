"""Runs thousands of seeded cases in parallel lanes of one event loop, and reports every distinct failure with its case.

Case `n` of seed `s` draws all its choices from `random.Random("s:n")`. FUZZ_SEED in the environment sets the seed, and
FUZZ_CASE the only case to run. FUZZ_FAILURES sets the number of failures that end the run. Lanes share a machine, and
epochs are random: a failure of timing may need a few runs.
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import socket
import traceback
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol

import uvloop
from redis.exceptions import RedisError

from cache.redis_index import RedisDownError
from server.workers.connection import WorkerLost
from tests.waiting import HANG_S

SEED: Final = int(os.environ.get("FUZZ_SEED", "1"))
CASE: Final = os.environ.get("FUZZ_CASE")
CASES_PER_LANE: Final = 25
"""Cases until the lane is rebuilt, which bounds a case's history."""
MAX_FAILURES: Final = int(os.environ.get("FUZZ_FAILURES", "12"))
"""More are mostly the same."""
CASE_TIMEOUT_S: Final = 4 * HANG_S
_ROOT: Final = Path(__file__).parents[2]
_PRODUCT: Final = tuple(str(_ROOT / name) + os.sep for name in ("cache", "server", "worker"))

_current: ContextVar[str] = ContextVar("case", default="no case")
_ended: ContextVar[list[str]] = ContextVar("ended")
"""Exceptions with which tasks of this lane ended, maybe unobserved."""


class Lane(Protocol):
    """A rig that runs one case after the other."""

    notes: list[str]
    """The case's actions so far, for the report."""

    async def case(self, rng: random.Random) -> None:
        """Raises whatever is wrong."""


@dataclass
class Failures:
    """By what went wrong and where: how often, and the first one in full."""

    seed: int
    first: dict[str, str] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    num_cases: int = 0

    def add(self, case: str, error: BaseException, notes: list[str]) -> None:
        error = _innermost(error)
        signature = f"{type(error).__name__} at {_place(error)}"
        if isinstance(error, AssertionError):
            signature += f": {re.sub(r'[0-9]+', 'N', str(error))[:120]}"
        self.counts[signature] = self.counts.get(signature, 0) + 1
        if signature not in self.first:
            trace = "".join(traceback.format_exception(error)[-12:])
            report = "\n".join(f"  {note}" for note in notes)
            self.first[signature] = f"seed {self.seed} {case}\n{report}\n{trace}"

    @property
    def many(self) -> bool:
        return sum(self.counts.values()) >= MAX_FAILURES

    def check(self) -> None:
        """Raises AssertionError with all that was found."""
        if not self.first:
            return
        parts = [f"{sum(self.counts.values())} failures in {self.num_cases} cases:"]
        parts += [f"{count} x {signature}" for signature, count in self.counts.items()]
        parts += [f"--- {signature}\n{text}" for signature, text in self.first.items()]
        raise AssertionError("\n".join(parts))


async def run_cases(
    make_lane: Callable[[int], AbstractAsyncContextManager[Lane]], num_cases: int, num_lanes: int
) -> Failures:
    """Lane `k` of `num_lanes` takes the next case as soon as it has ended one."""
    failures = Failures(SEED)
    loop = asyncio.get_running_loop()

    def escaped(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        task = context.get("task") or context.get("future")
        case = task.get_name() if isinstance(task, asyncio.Task) else _current.get()
        error = context.get("exception") or AssertionError(context["message"])
        failures.add(f"{case}, to the loop's exception handler", error, [str(context["message"])])

    loop.set_exception_handler(escaped)
    loop.set_task_factory(_named_task)
    numbers = iter([int(CASE)]) if CASE is not None else iter(range(num_cases))
    lanes = [_run_lane(number, make_lane, numbers, failures) for number in range(1 if CASE is not None else num_lanes)]
    try:
        await asyncio.gather(*lanes)
    finally:
        loop.set_task_factory(None)
    return failures


async def _run_lane(
    number: int,
    make_lane: Callable[[int], AbstractAsyncContextManager[Lane]],
    numbers: Iterator[int],
    failures: Failures,
) -> None:
    while not failures.many:
        case, notes, ended = f"lane {number}", list[str](), list[str]()
        _current.set(case)
        _ended.set(ended)
        try:
            async with make_lane(number) as lane:
                for _ in range(CASES_PER_LANE):
                    index = None if failures.many else next(numbers, None)
                    if index is None:
                        return
                    case, notes = f"case {index}", lane.notes
                    notes.clear()
                    ended.clear()
                    _current.set(case)
                    failures.num_cases += 1
                    async with asyncio.timeout(CASE_TIMEOUT_S):
                        await lane.case(random.Random(f"{SEED}:{index}"))
        except Exception as error:
            failures.add(case, error, [*notes, *ended])


def _named_task(loop: asyncio.AbstractEventLoop, coro: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    """Return a task whose name has the lane or case in which it began."""
    task = asyncio.Task(coro, loop=loop, **options)
    task.set_name(f"{_current.get()}: {getattr(coro, '__qualname__', coro)}")
    ended = _ended.get(None)
    if ended is not None:
        task.add_done_callback(lambda task: _note_end(task, ended))
    return task


def _note_end(task: asyncio.Task[Any], ended: list[str]) -> None:
    if not task.cancelled() and (error := task._exception) is not None:  # exception() would take it for seen
        error = _innermost(error)
        if not isinstance(error, (OSError, RedisError, RedisDownError, WorkerLost)):
            ended.append(f"{task.get_name()} ended with {error!r:.200} at {_place(error)}")


async def within(seconds: float, condition: Callable[[], Awaitable[bool]], what: Callable[[], str]) -> None:
    """Wait for it. Only time that this event loop has seen counts, in pieces, so that a busy machine is no failure."""
    left_s, pause_s = seconds, 0.002
    while not await condition():
        assert left_s > 0, f"not within {seconds:g} s: {what()}"
        await asyncio.sleep(pause_s)
        left_s -= pause_s
        pause_s = min(0.05, 1.5 * pause_s)


def _innermost(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _place(error: BaseException) -> str:
    """The last line of the product in the traceback, or the last line there is."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if frame.filename.startswith(_PRODUCT)]
    if not (ours or frames):
        return "nowhere"
    frame = (ours or frames)[-1]
    return f"{frame.filename.removeprefix(str(_ROOT) + os.sep)}:{frame.lineno} {frame.name}"


# --- event loops without a name server -------------------------------------------------------------------------------


def _numeric(host: Any, port: Any, **options: Any) -> list[Any]:
    """Call `socket.getaddrinfo` for addresses only: it rejects names as usual, without asking a server."""
    options["flags"] = options.get("flags", 0) | socket.AI_NUMERICHOST
    return socket.getaddrinfo(host, port, **options)


class AsyncioLoop(asyncio.SelectorEventLoop):
    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:  # type: ignore[override]
        return _numeric(host, port, **options)


class Uvloop(uvloop.Loop):
    async def getaddrinfo(self, host: Any, port: Any, **options: Any) -> list[Any]:  # type: ignore[override]
        return _numeric(host, port, **options)


LOOPS: Final[dict[str, Callable[[], asyncio.AbstractEventLoop]]] = {"asyncio": AsyncioLoop, "uvloop": Uvloop}
