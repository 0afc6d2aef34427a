"""A view as lines of text, as wide and as many as there is room for.

Names come from a registry that others can write to: what is not printable is not printed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from server.cli.top.view import View

NONE: Final = "-"
Style = Callable[[str, str], str]
"""`style(text, name)`; names are the keys of COLOURS."""
COLOURS: Final = {
    "head": "1",
    "dim": "2",
    "good": "32",
    "warn": "33",
    "bad": "31",
    "cached": "36",
}
_STATES: Final = {"serving": "good", "draining": "warn", "broken": "bad", "lost": "dim"}
_BAR: Final = 12


@dataclass(frozen=True, slots=True)
class Size:
    columns: int
    lines: int | None
    """None: as many as it takes."""


def plain(text: str, name: str) -> str:
    return text


def coloured(text: str, name: str) -> str:
    return f"\033[{COLOURS[name]}m{text}\033[0m"


def lines(view: View, size: Size, style: Style = plain) -> list[str]:
    """The whole screen. Decisions and prefixes share what the workers leave."""
    assert view.snapshot is not None, "nothing is known before the first snapshot"
    shown = [*_head(view, size, style), ""]
    workers = view.snapshot["workers"]
    room = None if size.lines is None else max(4, size.lines - len(shown) - 2)
    shown += _workers(workers, size, style, room)
    rest = None if size.lines is None else size.lines - len(shown) - 4
    if rest is not None and rest < 2:
        return shown[: size.lines]
    prefixes = view.prefixes or []
    num_prefixes = len(prefixes) if rest is None else min(len(prefixes), rest // 2)
    num_decisions = 10 if rest is None else rest - max(1, num_prefixes)
    shown += ["", *_decisions(view, size, style, num_decisions), "", *_prefixes(prefixes[:num_prefixes], size, style)]
    return shown if size.lines is None else shown[: size.lines]


def _head(view: View, size: Size, style: Style) -> Iterator[str]:
    assert view.snapshot is not None
    traffic, index, about = view.snapshot["traffic"], view.snapshot["index"], view.about
    title = f"headstart {about.get('version', '')}, gateway {_clean(about.get('gateway', ''))}"
    state = ", draining" if view.snapshot["draining"] else ""
    at = time.strftime("%H:%M:%S", time.localtime(view.snapshot["at"]))
    yield style(_fit(f"{title}, policy {_clean(about.get('policy', ''))}{state}  {at}", size.columns), "head")
    of = f" of {count(traffic['prompt_tokens'])}" if traffic["prompt_tokens"] else ""
    facts = (
        f"{percent(traffic['hit_rate'])}{of} prompt tokens from cache",
        f"first token {seconds(traffic['ttft_p50_s'])}, 95 % {seconds(traffic['ttft_p95_s'])}",
        f"{rate(traffic['output_tokens_per_s'])} tokens/s",
        f"{count(traffic['in_flight'])} open",
        f"{rate(traffic['decisions_per_s'])} decisions/s",
    )
    yield from _wrapped(facts, size.columns)
    text, tone = index_state(index)
    yield style(_fit(f"index {text}", size.columns), tone)


def _wrapped(facts: Sequence[str], columns: int) -> Iterator[str]:
    """As many as fit side by side, the rest below."""
    line = facts[0]
    for fact in facts[1:]:
        if len(line) + 3 + len(fact) > columns:
            yield _fit(line, columns)
            line = fact
        else:
            line += f"   {fact}"
    yield _fit(line, columns)


def index_state(index: dict[str, Any]) -> tuple[str, str]:
    """What is wrong with it in words, worst first, and a colour."""
    shards = index["shards"]
    cut = [shard for shard in shards if not shard["connected"]]
    if not shards:
        return "not used: no Redis, routing by this gateway's own books", "dim"
    if len(cut) == len(shards):
        return f"unreachable: no Redis at {_clean(cut[0]['redis'])}, routing by own books", "bad"
    if any(shard["breaker_open"] for shard in shards):
        return "breaker open: Redis is too slow to answer lookups in time, routing by own books", "bad"
    if cut:
        return f"degraded: {len(cut)} of {len(shards)} shards unreachable", "warn"
    if index["blind"]:
        return f"blind: {_clean(index['reason'])}", "bad"
    return f"healthy: {percent(index['kept'])} of promises kept, {percent(index['told'])} of hits foreseen", "good"


_COLUMNS: Final = (
    ("WORKER", 14, "<"),
    ("STATE", 8, "<"),
    ("RUN", 4, ">"),
    ("WAIT", 5, ">"),
    ("BLOCKS", 13, ">"),
    ("HITS", 5, ">"),
    ("PREFILL", 10, ">"),
    ("QUEUED", 7, ">"),
    ("LEASE", 6, ">"),
)


def _workers(workers: Sequence[dict[str, Any]], size: Size, style: Style, room: int | None) -> Iterator[str]:
    if not workers:
        yield style("no worker yet: start one with `headstart worker --redis URL`", "warn")
        return
    serving = sum(worker["state"] == "serving" for worker in workers)
    models = sorted({worker["model"] for worker in workers})
    names = _clean(", ".join(models))
    yield style(_fit(f"{serving} of {len(workers)} workers serving {names}", size.columns), "dim")
    yield style(_fit(" ".join(f"{name:{align}{width}}" for name, width, align in _COLUMNS), size.columns), "head")
    fits = len(workers) if room is None else room - 2
    # What needs looking at comes first when not all fit.
    shown = list(workers)
    if len(shown) > fits:
        shown = sorted(shown, key=lambda worker: worker["state"] == "serving")[: fits - 1]
    for worker in shown:
        yield _worker(worker, size, style)
    if len(shown) < len(workers):
        yield style(f"and {len(workers) - len(shown)} more", "dim")


def _worker(worker: dict[str, Any], size: Size, style: Style) -> str:
    load = worker["load"]
    blocks, lease = NONE, NONE
    if load is not None and load["blocks"]:
        blocks = f"{count(load['blocks'] - load['free_blocks'])}/{count(load['blocks'])}"
    if (left_s := worker["lease_left_s"]) is not None:
        lease = f"{left_s:.1f} s" if left_s > 0 else "over"
    cells = [
        _clean(worker["worker"]),
        worker["state"],
        count(load and load["running"]),
        count(load and load["waiting"]),
        blocks,
        percent(worker["hit_rate"]),
        f"{rate(load['prefill_tokens_per_s'])}/s" if load else NONE,
        seconds(load and load["queued_s"]),
        lease,
    ]
    texts = [f"{_fit(cell, width):{align}{width}}" for cell, (_, width, align) in zip(cells, _COLUMNS, strict=True)]
    line = _fit(" ".join(texts), size.columns)
    state = texts[1]
    return line.replace(f" {state}", f" {style(state, _STATES.get(worker['state'], 'dim'))}", 1)


def _decisions(view: View, size: Size, style: Style, most: int) -> Iterator[str]:
    assert view.snapshot is not None
    per_s = view.snapshot["traffic"]["decisions_per_s"] or 0.0
    yield style(f"DECISIONS, latest first{', a sample' if per_s > 16 else ''}", "head")
    for decision in list(view.decisions)[::-1][:most]:
        yield _decision(decision, size, style)
    if not view.decisions:
        yield style("none yet", "dim")


def _decision(decision: dict[str, Any], size: Size, style: Style) -> str:
    at = time.strftime("%H:%M:%S", time.localtime(decision["at"]))
    chosen, *others = decision["candidates"]
    found = decision["found_tokens"]
    cached = decision["matched_tokens"] if found is None else found
    part = min(1.0, cached / max(1, decision["prompt_tokens"]))
    text = f"{count(cached)} of {count(decision['prompt_tokens'])} cached"
    why = f"cost {chosen['cost']:.3f}" if chosen["cost"] is not None else ""
    following = next((other for other in others if other["cost"] is not None), None)
    if following is not None:
        why += f", next {_clean(following['worker'])} {following['cost']:.3f}"
    head = f"{at}  {_fit(_clean(decision['worker']), 16):16}  "
    return head + style(bar(part), "cached") + _fit(f"  {text:24}  {why}", size.columns - len(head) - _BAR)


def _prefixes(prefixes: Sequence[dict[str, Any]], size: Size, style: Style) -> Iterator[str]:
    yield style("HOTTEST PREFIXES, and who holds them", "head")
    for prefix in prefixes:
        indent = "  " * (prefix["level"] - 1) + ("+ " if prefix["level"] > 1 else "")
        rest = prefix["num_workers"] - len(prefix["workers"])
        holders = _clean(" ".join(prefix["workers"])) + (f" and {rest} more" if rest else "")
        name = f"{indent}{count(prefix['num_tokens'])} tokens"
        yield _fit(f"{name:28}  found {count(prefix['num_hits'])}x  {holders}", size.columns)
    if not prefixes:
        yield style("nothing shared yet", "dim")


def bar(part: float, width: int = _BAR) -> str:
    filled = round(part * width)
    return "#" * filled + "." * (width - filled)


def count(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def percent(part: float | None) -> str:
    return NONE if part is None else f"{100 * part:.0f} %"


def rate(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value:.1f}" if 0 < value < 9.95 else f"{value:,.0f}"


def seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{1000 * value:.0f} ms" if 0.0005 <= value < 0.9995 else f"{value:.3g} s"


def _clean(text: str) -> str:
    return "".join(char if char.isprintable() else "?" for char in text)


def _fit(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(0, width - 1)] + "~"
