"""`headstart top`: the dashboard's facts in a terminal, from the live feed of a gateway's ops port."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

RETRY_S: Final = 1.0
SILENT_S: Final = 5.0
"""A healthy gateway sends a snapshot twice a second."""
MAX_EVENT_BYTES: Final = 8 << 20
PLAIN_COLUMNS: Final = 160
MAX_DECISIONS: Final = 50
NUM_FIXED_LINES: Final = 13
"""Lines that are no row: the head, table headings and blank lines."""
_BAR: Final = 12
_STATES: Final = {"serving": "green", "draining": "yellow", "broken": "red", "lost": "dim"}
_NUMBERS: Final = ("RUN", "WAIT", "BLOCKS", "HITS", "PREFILL", "QUEUED", "LEASE")
_LOAD: Final = ("running", "waiting", "prefill_tokens_per_s", "queued_s")


class FeedError(Exception):
    """There is no feed, or it has ended. The text says what to do."""


class View:
    """State of the feed: the latest event of each name, and the latest decisions."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {"hello": {}, "prefixes": {"prefixes": []}}
        self.decisions: deque[dict[str, Any]] = deque(maxlen=MAX_DECISIONS)
        """The latest last."""

    def update(self, name: str, data: Any) -> None:
        """Apply one event."""
        self.latest[name] = data
        self.decisions.extend(data["decisions"] if name in ("hello", "decisions") else ())
        found = data["found"] if name == "decisions" else {}
        for decision in self.decisions:
            decision["found_tokens"] = found.get(decision["request"], decision["found_tokens"])

    def as_json(self) -> dict[str, Any]:
        about = {name: self.latest["hello"].get(name) for name in ("version", "gateway", "policy")}
        return {**about, **self.latest["snapshot"], **self.latest["prefixes"], "decisions": list(self.decisions)}


async def events(url: str) -> AsyncGenerator[tuple[str, Any], None]:
    """Yield the name and data of each event. Ends with FeedError always."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_S, sock_read=SILENT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=MAX_EVENT_BYTES) as session,
            session.get(f"{url}/events", headers={"accept": "text/event-stream"}) as response,
        ):
            if response.status != 200 or response.content_type != "text/event-stream":
                problem = f"{url} answered {response.status}, no feed"
                raise FeedError(f"{problem}: is it the ops port of a gateway (8001 by default)?")
            name = ""
            async for line in response.content:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    yield name, json.loads(line[6:])
    except TimeoutError:
        raise FeedError(f"{url} is silent: the gateway hangs or is out of reach") from None
    except aiohttp.ClientConnectorError as error:
        raise FeedError(f"{url} cannot be reached ({error.strerror or error}): is a gateway running?") from None
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise FeedError(f"{url}: {str(error) or type(error).__name__}") from None
    raise FeedError(f"{url} has closed the feed: the gateway stopped")


def picture(view: View, height: int | None = None, problem: str = "") -> Group:
    """Draw the view. With a `height`, workers come first and decisions and prefixes share the remaining rows."""
    workers, prefixes = view.latest["snapshot"]["workers"], view.latest["prefixes"].get("prefixes", [])
    num_workers, num_decisions, num_prefixes = len(workers), 10, len(prefixes)
    if height is not None:
        rows = max(3, height - NUM_FIXED_LINES)
        num_workers = min(num_workers, max(2, rows - 4))
        num_prefixes = min(num_prefixes, (rows - num_workers) // 2)
        num_decisions = max(1, rows - num_workers - num_prefixes)
    return Group(
        *_head(view, problem),
        *_workers(workers, num_workers),
        *_decisions(view, num_decisions),
        *_prefixes(prefixes, num_prefixes),
    )


def _head(view: View, problem: str) -> Iterator[Text]:
    about, snapshot = view.latest["hello"], view.latest["snapshot"]
    title = "headstart {}, gateway {}, policy {}".format(*map(about.get, ("version", "gateway", "policy")))
    title += f"{', draining' if snapshot['draining'] else ''}  {clock(snapshot['at'])}"
    yield line(problem or title, "bold red" if problem else "bold")
    traffic = snapshot["traffic"]
    cache = f"{number(traffic['hit_rate'], '.0%')} of {number(traffic['prompt_tokens'])} prompt tokens from cache"
    ttft = f"first token {number(traffic['ttft_p50_s'], '.3f')} s, 95 % {number(traffic['ttft_p95_s'], '.3f')} s"
    yield line(f"{cache}   {ttft}")
    tokens, decisions = (number(traffic[name], ",.1f") for name in ("output_tokens_per_s", "decisions_per_s"))
    yield line(f"{tokens} tokens/s   {number(traffic['in_flight'])} open   {decisions} decisions/s")
    text, style = index_state(snapshot["index"])
    yield line(f"index {text}", style)


def index_state(index: dict[str, Any]) -> tuple[str, str]:
    """Return the state of the shared index in words, the worst problem first, and a style."""
    shards = index["shards"]
    down = [shard for shard in shards if not shard["connected"]]
    if not shards:
        return "not used: no Redis, routing by this gateway's own estimates", "dim"
    if len(down) == len(shards):
        return f"unreachable: no Redis at {down[0]['redis']}, routing by own estimates", "red"
    if any(shard["breaker_open"] for shard in shards):
        return "breaker open: Redis is too slow to answer lookups in time, routing by own estimates", "red"
    if down:
        return f"degraded: {len(down)} of {len(shards)} shards unreachable", "yellow"
    if index["blind"]:
        return f"blind: {index['reason']}", "red"
    return f"healthy: predicted hits have precision {index['kept']:.0%}, recall {index['told']:.0%}", "green"


def _workers(workers: Sequence[dict[str, Any]], num_shown: int) -> Iterator[RenderableType]:
    yield ""
    if not workers:
        yield line("no worker yet: start one with `headstart worker --redis URL`", "yellow")
        return
    serving = sum(worker["state"] == "serving" for worker in workers)
    models = ", ".join(sorted({worker["model"] for worker in workers}))
    yield line(f"{serving} of {len(workers)} workers serving {models}", "dim")
    table = Table("WORKER", "STATE", *(Column(name, justify="right") for name in _NUMBERS), box=None, pad_edge=False)
    shown = list(workers)
    if num_shown < len(workers):  # those with a problem come first
        shown = sorted(workers, key=lambda worker: worker["state"] == "serving")[:num_shown]
    for worker in shown:
        load: dict[str, Any] = worker["load"] or dict.fromkeys(_LOAD)
        left_s = worker["lease_left_s"]
        used = f"{load['blocks'] - load['free_blocks']:,}/{load['blocks']:,}" if worker["load"] else "-"
        cells = [number(load["running"]), number(load["waiting"]), used, number(worker["hit_rate"], ".0%")]
        cells += [number(load["prefill_tokens_per_s"], ",.0f", "/s"), number(load["queued_s"], ".3f", " s")]
        cells.append("over" if left_s is not None and left_s <= 0 else number(left_s, ".1f", " s"))
        state = line(worker["state"], _STATES.get(worker["state"], "dim"))
        table.add_row(line(worker["worker"]), state, *map(line, cells))
    yield table
    if num_shown < len(workers):
        yield line(f"and {len(workers) - num_shown} more", "dim")


def _decisions(view: View, num_shown: int) -> Iterator[RenderableType]:
    sampled = (view.latest["snapshot"]["traffic"]["decisions_per_s"] or 0.0) > 16
    yield line(f"\nDECISIONS, latest first{', a sample' if sampled else ''}", "bold")
    table = Table.grid(padding=(0, 2))
    for decision in list(view.decisions)[::-1][:num_shown]:
        costs = [f"{each['worker']} {each['cost']:.3f}" for each in decision["candidates"] if each["cost"] is not None]
        found, prompt_tokens = decision["found_tokens"], decision["prompt_tokens"]
        cached = decision["matched_tokens"] if found is None else found
        filled = round(min(1.0, cached / max(1, prompt_tokens)) * _BAR)
        bar = line("#" * filled + "." * (_BAR - filled), "cyan")
        cells = (f"{cached:,} of {prompt_tokens:,} cached", f"cost {', next '.join(costs[:2])}")
        table.add_row(line(clock(decision["at"])), line(decision["worker"]), bar, *map(line, cells))
    yield table if view.decisions else line("none yet", "dim")


def _prefixes(prefixes: Sequence[dict[str, Any]], num_shown: int) -> Iterator[RenderableType]:
    yield line("\nHOTTEST PREFIXES, and who holds them", "bold")
    table = Table.grid(padding=(0, 2))
    for prefix in prefixes[:num_shown]:
        indent = "  " * (prefix["level"] - 1) + ("+ " if prefix["level"] > 1 else "")
        rest = prefix["num_workers"] - len(prefix["workers"])
        holders = " ".join(prefix["workers"]) + (f" and {rest} more" if rest else "")
        cells = (f"{indent}{prefix['num_tokens']:,} tokens", f"found {prefix['num_hits']:,}x", holders)
        table.add_row(*map(line, cells))
    yield table if prefixes else line("nothing shared yet", "dim")


def line(text: str, style: str = "") -> Text:
    """Return text that neither wraps nor commands the terminal: names come from a registry that others can write."""
    printable = "".join(char if char.isprintable() or char == "\n" else "?" for char in text)
    return Text(printable, style, no_wrap=True, overflow="ellipsis")


def clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


async def _views(args: argparse.Namespace) -> AsyncIterator[View]:
    """Yield the view once an interval; with --once only once, after the first interval."""
    view = View()
    shown_s = time.monotonic() - (0.0 if args.once else args.interval)
    async with aclosing(events(args.url)) as feed:
        async for name, data in feed:
            view.update(name, data)
            if name == "snapshot" and time.monotonic() - shown_s >= args.interval:
                shown_s = time.monotonic()
                yield view
                if args.once:
                    return


async def watch(args: argparse.Namespace) -> None:
    """Show the feed. Raises FeedError; a live screen retries instead, once it has shown a first picture."""
    terminal = sys.stdout.isatty()
    console = Console(markup=False, highlight=False, emoji=False, width=None if terminal else PLAIN_COLUMNS)
    if args.once or args.json or not terminal:
        async for view in _views(args):
            with console.capture() as captured:
                console.print(picture(view))
            print(json.dumps(view.as_json()) if args.json else captured.get(), flush=True)
        return
    views = _views(args)
    view = await anext(views)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        while True:
            try:
                live.update(picture(view, console.height), refresh=True)
                async for view in views:
                    live.update(picture(view, console.height), refresh=True)
            except FeedError as error:
                live.update(picture(view, console.height, f"Trying again: {error}"), refresh=True)
                await asyncio.sleep(RETRY_S)
            views = _views(args)


def ops_url(text: str) -> str:
    """`8001`, `host:8001` or a URL -> a base URL. Raises ValueError."""
    if text.isdecimal():
        text = f"127.0.0.1:{text}"
    if "://" not in text:
        text = f"http://{text}"
    parts = urlsplit(text)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{text!r} is no URL of an ops port, such as http://127.0.0.1:8001")
    return text.rstrip("/").removesuffix("/dashboard").rstrip("/")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="headstart top",
        description="The dashboard's facts in a terminal: workers, load, decisions, shared prefixes. Ctrl-C ends it. "
        "Where the output is no terminal it prints one picture after another.",
    )
    p.add_argument("url", nargs="?", default="http://127.0.0.1:8001", help="a gateway's ops port")
    p.add_argument("--once", action="store_true", help="watch for one interval, print one picture, and end")
    p.add_argument("--json", action="store_true", help="print one JSON object a picture instead")
    p.add_argument("--interval", type=float, default=1.0, metavar="S", help="seconds between pictures (default 1)")
    return p


def main(argv: Sequence[str]) -> int:
    """Return 0: ended by its user, or shown once. 1: no gateway there. 2: wrong arguments."""
    args = parser().parse_args(argv)
    try:
        if not 0.1 <= args.interval <= 3600:
            raise ValueError(f"--interval must be 0.1 to 3600, got {args.interval:g}")
        args.url = ops_url(args.url)
        asyncio.run(watch(args))
    except FeedError as error:
        print(f"headstart top: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"headstart top: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # `headstart top | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        pass
    return 0
