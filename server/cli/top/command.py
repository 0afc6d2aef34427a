"""The command line of `headstart top`, and what it does to a terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Final

from server.cli.top.events import FeedError, events, ops_url
from server.cli.top.screen import Size, Style, coloured, lines, plain
from server.cli.top.view import View

RETRY_S: Final = 1.0
PREFIXES_WAIT_S: Final = 2.0
PLAIN_COLUMNS: Final = 160
_ENTER: Final = "\033[?1049h\033[?25l"
_LEAVE: Final = "\033[?25h\033[?1049l"


@dataclass(frozen=True, slots=True)
class TopConfig:
    url: str
    once: bool
    as_json: bool
    interval_s: float


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


def parse(argv: Sequence[str]) -> TopConfig:
    """Raises ValueError."""
    args = parser().parse_args(argv)
    if not 0.1 <= args.interval <= 3600:
        raise ValueError(f"--interval must be 0.1 to 3600, got {args.interval:g}")
    return TopConfig(ops_url(args.url), args.once, args.json, args.interval)


def main(argv: Sequence[str]) -> int:
    """0: ended by its user, or shown once. 1: no gateway there. 2: asked wrongly."""
    try:
        config = parse(argv)
        asyncio.run(_watch(config))
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


async def _watch(config: TopConfig) -> None:
    """Raises FeedError; on a terminal only until the first picture, from then on it tries again."""
    if config.once or config.as_json or not sys.stdout.isatty():
        async for view in _pictures(config):
            _print(view, config)
        return
    waiting = _pictures(config)
    view = await anext(waiting)
    with _full_screen():
        while True:
            try:
                _draw(view)
                async for view in waiting:
                    _draw(view)
            except FeedError as error:
                _draw(view, f"Trying again: {error}")
                await asyncio.sleep(RETRY_S)
            waiting = _pictures(config)


async def _pictures(config: TopConfig) -> AsyncIterator[View]:
    """The same view each time it is worth showing: one only with --once, when it has been watched for an interval."""
    view = View()
    shown_s = time.monotonic() - (0.0 if config.once else config.interval_s)
    async with aclosing(events(config.url)) as heard:
        async for name, data in heard:
            view.hear(name, data)
            now_s = time.monotonic()
            if name != "snapshot" or now_s - shown_s < config.interval_s:
                continue
            if config.once and view.prefixes is None and now_s - shown_s < config.interval_s + PREFIXES_WAIT_S:
                continue
            shown_s = now_s
            yield view
            if config.once:
                return


def _print(view: View, config: TopConfig) -> None:
    if config.as_json:
        print(json.dumps(view.as_json()), flush=True)
        return
    terminal = sys.stdout.isatty()
    columns = shutil.get_terminal_size().columns if terminal else PLAIN_COLUMNS
    end = "" if config.once else "\n"
    print("\n".join(lines(view, Size(columns, None), _style(terminal))), end=f"\n{end}", flush=True)


def _draw(view: View, problem: str = "") -> None:
    """Over what stands there, so that nothing flickers."""
    columns, rows = shutil.get_terminal_size()
    shown = lines(view, Size(columns, rows), _style(True))
    if problem:
        shown[0] = problem[:columns]
    text = "\n".join(f"{line}\033[K" for line in shown)
    sys.stdout.write(f"\033[H{text}\033[J")
    sys.stdout.flush()


def _style(terminal: bool) -> Style:
    return coloured if terminal and "NO_COLOR" not in os.environ else plain


@contextlib.contextmanager
def _full_screen() -> Iterator[None]:
    sys.stdout.write(_ENTER)
    try:
        yield
    finally:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
