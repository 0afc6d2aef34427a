"""A line of `headstart doctor`: what one check has found."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True):
    """One line of the answer. `warn`: works, but could be better. `fail`: does not work as asked."""

    name: str
    status: Status
    found: str
    mend: str = ""
    """The advice; empty when all is well."""


def judge(name: str, found: str, *problems: tuple[bool, Status, str]) -> Check:
    """Return a check with the status and advice of the first problem that is there, or one that is ok."""
    status, mend = next(((status, mend) for there, status, mend in problems if there), ("ok", ""))
    return Check(name, status, found, mend)


def print_check(check: Check) -> None:
    """Print a check for the process that asked: one JSON object a line."""
    print(msgspec.json.encode(check).decode(), flush=True)
