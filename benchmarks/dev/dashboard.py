"""`headstart bench dashboard`: what an open dashboard costs the gateway and the browser.

One real gateway on one core; Redis, 64 registered workers without a model, the load and a real Chromium on the other.
The load is the same all the time; the page is open in every other phase, and what it costs is the difference.

    phase      quiet | watched | quiet | watched           cost = processor time watched - quiet, over the time
"""

from __future__ import annotations

import asyncio
import importlib
import shutil
import statistics
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil
import uvloop

from benchmarks.dev.gateway_load.client import BrokenAnswerError, Connection, post
from benchmarks.dev.gateway_load.processes import until_ready
from benchmarks.dev.gateway_load.site import prepare
from benchmarks.report import Figure, Report, option_parser, publish

NUM_CONNECTIONS: Final = 64
NUM_BODIES: Final = 500
PROMPT_TOKENS: Final = 200
SETTLE_S: Final = 3.0


class ChromiumMissingError(Exception):
    """No Chromium or no Playwright. The text names the command that installs them."""


@dataclass(frozen=True, slots=True)
class Tab:
    """One page as it is after the measurement."""

    private_bytes: int
    """Private memory of the page's own process."""
    heap_bytes: int
    """JavaScript heap of the page."""
    num_nodes: int


def main(argv: Sequence[str]) -> int:
    parser = option_parser("dashboard", "The cost of an open dashboard.")
    parser.add_argument("--workers", type=int, default=64, help="registered (default 64)")
    parser.add_argument("--rate", type=float, default=200.0, help="requests a second (default 200)")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each of the four phases (default 15)")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="write a picture of the page under load there")
    options = parser.parse_args(argv)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, ExitStack() as stack:
            measured = runner.run(_measure(stack, options.workers, options.rate, options.seconds, options.picture))
    except ChromiumMissingError as error:
        print(f"headstart bench dashboard: {error}", file=sys.stderr)
        return 2
    facts = {"workers": options.workers, "offered_per_s": options.rate, "phase_s": options.seconds}
    publish(Report("dashboard", measured, facts), options)
    return 0


async def _measure(
    stack: ExitStack, num_workers: int, rate: float, phase_s: float, picture: Path | None
) -> list[Figure]:
    site = await prepare(stack)
    first = stack.enter_context(site.stub(num_workers=num_workers))
    public, ops, pid = stack.enter_context(site.gateway(first))
    await until_ready(public, num_workers)
    bodies = [site.traffic.chat(PROMPT_TOKENS, max_tokens=4) for _ in range(NUM_BODIES)]
    gateway = psutil.Process(pid)
    failures: Counter[str] = Counter()
    load = asyncio.create_task(_offer(public + "/v1/chat/completions", bodies, rate, failures))
    try:
        async with _chromium() as browser:
            quiet, watched = [], []
            for _ in range(2):
                quiet.append(await _busy(gateway, phase_s))
                page = await browser.new_page(viewport={"width": 1360, "height": 900})
                await page.goto(f"{ops}/dashboard")
                await page.wait_for_selector("tr[data-worker]")
                watched.append(await _busy(gateway, phase_s))
                rate_seen = float((await page.inner_text("#open-more")).split(" ")[0])
                tab = await _tab(page)
                if picture is not None:
                    await page.screenshot(path=picture)
                await page.close()
            if load.done():
                load.result()
    finally:
        load.cancel()
        await asyncio.gather(load, return_exceptions=True)
    for text, count in failures.most_common(3):
        print(f"{count} x {text}", file=sys.stderr)
    cost = statistics.mean(watched) - statistics.mean(quiet)
    return [
        Figure("decisions_per_s", rate_seen, "1/s", "as the page shows at the end"),
        Figure("failed_requests", failures.total(), "", "for lack of processor time, if any", "0"),
        Figure("gateway_busy_quiet", statistics.mean(quiet), "of a core", "no dashboard is open"),
        Figure("gateway_busy_watched", statistics.mean(watched), "of a core", "one dashboard is open"),
        Figure("dashboard_cost", cost, "of a core", "the difference", "<= 0.05"),
        Figure("tab_bytes", tab.private_bytes, "B", "private memory of the page's process", "<= 100 MB"),
        Figure("heap_bytes", tab.heap_bytes, "B", "its JavaScript"),
        Figure("dom_nodes", tab.num_nodes, "", "in the page"),
    ]


async def _busy(process: psutil.Process, seconds: float) -> float:
    """The share of a core that it takes, once things have settled."""
    await asyncio.sleep(SETTLE_S)
    begun_s, before = time.monotonic(), process.cpu_times()
    await asyncio.sleep(seconds)
    after, elapsed_s = process.cpu_times(), time.monotonic() - begun_s
    return float(after.user + after.system - before.user - before.system) / elapsed_s


async def _offer(url: str, bodies: Sequence[bytes], rate: float, failures: Counter[str]) -> None:
    """Requests at a steady rate, until cancelled; those that find no free connection wait for one."""
    idle: asyncio.Queue[Connection] = asyncio.Queue()
    for _ in range(NUM_CONNECTIONS):
        idle.put_nowait(await Connection.open(url))

    async def ask(connection: Connection, body: bytes) -> None:
        try:
            await connection.ask(post(url, body))
        except BrokenAnswerError as error:
            failures[str(error).splitlines()[-1][:200]] += 1
            connection = await Connection.open(url)
        idle.put_nowait(connection)

    begun_s, number = time.monotonic(), 0
    async with asyncio.TaskGroup() as group:
        while True:
            await asyncio.sleep(max(0.0, begun_s + number / rate - time.monotonic()))
            group.create_task(ask(await idle.get(), bodies[number % len(bodies)]))
            number += 1


@asynccontextmanager
async def _chromium() -> AsyncIterator[Any]:
    """Raises ChromiumMissingError."""
    program = shutil.which("chromium") or shutil.which("google-chrome")
    try:
        playwright_api = importlib.import_module("playwright.async_api")
    except ModuleNotFoundError:
        program = None
    if program is None:
        raise ChromiumMissingError("it needs Chromium (apt-get install chromium) and requirements/browser.txt")
    async with playwright_api.async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        try:
            yield browser
        finally:
            await browser.close()


async def _tab(page: Any) -> Tab:
    """The page's process is the renderer that takes most: there is one page."""
    session = await page.context.new_cdp_session(page)
    await session.send("Performance.enable")
    metrics = {each["name"]: each["value"] for each in (await session.send("Performance.getMetrics"))["metrics"]}
    renderers = [p for p in psutil.Process().children(recursive=True) if "--type=renderer" in p.cmdline()]
    private = max(process.memory_full_info().uss for process in renderers)
    return Tab(private, int(metrics["JSHeapUsedSize"]), int(metrics["Nodes"]))
