"""Write the table of docs/architecture.md that shows which engines the product's lines serve."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[1]
PAGE: Final = ROOT / "docs" / "architecture.md"
MAX_OFF: Final = 300
"""Smaller changes leave the page as it is."""
_OWN: Final = "Headstart's own engine: scheduler, model, kernels, blocks and their moves"
_TEXT: Final = "the gateway's own text, which only that engine needs in full"
_OTHERS: Final = "other engines: the adapter, and text by the engine"
_BOTH: Final = "both: HTTP, keys, router, index, wire, options, ops, commands"
OWNERS: Final = {
    _OWN: (
        *("cache/allocators", "cache/stores", "cache/block_record.py", "server/router/copies.py"),
        *("server/router/fetch_plan.py", "worker/attention", "worker/contracts/mailbox.py", "worker/contracts/step.py"),
        *("worker/engine", "worker/files/embedding.py", "worker/http/blocks.py", "worker/kernels"),
        *("worker/kv_transfer", "worker/loading", "worker/model", "worker/runner", "worker/sampling"),
        *("worker/scheduler", "worker/contracts/exchange.py"),
    ),
    _TEXT: (
        *("server/api/chat.py", "server/api/completions.py", "server/api/embeddings.py", "server/api/formatting.py"),
        *("server/api/prompts", "server/request/choice.py", "server/schema/grammar_schema.py"),
        *("server/schema/patterns.py", "server/schema/schema_references.py", "server/text"),
        "worker/common/json_schema.py",
    ),
    _OTHERS: (
        *("server/api/engine", "server/request/engine_answer.py"),
        *("worker/adapter", "worker/common/chat_probes.py"),
    ),
}
"""The folders and modules of each row. All others are of the last one."""
_TABLE: Final = re.compile(r"\| a line serves .*?(?=\n\n)", re.DOTALL)


def owner_of(path: str) -> str:
    """Return the row of a file."""
    named = [row for row, parts in OWNERS.items() if any(f"{path}/".startswith(f"{part}/") for part in parts)]
    assert len(named) < 2, path
    return named[0] if named else _BOTH


def lines() -> Counter[str]:
    """Return the lines of each row."""
    found = Counter(dict.fromkeys([*OWNERS, _BOTH], 0))
    for package in ("cache", "server", "worker"):
        for file in (ROOT / package).rglob("*.py"):
            path = file.relative_to(ROOT).as_posix()
            found[owner_of(path)] += len(file.read_text(encoding="utf-8").splitlines())
    return found


def table(found: Counter[str]) -> str:
    rows = [f"| {row} | {number:,} | {number / found.total():.0%} |" for row, number in found.items()]
    return "\n".join(["| a line serves | lines | part |", "| --- | --- | --- |", *rows])


def is_stale(text: str, found: Counter[str]) -> bool:
    """Return whether the page has other rows, or a number that is too far off."""
    shown = dict(re.findall(r"^\| (.+?) \| ([\d,]+) \| \d+% \|$", text, re.MULTILINE))
    if shown.keys() != found.keys():
        return True
    return any(abs(int(shown[row].replace(",", "")) - number) > MAX_OFF for row, number in found.items())


def files() -> dict[Path, str]:
    """Return the text of the page: its own, unless a number is too far off."""
    missing = [part for parts in OWNERS.values() for part in parts if not (ROOT / part).exists()]
    assert not missing, f"tools/lines.py names what is gone: {', '.join(missing)}"
    text, found = PAGE.read_text(encoding="utf-8"), lines()
    return {PAGE: _TABLE.sub(lambda _: table(found), text) if is_stale(text, found) else text}
