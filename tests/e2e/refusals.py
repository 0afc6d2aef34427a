"""The memory of gateways and adapters over long sequences of large requests: refused in every way, accepted, or left.

python -m tests.e2e.refusals --count 200 --only /v1/chat/completions
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

import aiohttp
import psutil

from tests.e2e.serving import free_ports
from tests.refusals import GOOD_KEY, KEYS, SLOW_KEY, Case, cases, sent
from tests.server.conftest import ANSWER, bundle_of, trained_tokenizer
from tests.server.scripted_worker import ScriptedWorker, listening
from tests.waiting import until
from tests.worker.adapter.refused_bodies import ENGINE_OPTIONS, adapter_cases
from tests.worker.adapter.rig import fake_engine, write_tokenizer

MIB: Final = 1 << 20
BODY_BYTES: Final = 10_000_000
MAX_GROWN_BYTES: Final = 64 * MIB
StartTargets = Callable[[Path, int], AbstractAsyncContextManager[dict[str, "Target"]]]
"""Runs processes for bodies of about that many bytes, with files in a folder. Each port that a case asks names one."""


@dataclass(frozen=True, slots=True)
class Row:
    """One case: its answers, and the process's memory above the start when it was over, and at its most."""

    case: Case
    statuses: Counter[int]
    end_bytes: int
    most_bytes: int

    @property
    def problem(self) -> str:
        """The description of the error; empty if there is none."""
        expected = {*(self.case.statuses or (0,))}
        if self.case.key == SLOW_KEY and self.statuses[200] <= self.statuses[429]:
            expected.add(200)  # each minute, one request is within the limit
        if not set(self.statuses) <= expected:
            return f"answers {dict(self.statuses)}"
        return f"{self.end_bytes / MIB:.0f} MiB are left" if self.end_bytes > MAX_GROWN_BYTES else ""

    def __str__(self) -> str:
        statuses = " ".join(f"{count} x {status}" for status, count in self.statuses.items())
        return f"{self.case!s:75} {statuses:20} {self.end_bytes / MIB:8.1f} {self.most_bytes / MIB:8.1f} {self.problem}"


@dataclass(frozen=True, slots=True)
class Target:
    """A process that is asked."""

    process: psutil.Process
    ports: dict[str, int]

    def rss_bytes(self) -> int:
        return int(self.process.memory_info().rss)

    def fits(self, num_bytes: int) -> bool:
        return self.rss_bytes() <= num_bytes


@asynccontextmanager
async def gateways(folder: Path, num_bytes: int) -> AsyncIterator[dict[str, Target]]:
    """Run a gateway with a worker, and one without, by the name of the port that a case asks."""
    tokenizer = trained_tokenizer()
    worker = ScriptedWorker(bundle_of(tokenizer), reply=tokenizer.encode(ANSWER).ids, pace_s=0.001)
    (folder / "keys.toml").write_text(KEYS)
    (folder / "ops_key").write_text(GOOD_KEY)
    async with AsyncExitStack() as stack:
        worker.url = await stack.enter_async_context(listening(worker.app()))
        full = await stack.enter_async_context(_gateway(folder, worker.url, num_bytes, status=200))
        empty = await stack.enter_async_context(_gateway(folder, "http://127.0.0.1:9", num_bytes, status=503))
        yield {"public": full, "ops": full, "empty": empty}


def _gateway(folder: Path, worker_url: str, num_bytes: int, *, status: int) -> AbstractAsyncContextManager[Target]:
    """Run a gateway that takes bodies of twice `num_bytes`."""
    public, ops = free_ports(2)
    options = ["--port", str(public), "--ops-port", str(ops)]
    options += ["--workers", worker_url, "--api-keys", str(folder / "keys.toml")]
    options += ["--ops-key-file", str(folder / "ops_key"), "--max-body", str(2 * num_bytes)]
    return _process("server.gateway", options, {"public": public, "empty": public, "ops": ops}, status=status)


@asynccontextmanager
async def adapters(folder: Path, num_bytes: int) -> AsyncIterator[dict[str, Target]]:
    """Run the adapter of a fake engine."""
    [port] = free_ports(1)
    async with fake_engine(write_tokenizer(folder), *ENGINE_OPTIONS, events=False) as (_, url):
        options = ["--engine", "vllm", "--engine-url", url, "--port", str(port), "--events", "none"]
        async with _process("worker", options, {"public": port}) as adapter:
            yield {"public": adapter}


@asynccontextmanager
async def _process(
    module: str, options: Sequence[str], ports: dict[str, int], *, status: int = 200
) -> AsyncIterator[Target]:
    """Run a program, once its readiness has the `status`."""
    quiet, public = asyncio.subprocess.DEVNULL, ports["public"]
    process = await asyncio.create_subprocess_exec(sys.executable, "-m", module, *options, stdout=quiet, stderr=quiet)

    async def answers() -> bool:
        assert process.returncode is None, f"{module} has ended"
        try:
            async with session.get(f"http://127.0.0.1:{public}/health/ready") as answer:
                return answer.status == status
        except aiohttp.ClientError:
            return False

    try:
        async with aiohttp.ClientSession() as session:
            await until(answers)
        yield Target(psutil.Process(process.pid), ports)
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def measure(
    chosen: Sequence[Case], count: int, num_bytes: int = BODY_BYTES, start_targets: StartTargets = gateways
) -> list[Row]:
    """Send `count` requests of each case, one after the other, and print a line for each.

    The start is after one of each: the first loads modules, and fills caches and the allocator's pools.
    """
    rows = []
    with TemporaryDirectory() as folder:
        async with start_targets(Path(folder), num_bytes) as targets:
            for case in chosen:
                async with sent(case, targets[case.port].ports[case.port], partial(case.body, num_bytes)):
                    pass
            start = {name: target.rss_bytes() for name, target in targets.items()}
            print(f"{'':75} {'answers':20} {'left MiB':>8} {'most MiB':>8}")
            for case in chosen:
                target, statuses, most = targets[case.port], Counter[int](), 0
                body = partial(bytes, case.body(num_bytes))  # made once
                for _ in range(count):
                    async with sent(case, target.ports[case.port], body) as status:
                        statuses[status] += 1
                    most = max(most, target.rss_bytes())
                above = start[case.port]
                with suppress(TimeoutError):  # a process frees a body after its answer
                    await until(partial(target.fits, above + MAX_GROWN_BYTES), timeout_s=10)
                rows.append(Row(case, statuses, target.rss_bytes() - above, most - above))
                print(rows[-1], flush=True)
    return rows


def main() -> int:
    """Return 1 when memory is left, or an answer is another than it should be."""
    parser = argparse.ArgumentParser(description="Memory of a gateway or an adapter over sequences of large requests.")
    parser.add_argument("--adapter", action="store_true", help="ask an adapter (default: a gateway)")
    parser.add_argument("--count", type=int, default=20, help="requests of each case (default 20)")
    parser.add_argument("--bytes", type=int, default=BODY_BYTES, help="size of a body (default 10 MB)")
    parser.add_argument("--only", nargs="+", metavar="ROUTE", help="routes (default: all)")
    options = parser.parse_args()
    all_cases, targets = (adapter_cases(), adapters) if options.adapter else (cases(), gateways)
    chosen = [case for case in all_cases if not options.only or case.route in options.only]
    rows = asyncio.run(measure(chosen, options.count, options.bytes, targets))
    return int(any(row.problem for row in rows))


if __name__ == "__main__":
    sys.exit(main())
