"""Write the figures of README and docs/routing.md from the benches' own results in benchmarks/results.

headstart bench ... --json | tail -1 > NAME.json      in that folder: the last line of the command
python -m tools.picture                               agents.json, with README's picture

A block begins with `<!-- figures: NAME -->` and has the command of its figures. A goal that the run missed is named.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
_BLOCK: Final = re.compile(r"(?<=<!-- figures: )(\w+)( -->\n).*?(?=<!-- end of figures -->)", re.DOTALL)
_OPTIONS_OF_OUTPUT: Final = re.compile(r" --json| --plot \S+")


def result(name: str) -> dict[str, Any]:
    """Return the last line of a bench, as it printed it."""
    loaded: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return loaded


def command(run: Mapping[str, Any]) -> str:
    return _OPTIONS_OF_OUTPUT.sub("", run["command"])


def missed(run: Mapping[str, Any]) -> str:
    """Return the sentence about the goals that the run missed."""
    if not run["missed"]:
        return "It met all its goals."
    listed = [f"`{name}` {run['figures'][name]:.3g} (goal {goal})" for name, goal in sorted(run["missed"].items())]
    return textwrap.fill(f"Goals that this run **missed**: {', '.join(listed)}.", 120, break_on_hyphens=False)


def promise() -> str:
    """Return README's lines of numbers."""
    chats, agents = result("chats"), result("agents")["figures"]
    wait = {name: chats["figures"][f"{name}.conv25_n8.ttft_mean_s"] for name in chats_policies(chats)}
    hits = {name: chats["figures"][f"{name}.conv25_n8.hit"] for name in wait}
    return "\n".join(
        [
            "| recorded traffic, simulated time | Headstart | round robin | least load |",
            "| --- | --- | --- | --- |",
            f"| chats on 8 workers: first token after, mean | **{wait['headstart']:.1f} s** "
            f"| {wait['round_robin']:.1f} s | {wait['least_load']:.1f} s |",
            f"| the same: prompt tokens from the cache | **{hits['headstart']:.0%}** "
            f"| {hits['round_robin']:.0%} | {hits['least_load']:.0%} |",
            f"| coding agents on 4 workers (the picture) | **{agents['headstart.ttft_mean_s']:.1f} s, "
            f"{agents['headstart.hit']:.0%}** | {agents['round_robin.ttft_mean_s']:.1f} s, "
            f"{agents['round_robin.hit']:.0%} | |",
            "",
            "```",
            command(chats),
            "```",
            "",
            missed(chats),
            "",
        ]
    )


def chats_policies(run: Mapping[str, Any]) -> list[str]:
    return sorted({name.partition(".")[0] for name in run["figures"] if name.endswith(".conv25_n8.ttft_mean_s")})


def picture() -> str:
    """Return README's picture, with what it shows as its text."""
    agents = result("agents")["figures"]
    texts = [
        f"by {title} {agents[f'{name}.hit']:.0%} of the prompt tokens come from the cache, and the first token after "
        f"{agents[f'{name}.ttft_mean_s']:.1f} s"
        for name, title in (("round_robin", "round robin"), ("headstart", "Headstart"))
    ]
    return f"![90 s of recorded coding agents on four workers: {'; '.join(texts)}](docs/images/conversations.svg)\n"


def policies() -> str:
    """Return the table of docs/routing.md: each policy and the bound, in README's run."""
    run = result("chats")
    figures = run["figures"]
    names = [name for name in chats_policies(run) if name != "pooled1"]
    lines = ["| policy | from the cache | mean | p99 |", "| --- | --- | --- | --- |"]
    for name in sorted(names, key=lambda name: float(figures[f"{name}.conv25_n8.ttft_mean_s"])):
        cell = f"{name}.conv25_n8"
        mean_s, p99_s = figures[f"{cell}.ttft_mean_s"], figures[f"{cell}.ttft_p99_s"]
        lines.append(f"| `{name}` | {figures[f'{cell}.hit']:.1%} | {mean_s:.2f} s | {p99_s:.1f} s |")
    return "\n".join([*lines, "", "```", command(run), "```", "", missed(run), ""])


BLOCKS: Final[Mapping[str, Callable[[], str]]] = {"promise": promise, "picture": picture, "policies": policies}
PAGES: Final = ("README.md", "docs/routing.md")


def written(text: str) -> str:
    """Return a page with its blocks as the results have them."""
    return _BLOCK.sub(lambda found: f"{found[1]}{found[2]}{BLOCKS[found[1]]()}", text)


def files() -> dict[Path, str]:
    """Return the text of each page."""
    return {ROOT / name: written((ROOT / name).read_text(encoding="utf-8")) for name in PAGES}
