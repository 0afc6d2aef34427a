"""What the feed has told so far."""

from __future__ import annotations

from collections import deque
from typing import Any, Final

MAX_DECISIONS: Final = 50


class View:
    """Fed with every event; the screen reads it."""

    def __init__(self) -> None:
        self.about: dict[str, Any] = {}
        self.snapshot: dict[str, Any] | None = None
        self.prefixes: list[dict[str, Any]] | None = None
        self.decisions: deque[dict[str, Any]] = deque(maxlen=MAX_DECISIONS)
        """The latest last."""

    def hear(self, name: str, data: Any) -> None:
        match name:
            case "hello":
                self.about = data
                self.decisions.clear()
                self.decisions.extend(data["decisions"])
            case "snapshot":
                self.snapshot = data
            case "decisions":
                self.decisions.extend(data["decisions"])
                for decision in self.decisions:
                    if (found := data["found"].get(decision["request"])) is not None:
                        decision["found_tokens"] = found
            case "prefixes":
                self.prefixes = data["prefixes"]

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        about = {name: self.about.get(name) for name in ("version", "gateway", "policy")}
        return {**about, **(self.snapshot or {}), "prefixes": self.prefixes or [], "decisions": list(self.decisions)}
