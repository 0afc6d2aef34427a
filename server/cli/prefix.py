"""`headstart prefix A.json B.json`: the first difference of two prompts, after which B does not find A's cache.

A gateway makes both prompts, as it does for requests.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from server.cli.common import BAD_USAGE, add_ops_options, ask_ops_port, printable
from worker.common.command_line import CommandParser, reason

TIMEOUT_S: Final = 60.0  # both prompts are rendered and tokenised: megabytes take seconds


def read_body(path: Path) -> bytes:
    """Read the body of a request. Raises ValueError."""
    try:
        raw = path.read_bytes()
        if not isinstance(json.loads(raw), dict):
            raise ValueError("it holds no JSON object")
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {reason(error)}") from None
    return raw


def lines_of(found: dict[str, Any]) -> list[str]:
    """Return the report as text."""
    size, cached, total = found["block_size"], found["num_cached_tokens"], found["num_tokens_b"]
    lines = [
        f"{found['model']}: A has {found['num_tokens_a']:,} tokens and B {total:,}; they share the first "
        f"{found['num_shared_tokens']:,}",
        f"B finds {cached:,} tokens cached: {cached // size:,} of {-(-total // size):,} blocks of {size}",
        f"They differ first in {found['field'] or 'the text of the template'}",
    ]
    if found["reordered"]:
        lines.append("Its keys are in another order; --sort-tool-schemas at the gateway makes such prompts equal")
    elif found["field"] is None:
        lines.append(f"The bodies differ in {', '.join(found['differing']) or 'the order of fields'}")
    for name, sides in zip("AB", found["around"], strict=True):
        before, after = (printable(json.dumps(text, ensure_ascii=False)[1:-1]) for text in sides)
        lines.append(f"  {name}  ...{before}|{after}...")
    return [*lines, f"Cost: {total - cached:,} tokens of B ({-(-(total - cached) // size):,} blocks) are computed"]


def parser() -> CommandParser:
    p = CommandParser(
        prog="headstart prefix",
        description="Show where the prompts of two requests first differ, and in which field. "
        "Exit code 0: one prompt begins with the other; 1: they differ; 2: a file or an option is wrong.",
    )
    p.add_argument("a", type=Path, metavar="A.json", help="body of the earlier request, of any API")
    p.add_argument("b", type=Path, metavar="B.json", help="body of the later request")
    add_ops_options(p)
    return p


def main(argv: Sequence[str]) -> int:
    """Return 0 when one prompt begins with the other, else 1. Raises CommandError and ValueError."""
    args = parser().parse_args(argv)
    pair = b'{"a": %b, "b": %b}' % (read_body(args.a), read_body(args.b))
    asked = ask_ops_port(args, "/prefixes/compare", status=BAD_USAGE, timeout_s=TIMEOUT_S, method="POST", body=pair)
    found = asyncio.run(asked)
    print(json.dumps(found) if args.json else "\n".join(lines_of(found)))
    return 0 if found["goes_on"] else 1
