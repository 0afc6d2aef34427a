"""`headstart keys`: make keys and entries of a key file, and check one."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from server.auth.identity import digest_text, load_keys, parse_keys
from server.auth.limits import KeyEntry
from worker.common.command_line import CommandParser

KEY_BYTES: Final = 32  # no client guesses 256 bits
MIN_CHARS: Final = 22
"""This many random base64 characters have 128 bits."""


def new_key() -> str:
    return f"hs-{secrets.token_urlsafe(KEY_BYTES)}"


def entry_text(key: str, args: argparse.Namespace) -> str:
    """Return the key's table for the file. Raises ValueError for an invalid value."""
    values = {**vars(args), "digest": digest_text(key.encode())}
    fields = {name: values[name] for name in KeyEntry.__struct_fields__ if values[name] is not None}
    # JSON's strings, lists and numbers are TOML's too.
    lines = [f"{name} = {json.dumps(value, ensure_ascii=False)}\n" for name, value in fields.items()]
    text = "".join(["[[keys]]\n", *lines])
    parse_keys(text)
    return text


def append(path: Path, entry: str) -> None:
    """Append to a key file, in one write, if it is valid with the entry. Raises ValueError and OSError."""
    try:
        old = path.read_text() if path.exists() else ""
        text = ("\n" if old else "") + entry
        parse_keys(old + text)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    path.touch(mode=0o600)
    with path.open("a") as file:
        file.write(text)


def parser() -> CommandParser:
    p = CommandParser(prog="headstart keys", description="API keys for headstart gateway --api-keys FILE.")
    commands = p.add_subparsers(dest="command", required=True)
    new = commands.add_parser("new", help="make a key, shown once, and its entry for the file")
    digest = commands.add_parser("digest", help="make the entry of a key that exists, read from standard input")
    for command in (new, digest):
        add = command.add_argument
        add("--tenant", required=True, help="whose key it is: one tenant, one cache")
        add("--name", help="name of the key in logs")
        add("--models", nargs="+", metavar="MODEL", help="models that it may use (default: all)")
        add("--requests-per-minute", type=int, metavar="N", help="requests begun (default: no limit)")
        add("--tokens-per-minute", type=int, metavar="N", help="prompt and answer (default: no limit)")
        add("--max-streams", type=int, metavar="N", help="open requests (default: no limit)")
        add("--tokens-per-day", type=int, metavar="N", help="prompt and answer (default: no limit)")
        add("--weight", type=float, metavar="X", help="share of a busy fleet (default: 1)")
        add("--may-prioritise", action="store_true", default=None, help="may set `priority`")
        add("--trusted-front", action="store_true", default=None, help="a gateway's, which names tenants in a header")
        add("--file", type=Path, help="append the entry there instead of printing it")
    check = commands.add_parser("check", help="check whether a key file is valid")
    check.add_argument("file", type=Path)
    return p


def main(argv: Sequence[str]) -> int:
    """Return 0. Raises ValueError and OSError."""
    args = parser().parse_args(argv)
    if args.command == "check":
        print(f"{args.file}: {len(load_keys(args.file).keys)} keys")
        return 0
    key = new_key() if args.command == "new" else sys.stdin.readline().strip("\ufeff\r\n")
    if not key:
        raise ValueError("no key on standard input")
    if len(key) < MIN_CHARS:
        print(
            f"headstart keys: {len(key)} characters can be guessed by trying; use `headstart keys new`", file=sys.stderr
        )
    entry = entry_text(key, args)
    if args.file is not None:
        append(args.file, entry)
    if args.command == "new":
        print(f"# The key, shown this once: {key}" if args.file is None else key)
    if args.file is None:
        print(entry, end="")
    return 0
