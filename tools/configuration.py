"""Write docs/configuration.md, the pages below it and the list of known names from the parsers."""

from __future__ import annotations

import argparse
import json
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parent.parent
DOCS: Final = ROOT / "docs"
NAMES: Final = ROOT / "worker" / "common" / "known_names.json"
"""The options that variables and the file may set, by command: `worker.common.command_line` reads it."""
PARSERS: Final = {
    "serve": "server.cli.serve",
    "gateway": "server.config",
    "worker": "worker.config",
    "top": "server.cli.top",
    "doctor": "server.cli.doctor",
    "keys": "server.cli.keys",
    "index": "server.cli.index",
    "prefix": "server.cli.prefix",
    "usage": "server.cli.usage",
}
"""Command to the module whose `parser()` reads its options. Other commands have few options, and `--help`."""
PAGES: Final = {
    "serve": ("serve",),
    "gateway": ("gateway",),
    "worker": ("worker",),
    "tools": ("top", "doctor", "keys", "index", "prefix", "usage"),
}
"""Page below docs/configuration to the commands on it."""
TOOLS: Final = ", ".join(f"`headstart {name}`" for name in (*PAGES["tools"], "bench"))
NOTE: Final = "<!-- Written by tools/configuration.py from the parsers; change the help texts there. -->"
INDEX: Final = f"""# Configuration

{NOTE}

Every option of every command, as `--help` prints it:

| page | commands |
| --- | --- |
| [serve](configuration/serve.md) | `headstart serve`: everything on one machine, also in front of other engines |
| [gateway](configuration/gateway.md) | `headstart gateway` |
| [worker](configuration/worker.md) | `headstart worker`: a worker, or the adapter of another engine |
| [tools](configuration/tools.md) | {TOOLS} |

- An option that ends in `-s` takes seconds. A SIZE is bytes, or a number with K, M, G or T.
- A wrong value ends the command with exit code 2 and a message that names the option.
- `headstart serve` passes options on: `--worker-args`, `--gateway-args`.
- The Helm chart takes options by these names, in `gateway.options` and `models[].options`, and checks them.

## Variables and a file

An option that the command line lacks comes from the environment, else from a file, else it has its default.

- **Variables**: `HEADSTART_PORT=8080` is `--port 8080` of `serve`, `gateway` and `worker`. Variables of a tool have its
  name too: `HEADSTART_TOP_INTERVAL=5`. A flag takes `true` or `false`. Options that can be given several times take
  words: `HEADSTART_WORKERS="http://10.0.0.1:8100 http://10.0.0.2:8100"`. A value of JSON is one word, whatever its
  spaces.
- **A file**: `--config FILE` or `HEADSTART_CONFIG=FILE` names a TOML file with a table for each command:

```toml
[serve]
num-workers = 1

[gateway]
alias = ["small=SmolLM2-135M-Instruct"]

[worker]
num-blocks = 2048
```

- The processes that `headstart serve` starts read `[gateway]` and `[worker]` of the same file, and the variables that
  are not options of `serve` itself.
- `keys`, `prefix`, `usage` and `bench` take options from the command line only.
- A variable that begins with `HEADSTART_`, a table or a key that no command reads is an error of every command. The
  message names the nearest one that there is.
- Secrets come from files that options name. `HEADSTART_CLUSTER_SECRET` is the one secret that is also a variable.
- In Kubernetes, a Service named `headstart` sets `HEADSTART_PORT=tcp://...`, `HEADSTART_SERVICE_HOST` and others in the
  pods of its namespace. Commands ignore them.
"""
PLACEHOLDERS: Final[dict[object, str]] = {int: "N", float: "X"}
_DEFAULT: Final = re.compile(r"\s*\((?:default:? )?([^()]*)\)$")


def files() -> dict[Path, str]:
    """Return the text of each file, as the parsers have it now."""
    written = {DOCS / "configuration.md": INDEX, NAMES: names()}
    for name, commands in PAGES.items():
        title = f"# Options of {name}" if len(commands) == 1 else "# Options of the tools"
        lines = [title, "", NOTE, "", *(line for command in commands for line in section(command))]
        if name == "tools":
            lines += benches()
        written[DOCS / "configuration" / f"{name}.md"] = "\n".join(lines)
    return written


def benches() -> Iterator[str]:
    """Yield the list of measurements. Their options are in `--help`, as most need a checkout."""
    from benchmarks.__main__ import BENCHES, DEV_BENCHES

    yield "## headstart bench\n"
    yield "`headstart bench NAME --help` lists the options of each. [The results](../../benchmarks/RESULTS.md).\n"
    yield "| name | measures | needs a checkout |"
    yield "| --- | --- | --- |"
    for name, summary in sorted((BENCHES | DEV_BENCHES).items()):
        yield f"| `{name}` | {escaped(summary)} | {'yes' if name in DEV_BENCHES else 'no'} |"
    yield ""


def names() -> str:
    parsers = [import_module(module).parser() for module in PARSERS.values()]
    known = {parser.command: sorted(parser.option_names()) for parser in parsers if parser.command is not None}
    return json.dumps(known, indent=1) + "\n"


def section(name: str) -> Iterator[str]:
    parser: argparse.ArgumentParser = import_module(PARSERS[name]).parser()
    yield f"## headstart {name}\n"
    yield f"{textwrap.fill(str(parser.description), 120)}\n"
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
