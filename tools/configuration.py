"""Writes docs/configuration.md from the parsers themselves, so that it cannot say anything else.

python tools/configuration.py          rewrites the page
python tools/configuration.py --check  exits with 1 when the page is not what the parsers say (part of `make check`)
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
PAGE: Final = ROOT / "docs" / "configuration.md"
PARSERS: Final = {
    "serve": "server.cli.serve",
    "gateway": "server.config",
    "worker": "worker.config",
    "top": "server.cli.top",
    "doctor": "server.cli.doctor",
    "keys": "server.cli.keys",
    "index": "server.cli.index",
    "prefix": "server.cli.prefix",
    "batch": "server.cli.batch",
}
"""Command to the module whose `parser()` reads its options. What is not here has a few options and `--help`."""
HEAD: Final = """# Configuration

<!-- Written by tools/configuration.py from the parsers; change the help texts there. -->

Every option of every command, as `--help` prints it.

- An option that ends in `-s` takes seconds. A SIZE is bytes, or a number with K, M, G or T.
- There is no configuration file. Secrets come from files that options name.
- A wrong value ends the command with exit code 2 and a message that names the option.
- `headstart serve` passes options on: `--worker-args`, `--gateway-args`. The Helm chart has a value for each common
  option, and `gateway.extraArgs` and `models[].extraArgs` for the rest.
"""
PLACEHOLDERS: Final[dict[object, str]] = {int: "N", float: "X"}
_DEFAULT: Final = re.compile(r"\s*\((?:default:? )?([^()]*)\)$")


def page() -> str:
    """The page as the parsers have it now."""
    return "\n".join([HEAD, *(line for name in PARSERS for line in section(name))])


def section(name: str) -> Iterator[str]:
    parser: argparse.ArgumentParser = import_module(PARSERS[name]).parser()
    yield f"## headstart {name}\n"
    yield f"{parser.description}\n"
    subcommands = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    yield from tables(parser)
    for action in subcommands:
        summaries = {choice.dest: choice.help for choice in action._choices_actions}
        for word, subparser in action.choices.items():
            yield f"### headstart {name} {word}\n"
            yield f"{subparser.description or summaries.get(word) or ''}\n"
            yield from tables(subparser)


def tables(parser: argparse.ArgumentParser) -> Iterator[str]:
    for group in parser._action_groups:
        actions = [a for a in group._group_actions if shown(a)]
        if not actions:
            continue
        if group.title not in ("options", "positional arguments"):
            yield f"**{group.title}**\n"
        yield "| option | default | what |"
        yield "| --- | --- | --- |"
        yield from map(row, actions)
        yield ""


def shown(action: argparse.Action) -> bool:
    hidden = isinstance(action, argparse._HelpAction | argparse._SubParsersAction)
    return not hidden and action.help != argparse.SUPPRESS


def row(action: argparse.Action) -> str:
    name = ", ".join(action.option_strings) or str(action.metavar or action.dest)
    if action.option_strings and action.nargs != 0:
        name = f"{action.option_strings[-1]} {value(action)}"
    text = (action.help or "") % {"default": action.default, "prog": ""}
    match = _DEFAULT.search(text)
    said = match[1] if match else ""
    default = said if match else plain(action.default)
    what = text[: match.start()] if match and is_default(match[0], action) else text
    if match and what == text:
        default = plain(action.default)
    if isinstance(action, argparse._StoreFalseAction):
        default = ""  # the flag itself is not set
    return f"| `{name}` | {default} | {escaped(what)} |"


def is_default(text: str, action: argparse.Action) -> bool:
    """Return whether a help text's closing parenthesis names the default, by its word or by the value itself."""
    inner = text.strip().strip("()")
    if inner.startswith("default") or inner == str(action.default):
        return True
    return isinstance(action.default, float) and inner == f"{action.default:g}"


def value(action: argparse.Action) -> str:
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or PLACEHOLDERS.get(action.type) or action.dest.upper())


def plain(default: object) -> str:
    if default is None or default is False or default == [] or default == "" or default is argparse.SUPPRESS:
        return ""
    return f"{default:g}" if isinstance(default, float) else str(default)


def escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def main(argv: list[str]) -> int:
    sys.path.insert(0, str(ROOT))
    wanted = page()
    if argv == ["--check"]:
        if PAGE.exists() and PAGE.read_text(encoding="utf-8") == wanted:
            return 0
        print(f"{PAGE.relative_to(ROOT)} is not what the parsers say: run python tools/configuration.py")
        return 1
    PAGE.write_text(wanted, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
