"""The commands of `headstart`: one word chooses the part, the rest is that part's own command line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Final

from server.cli import names
from server.cli.common import BAD_USAGE, CommandError
from worker.common.command_line import module_command, suggestion

COMMANDS: Final[dict[str, tuple[str, str]]] = {
    "serve": ("everything on this machine: Redis, workers and gateways", "server.cli.serve"),
    "gateway": ("one gateway: the OpenAI API in front of the workers", "server.gateway"),
    "worker": ("one worker: a model on one device", "worker"),
    "top": ("the fleet in a terminal: workers, load, decisions", "server.cli.top"),
    "doctor": ("what this machine lacks, and how to fix it", "server.cli.doctor"),
    "keys": ("API keys: make one, check a file of them", "server.cli.keys"),
    "index": ("what the shared index holds; shared prefixes; emptying a worker", "server.cli.index"),
    "prefix": ("where the prompts of two requests part, and why", "server.cli.prefix"),
    "usage": ("sums of usage logs by tenant, key, model and day", "server.cli.usage"),
    "bench": ("the measurements; each prints a table", "benchmarks"),
}
"""Summary and module of each command."""


def help_text() -> str:
    lines = [f"  {name:8} {summary}" for name, (summary, _) in COMMANDS.items()]
    return "\n".join(
        ["usage: headstart COMMAND [OPTIONS]", "", *lines, "", "headstart COMMAND --help lists its options."]
    )


def run(argv: Sequence[str] | None) -> int:
    """Run a command and return its exit code. Modules outside of `server` replace this process: they load torch."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0 if arguments else BAD_USAGE
    name, *rest = arguments
    if name in ("-V", "--version", "version"):
        print(f"headstart {version('headstart')}")
        return 0
    if name not in COMMANDS:
        print(f"headstart: there is no command {name!r}{suggestion(name, COMMANDS)}\n\n{help_text()}", file=sys.stderr)
        return BAD_USAGE
    if (problem := names.problem()) is not None:
        print(f"headstart: {problem}", file=sys.stderr)
        return BAD_USAGE
    if os.getpid() == 1:  # in a container: the kernel drops signals without a handler, and parts install theirs late
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    module = COMMANDS[name][1]
    if not module.startswith("server."):
        sys.stdout.flush()
        os.execv(sys.executable, [*module_command(module), *rest])
    return _run(name, module, rest)


def _run(name: str, module: str, arguments: Sequence[str]) -> int:
    """Run a command here. Its errors become a line and an exit code."""
    try:
        status: int = import_module(module).main(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `headstart top | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CommandError, ValueError, OSError) as error:
        print(f"headstart {name}: {error}", file=sys.stderr)
        return error.status if isinstance(error, CommandError) else BAD_USAGE
