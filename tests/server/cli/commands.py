"""Run a command in this process."""

from __future__ import annotations

from server import cli


def status_of(*arguments: str) -> int:
    """Return the exit code, also where argparse ends the command."""
    try:
        return cli.main(arguments)
    except SystemExit as end:
        return int(end.code or 0)
