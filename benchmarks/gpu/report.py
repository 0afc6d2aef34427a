"""The report of a GPU's check: summary.json and summary.md, written again after each part."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


@dataclass(slots=True)
class Outcome:
    """A part and how it ended."""

    name: str
    title: str
    status: str
    """ok, failed, too late, skipped or running"""
    elapsed_s: float = 0.0
    limit_s: float = 0.0
    log: str = ""
    line: str = ""
    """The last line that it printed, or why it was skipped."""
    command: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True)
class Summary:
    """All parts so far, and the host. `save` it after each."""

    folder: Path
    host: dict[str, Any] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)

    @property
    def is_ok(self) -> bool:
        return bool(self.outcomes) and all(outcome.status == "ok" for outcome in self.outcomes)

    def save(self) -> None:
        document = {"ok": self.is_ok, **self.host, "parts": [asdict(outcome) for outcome in self.outcomes]}
        (self.folder / "summary.json").write_text(json.dumps(document, indent=1) + "\n")
        (self.folder / "summary.md").write_text(self._markdown())

    def _markdown(self) -> str:
        lines = ["# The check of a GPU", "", *(f"- {name}: {value}" for name, value in self.host.items()), ""]
        if self.host.get("mode") == "interpreter":
            lines += ["**Without a GPU**: Triton's interpreter and a tiny model. No figure here is one of a GPU.", ""]
        lines += ["| part | status | seconds | last line |", "| --- | --- | --- | --- |"]
        for one in self.outcomes:
            last = one.line.replace("|", "/")
            lines.append(f"| [{one.name}]({one.log}) | {one.status} | {one.elapsed_s:.0f} | {last} |")
        for one in self.outcomes:
            if one.figures:
                lines += ["", f"## {one.name}", "", "| figure | value |", "| --- | --- |"]
                lines += [f"| {name} | {value:.4g} |" for name, value in one.figures.items()]
        return "\n".join(lines) + "\n"
