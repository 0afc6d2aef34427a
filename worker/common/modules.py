"""The command that runs a module in a process of its own."""

from __future__ import annotations

import sys


def module_command(module: str, *options: str) -> list[str]:
    """Return the command. With -P, no file of the current folder shadows a module or package."""
    return [sys.executable, "-P", *options, "-m", module]
