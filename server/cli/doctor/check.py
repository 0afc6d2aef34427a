"""One line of the answer."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, Literal

import msgspec

Status = Literal["ok", "warn", "fail"]
_WIDTH: Final = 10
_COLOURS: Final[dict[Status, str]] = {"ok": "\033[32m", "warn": "\033[33m", "fail": "\033[31m"}


class Check(msgspec.Struct, frozen=True):
    """`warn`: it works, but worse than it could. `fail`: it will not work as asked."""

    name: str
    status: Status
    found: str
    mend: str = ""
    """What to do about it; empty when all is well."""

    def text(self, *, colours: bool) -> str:
        status = f"{_COLOURS[self.status]}{self.status:4}\033[0m" if colours else f"{self.status:4}"
        line = f"{status}  {self.name:{_WIDTH}}  {self.found}"
        return f"{line}\n      {'':{_WIDTH}}  -> {self.mend}" if self.mend else line


def verdict(checks: Iterable[Check]) -> str:
    statuses = [check.status for check in checks]
    failed, warned = statuses.count("fail"), statuses.count("warn")
    if failed:
        return f"{failed} of {len(statuses)} checks failed: see what stands behind ->"
    return "All is well." if not warned else f"It will work; {warned} of {len(statuses)} checks could be better."


def exit_status(checks: Sequence[Check]) -> int:
    return 1 if any(check.status == "fail" for check in checks) else 0
