"""Windows and states in a model's config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from worker.adapter.groups import part_kind

FULL = ["full_attention"] * 4


@pytest.mark.parametrize(
    ("config", "kind"),
    [
        ({}, None),
        ({"num_hidden_layers": 2, "sliding_window": None}, None),
        ({"sliding_window": 4096, "use_sliding_window": False}, None),
        ({"sliding_window": 4096, "layer_types": FULL}, None),
        ({"layer_types": ["chunked_attention", *FULL]}, None),
        ({"sliding_window": 4096}, "windows"),
        ({"layer_types": ["sliding_attention", *FULL], "sliding_window": 128}, "windows"),
        ({"text_config": {"layer_types": ["sliding_attention", *FULL]}}, "windows"),
        ({"layer_types": ["linear_attention", *FULL]}, "states"),
        ({"layer_types": ["mamba", "attention"]}, "states"),
        ({"mamba_d_state": 16}, "states"),
        ({"hybrid_override_pattern": "M-M*-"}, "states"),
        ([], None),
        ({"text_config": 5}, None),
    ],
)
def test_kinds(tmp_path: Path, config: Any, kind: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert part_kind(tmp_path) == kind


def test_a_folder_without_a_config(tmp_path: Path) -> None:
    assert part_kind(tmp_path) is None
    (tmp_path / "config.json").write_text("{")
    assert part_kind(tmp_path) is None
