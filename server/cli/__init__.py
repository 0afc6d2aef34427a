"""The `headstart` command: one word chooses the part, the rest is that part's own command line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

import cache  # noqa: F401 - which refuses to run without assertions, before any part is started


def _serve(argv: Sequence[str]) -> int:
    from server.cli.serve import main

    return main(argv)


def _gateway(argv: Sequence[str]) -> int:
    from server.gateway import main

    return main(list(argv))


def _keys(argv: Sequence[str]) -> int:
    from server.cli.keys import main

    return main(argv)


def _doctor(argv: Sequence[str]) -> int:
    from server.cli.doctor import main

    return main(argv)


def _top(argv: Sequence[str]) -> int:
    from server.cli.top import main

    return main(argv)


def _index(argv: Sequence[str]) -> int:
    from server.cli.index import main

    return main(argv)


def _exec_module(module: str, argv: Sequence[str]) -> NoReturn:
    """Become `python -m module`: the gateway's package never imports the worker's torch."""
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *argv])


COMMANDS: Final[dict[str, tuple[str, Callable[[Sequence[str]], int]]]] = {
    "serve": ("everything on this machine: Redis, workers and a gateway", _serve),
    "gateway": ("one gateway: the OpenAI API in front of the workers", _gateway),
    "worker": ("one worker: a model on one device", lambda argv: _exec_module("worker", argv)),
    "top": ("the fleet in a terminal: workers, load, decisions", _top),
    "doctor": ("what this machine lacks, and how to mend it", _doctor),
    "keys": ("API keys: make one, check a file of them", _keys),
    "index": ("what the shared index holds; shared prefixes; emptying a worker", _index),
    "bench": ("the measurements; each prints a table", lambda argv: _exec_module("benchmarks", argv)),
}


def usage() -> str:
    lines = [f"  {name:8} {summary}" for name, (summary, _) in COMMANDS.items()]
    return "\n".join(["usage: headstart COMMAND [OPTIONS]", "", *lines, "", "headstart COMMAND --help tells the rest."])


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        return 0 if arguments else 2
    name, *rest = arguments
    if name == "--version":
        from importlib.metadata import version

        print(f"headstart {version('headstart')}")
        return 0
    if name not in COMMANDS:
        print(f"headstart: there is no command {name!r}\n\n{usage()}", file=sys.stderr)
        return 2
    if os.getpid() == 1:  # of a container: the kernel drops what has no handler, and the parts install theirs later
        signal.signal(signal.SIGTERM, lambda number, _: os._exit(128 + number))
    return COMMANDS[name][1](rest)
