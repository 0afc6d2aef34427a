"""`headstart usage`: the sums of usage logs, by tenant, key, model, day and more."""

from __future__ import annotations

import argparse
import gzip
import json
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.table import Column, Table

from server.cli.common import plain_console, printable
from server.usage.account import Account
from worker.common.command_line import CommandParser

GROUPS: Final = ("tenant", "key", "model", "day", "route", "status", "worker")
SUMS: Final = tuple(Account(tenant="", key="", route="").sums())
PLAIN_COLUMNS: Final = 200  # a pipe wraps no row
_decode: Final = msgspec.json.Decoder(Account).decode


def _lines(path: Path) -> Iterator[bytes]:
    """Yield the lines of a log, which may be compressed with gzip. Raises OSError; for a broken one, ValueError."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            yield from file
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{path}: {error}") from None


def summed(paths: Sequence[Path], by: Sequence[str]) -> tuple[list[dict[str, Any]], int]:
    """Return the groups of accounts in order, each with its sums, and the number of lines that are no account."""
    sums, num_invalid = defaultdict[tuple[str | int, ...], Counter[str]](Counter), 0
    for line in chain.from_iterable(map(_lines, paths)):
        try:
            account = _decode(line)
            day = f"{datetime.fromtimestamp(account.ended_at, UTC):%Y-%m-%d}"
        except (ValueError, OverflowError):  # also of a time that no calendar has
            num_invalid += bool(line.strip())
        else:
            group = tuple([day if name == "day" else getattr(account, name) for name in by])
            sums[group].update(account.sums())
    rows = [
        dict(zip(by, group, strict=True)) | {name: round(row[name], 3) for name in SUMS}
        for group, row in sorted(sums.items(), key=lambda item: item[0])
    ]
    return rows, num_invalid


def _groups(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in GROUPS]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(GROUPS)}")
    return names


def parser() -> CommandParser:
    p = CommandParser(
        prog="headstart usage", description="Sum the lines of usage logs (headstart gateway --usage-log FILE)."
    )
    p.add_argument("files", nargs="+", type=Path, metavar="FILE", help="logs, full ones too; .gz is read as it is")
    p.add_argument(
        "--by",
        type=_groups,
        default=("tenant",),
        metavar="NAME,...",
        help=f"what to sum by, of {', '.join(GROUPS)} (default tenant)",
    )
    p.add_argument("--json", action="store_true", help="print one JSON object instead")
    return p


def main(argv: Sequence[str]) -> int:
    """Return 0. Raises OSError, ValueError."""
    args = parser().parse_args(argv)
    rows, num_invalid = summed(args.files, args.by)
    if num_invalid:
        print(f"headstart usage: {num_invalid} lines are no accounts and were left out", file=sys.stderr)
    if args.json:
        print(json.dumps({"usage": rows, "invalid_lines": num_invalid}))
        return 0
    columns = [Column(name, justify="left" if name in GROUPS else "right") for name in (*args.by, *SUMS)]
    table = Table(*columns, box=None, pad_edge=False, header_style="bold")
    for row in rows:
        table.add_row(*(printable(str(row[name])) for name in args.by), *(f"{row[name]:,}" for name in SUMS))
    plain_console(PLAIN_COLUMNS).print(table)
    return 0
