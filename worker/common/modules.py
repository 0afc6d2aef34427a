"""The command that runs a module in a process of its own."""

from __future__ import annotations

import sys


def module_command(module: str, *options: str) -> list[str]:
    """Return the command. No file of the current folder runs in place of ours or of a package: -P."""
    return [sys.executable, "-P", *options, "-m", module]
