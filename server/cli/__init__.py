"""The `headstart` command. This module imports next to nothing: Ctrl-C during imports would show a traceback."""

from __future__ import annotations

import cache  # noqa: F401 - refuses to run without assertions, before any part is started


def main(argv: list[str] | tuple[str, ...] | None = None) -> int:
    """Run a command and return its exit code."""
    try:
        from server.cli.commands import run

        return run(argv)
    except KeyboardInterrupt:
        return 130  # 128 + SIGINT, as in shells
