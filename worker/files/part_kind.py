"""The part of some layers' KV that a model keeps, by its config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final, Literal

PartKind = Literal["windows", "states"]

_STATES: Final = ("conv", "delta", "lightning", "linear", "mamba", "recurrent", "ssm")
"""Parts of the names of layers with a state."""
_STATE_FIELDS: Final = ("attn_type_list", "conv_L_cache", "hybrid_override_pattern", "layers_block_type")


def part_kind(folder: Path) -> PartKind | None:
    """Return what some layers keep: the last tokens, or a state; None if all keep everything, or it is not known."""
    try:
        config = json.loads((folder / "config.json").read_bytes())
        return _kind_of(config.get("text_config") or config)
    except (OSError, ValueError, AttributeError, TypeError):
        return None


def _kind_of(fields: dict[str, Any]) -> PartKind | None:
    layer_types = fields.get("layer_types")
    if isinstance(layer_types, list) and layer_types:
        names = {str(name) for name in layer_types}
        if any(state in name for name in names for state in _STATES):
            return "states"
        return "windows" if any("sliding" in name for name in names) else None
    if any(name in _STATE_FIELDS or name.startswith(("mamba_", "ssm_")) for name in fields):
        return "states"
    has_windows = bool(fields.get("sliding_window")) and fields.get("use_sliding_window") is not False
    return "windows" if has_windows else None
