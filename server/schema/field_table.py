"""The fields that other servers have and this one does not honour, by route, from `refused_fields.toml`.

A field that would change the answer is refused by name; one that cannot is ignored. docs/api.md lists them, and
`tests/data/engine_fields.toml` has the published fields of other servers, each of which must be known here.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

_NOTHING: Final[tuple[Any, ...]] = (False, "", [], {})
_TABLE: Final = tomllib.loads(Path(__file__).with_name("refused_fields.toml").read_text(encoding="utf-8"))
IGNORED: Final[Mapping[str, str]] = {name: why for why, names in _TABLE.pop("ignored").items() for name in names}
"""Fields that cannot change an answer, on every route. Unknown fields are ignored too."""
_SENT: Final = tomllib.loads(Path(__file__).with_name("sent_fields.toml").read_text(encoding="utf-8"))
SENT_FIELDS: Final[Mapping[str, frozenset[str]]] = {path: frozenset(names) for path, names in _SENT["fields"].items()}
"""Fields that may be sent on to an engine, by its path."""
SENT_XARGS: Final = frozenset(_SENT["vllm_xargs"])
"""Names that may be in `vllm_xargs`."""


@dataclass(frozen=True, slots=True)
class FieldRefusal:
    """Why a known field is refused."""

    why: str
    neutral: tuple[Any, ...] = _NOTHING
    """The values that have no effect, next to null. `False` equals 0."""
    details: Mapping[str, Any] | None = None
    """See `ApiError`."""

    @property
    def advised_field(self) -> str:
        return self.why.partition("use ")[2].partition(" ")[0].rstrip(",")


def _refusals(section: Mapping[str, Any]) -> dict[str, FieldRefusal]:
    rows = [*section["refused"]]
    rows += ({"why": f"is not offered: use {name}", "fields": fields} for name, fields in section["use"].items())
    return {
        name: FieldRefusal(row["why"], tuple(row.get("neutral", _NOTHING)), row.get("details"))
        for row in rows
        for name in row["fields"]
    }


_EVERYWHERE: Final = _refusals(_TABLE.pop("everywhere"))
REFUSED_FIELDS: Final[Mapping[str, Mapping[str, FieldRefusal]]] = {
    route: _EVERYWHERE | _refusals(section) for route, section in _TABLE.items()
}
"""By route. A route may honour some of them all the same."""
