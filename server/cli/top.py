"""`headstart top`: the dashboard's facts in a terminal, from the live feed of a gateway's ops port."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import termios
import time
import tty
from collections import deque
from collections.abc import AsyncGenerator, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager, nullcontext, suppress
from typing import Any, Final

import aiohttp
from aiohttp.http_exceptions import LineTooLong
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Column, Table
from rich.text import Text

from server.cli.common import CommandError, between, ops_url, plain_console, printable
from worker.common.command_line import CommandParser, reason

RETRY_S: Final = 1.0  # a gateway that is back is shown at once
SILENT_S: Final = 5.0
"""A healthy gateway sends a snapshot twice a second."""
MAX_EVENT_BYTES: Final = 8 << 20  # an event lists all workers: aiohttp's 64 KiB are too few for a large fleet
PLAIN_COLUMNS: Final = 160  # a pipe has no width of its own
MAX_DECISIONS: Final = 50  # more rows than a screen has
LATE_S: Final = 2.0  # a lease lasts 6 s and is renewed each second or sooner
NUM_FIXED_LINES: Final = 15  # other than rows: the head, table headings and blank lines
_BAR: Final = 12  # characters
_STATES: Final = {
    "serving": "green",
    "draining": "yellow",
    **dict.fromkeys(("broken", "refused", "dead", "unreachable"), "red"),
}
_NUMBERS: Final = ("RUN", "WAIT", "BLOCKS", "HITS", "PREFILL", "QUEUED")


class View:
    """State of the feed: the latest event of each name, and the latest decisions."""

    def __init__(self) -> None:
        self.latest: dict[str, Any] = {"hello": {}, "prefixes": {"prefixes": []}, "changes": {"changes": []}}
        self.decisions: deque[dict[str, Any]] = deque(maxlen=MAX_DECISIONS)
        """The latest last."""

    def update(self, name: str, data: Any) -> None:
        """Apply one event."""
        self.latest[name] = data
        if name == "hello":  # it has all that are shown, also to a view that connects again
            self.decisions.clear()
        new = {each["request"]: each for each in data.get("decisions", ())}  # a retry replaces its record
        self.decisions = deque([*(d for d in self.decisions if d["request"] not in new), *new.values()], MAX_DECISIONS)
        found = data.get("found", {})
        for decision in self.decisions:
            decision["found_tokens"] = found.get(decision["request"], decision["found_tokens"])

    def as_json(self) -> dict[str, Any]:
        about = {name: self.latest["hello"].get(name) for name in ("version", "gateway", "policy")}
        shown = {**self.latest["snapshot"], **self.latest["changes"], **self.latest["prefixes"]}
        return {**about, **shown, "decisions": list(self.decisions)}


async def events(url: str) -> AsyncGenerator[tuple[str, Any], None]:
    """Yield the name and data of each event. Always ends with CommandError."""
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=SILENT_S, sock_read=SILENT_S)
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout, read_bufsize=MAX_EVENT_BYTES) as session,
            session.get(f"{url}/events", headers={"accept": "text/event-stream"}, allow_redirects=False) as response,
        ):
            if response.status != 200 or response.content_type != "text/event-stream":
                raise CommandError(f"{url} answered {response.status}, no feed: is it a gateway's ops port (8001)?")
            name = ""
            async for line in response.content:
                if line.startswith(b"event: "):
                    name = line[7:].strip().decode()
                elif line.startswith(b"data: "):
                    data = json.loads(line[6:])
                    if not isinstance(data, dict):
                        raise ValueError("an event that is no object")
                    yield name, data
    except LineTooLong:
        problem = f"an event is longer than {MAX_EVENT_BYTES >> 20} MiB, so it is no gateway's"
        raise CommandError(f"{url}: {problem}") from None
    except (aiohttp.ClientError, OSError, ValueError, RecursionError) as error:
        raise CommandError(f"{url}: {reason(error)}; is a gateway running?") from None
    raise CommandError(f"{url} has closed the feed: the gateway stopped")


def picture(view: View, height: int | None = None, problem: str = "") -> Group:
    """Draw the view. With a `height`, workers come first and changes, decisions and prefixes share the other rows."""
    snapshot, prefixes = view.latest["snapshot"], view.latest["prefixes"]["prefixes"]
    workers, sampled = snapshot["workers"], (snapshot["traffic"]["decisions_per_s"] or 0.0) > 16
    changes = view.latest["changes"]["changes"][::-1]
    num_workers, num_decisions, num_prefixes, num_changes = len(workers), 10, len(prefixes), 10
    if height is not None:
        num_changes = max(1, height // 10)
        rows = max(3, height - NUM_FIXED_LINES - min(num_changes, max(1, len(changes))))
        num_workers = min(num_workers, max(2, rows - 4))
        num_prefixes = min(num_prefixes, (rows - num_workers) // 2)
        num_decisions = max(1, rows - num_workers - num_prefixes)
    return Group(
        *_head(view, problem),
        *_workers(workers, num_workers, snapshot),
        line("\nCHANGES, latest first", "bold"),
        _grid(map(_change, changes[:num_changes])),
        line(f"\nDECISIONS, latest first{', a sample' if sampled else ''}", "bold"),
        _grid(map(_decision, list(view.decisions)[::-1][:num_decisions])),
        line("\nHOTTEST PREFIXES, and who holds them", "bold"),
        _grid(map(_prefix, prefixes[:num_prefixes])),
    )


def _head(view: View, problem: str) -> list[Text]:
    about, snapshot = view.latest["hello"], view.latest["snapshot"]
    title = "headstart {}, gateway {}, policy {}".format(*map(about.get, ("version", "gateway", "policy")))
    title += f"{', draining' if snapshot['draining'] else ''}  {clock(snapshot['at'])}"
    traffic = snapshot["traffic"]
    cache = f"{number(traffic['hit_rate'], '.0%')} of {number(traffic['prompt_tokens'])} prompt tokens from cache"
    ttft = f"first token {number(traffic['ttft_p50_s'], '.3f')} s, 95 % {number(traffic['ttft_p95_s'], '.3f')} s"
    tokens, decisions = (number(traffic[name], ",.1f") for name in ("output_tokens_per_s", "decisions_per_s"))
    index, style = index_state(snapshot["index"])
    return [
        line(problem or title, "bold red" if problem else "bold"),
        line(f"last minute: {cache}   {ttft}"),
        line(f"{tokens} tokens/s   {number(traffic['in_flight'])} open   {decisions} decisions/s"),
        line(f"index {index}", style),
        line(""),
    ]


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
    if index["precision"] is None and index["recall"] is None:
        return "not judged yet: no request had a cached token, predicted or found", "dim"
    ratios = (f"{name} {number(index[name], '.0%')}" for name in ("precision", "recall"))
    return f"healthy: hits predicted for the last {index['num_requests']} requests have {', '.join(ratios)}", "green"


def _workers(workers: Sequence[dict[str, Any]], num_shown: int, snapshot: dict[str, Any]) -> list[RenderableType]:
    if not workers:
        return [line("no worker yet: start one with `headstart worker --redis URL`", "yellow")]
    serving = sum(worker["state"] == "serving" for worker in workers)
    models = ", ".join(sorted({worker["model"] for worker in workers} - {""}))
    table = Table("WORKER", "STATE", *(Column(name, justify="right") for name in _NUMBERS), box=None, pad_edge=False)
    if num_more := len(workers) - num_shown:  # those with a problem come first
        workers = sorted(workers, key=lambda worker: worker["state"] == "serving")
    for worker in workers[:num_shown]:
        load = worker["load"] or {}
        held = f"{num_held(worker):,}/{load['blocks']:,}" if load.get("blocks") else "-"
        cells = [number(load.get("running")), number(load.get("waiting")), held, number(worker["hit_rate"], ".0%")]
        cells.append(number(load.get("prefill_tokens_per_s") or None, ",.4g", "/s"))
        cells.append(number(load.get("queued_s"), ".3f", " s"))
        left_s = worker["lease_left_s"]
        late = f", lease {max(0.0, left_s):.1f} s" if left_s is not None and left_s < LATE_S else ""
        state = line(worker["state"] + late, _STATES.get(worker["state"], "dim"))
        table.add_row(line(worker["worker"]), state, *map(line, cells))
    wanted = ", ".join(f"{model} {number:,}" for model, number in snapshot["workers_needed"].items())
    needs = f"   needed for waits of at most {snapshot['objective_s']:g} s: {wanted}" if wanted else ""
    head = line(f"{serving} of {len(workers)} workers serving {models}{needs}", "dim")
    return [head, table, *([line(f"and {num_more} more", "dim")] if num_more else [])]


def num_held(worker: dict[str, Any]) -> int:
    """Return the blocks that requests use or that are cached, as the dashboard counts them."""
    load = worker["load"]
    used, free, published = load["blocks"] - load["free_blocks"], load["free_blocks"], worker["published_blocks"] or 0
    held: int = used + max(0, min(free, published - used))  # they are reported at different times
    return held


def _change(change: dict[str, Any]) -> list[Text]:
    who = change["worker"] or ("1 request" if change["count"] == 1 else f"{change['count']:,} requests")
    return [line(clock(change["last"])), line(f"{who} {change['what']}"), line(change["why"])]


def _decision(decision: dict[str, Any]) -> list[Text]:
    costs = [f"{each['worker']} {each['cost']:.3f}" for each in decision["candidates"] if each["cost"] is not None]
    found, prompt_tokens = decision["found_tokens"], decision["prompt_tokens"]
    cached = decision["matched_tokens"] if found is None else found
    filled = round(min(1.0, cached / max(1, prompt_tokens)) * _BAR)
    return [
        line(clock(decision["at"])),
        line(decision["worker"]),
        line("#" * filled + "." * (_BAR - filled), "cyan"),
        line(f"{cached:,} of {prompt_tokens:,} cached"),
        line(f"cost {', next '.join(costs[:2])}"),
    ]


def _prefix(prefix: dict[str, Any]) -> list[Text]:
    indent = "  " * (prefix["level"] - 1) + ("+ " if prefix["level"] > 1 else "")
    rest = prefix["num_workers"] - len(prefix["workers"])
    holders = " ".join(prefix["workers"]) + (f" and {rest} more" if rest else "")
    return [line(f"{indent}{prefix['num_tokens']:,} tokens"), line(f"found {prefix['num_hits']:,}x"), line(holders)]


def _grid(rows: Iterable[list[Text]]) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for row in rows:
        table.add_row(*row)
    return table if table.rows else line("none yet", "dim")


def line(text: str, style: str = "") -> Text:
    """Return text without wrapping and control characters: names come from a registry that others can write."""
    return Text(printable(text, kept="\n"), style, no_wrap=True, overflow="ellipsis")


def clock(at: float) -> str:
    """Return a local time, with its day unless that is today."""
    then = time.localtime(at)
    return time.strftime("%H:%M:%S" if then[:3] == time.localtime()[:3] else "%d %b %H:%M:%S", then)


def number(value: float | None, form: str = ",.0f", unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


@contextmanager
def ended_by_q() -> Iterator[None]:
    """Cancel the running task when `q` is typed."""
    task = asyncio.current_task()
    if task is None or not sys.stdin.isatty():
        yield
        return
    loop, stdin = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(stdin)
    tty.setcbreak(stdin)
    loop.add_reader(stdin, lambda: b"q" in os.read(stdin, 64) and task.cancel())
    try:
        yield
    finally:
        loop.remove_reader(stdin)
        termios.tcsetattr(stdin, termios.TCSADRAIN, before)


async def watch(args: argparse.Namespace) -> None:
    """Show the feed. Raises CommandError; a live screen retries instead, once it has shown a first picture."""
    plain = args.once or args.json or not sys.stdout.isatty()
    console = plain_console(PLAIN_COLUMNS)
    live = Live(console=console, screen=True, auto_refresh=False)
    view, due_s = View(), time.monotonic() + (args.interval if args.once else 0.0)
    with nullcontext() if plain else ended_by_q(), nullcontext() if plain else live:
        while True:
            try:
                async with aclosing(events(args.ops)) as feed:
                    async for name, data in feed:
                        view.update(name, data)
                        if name != "snapshot" or time.monotonic() < due_s:
                            continue
                        due_s = time.monotonic() + args.interval
                        if args.json:
                            print(json.dumps(view.as_json()), flush=True)
                        elif plain:
                            console.print(picture(view))
                        else:
                            live.update(picture(view, console.height), refresh=True)
                        if args.once:
                            return
            except CommandError as error:
                if plain or "snapshot" not in view.latest:
                    raise
                live.update(picture(view, console.height, f"Trying again: {error}"), refresh=True)
                await asyncio.sleep(RETRY_S)


def parser() -> CommandParser:
    p = CommandParser(
        prog="headstart top",
        command="top",
        description="The dashboard's facts in a terminal: workers, load, decisions, shared prefixes. "
        "q or Ctrl-C ends it. Where the output is no terminal it prints one picture after another.",
    )
    p.add_argument("--ops", type=ops_url, default="http://127.0.0.1:8001", metavar="URL", help="a gateway's ops port")
    p.add_argument("--once", action="store_true", help="watch for one interval, print one picture, and end")
    p.add_argument("--json", action="store_true", help="print one JSON object a picture instead")
    interval = between(0.1, 3600, float)
    p.add_argument("--interval", type=interval, default=1.0, metavar="S", help="seconds between pictures (default 1)")
    return p


def main(argv: Sequence[str]) -> int:
    """Return 0 at q or Ctrl-C, or after the one picture of --once. Raises CommandError."""
    args = parser().parse_args(argv)
    with suppress(KeyboardInterrupt, asyncio.CancelledError):
        asyncio.run(watch(args))
    return 0
