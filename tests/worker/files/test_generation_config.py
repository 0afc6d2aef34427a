"""A model's own sampling defaults, from its files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.generation_configs import CONFIGS
from worker.files.errors import CheckpointError
from worker.files.generation_config import gguf_defaults, sampling_defaults
from worker.wire import NO_DEFAULTS, SamplingDefaults


def write(folder: Path, fields: object, name: str = "generation_config.json") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(fields))
    return folder


@pytest.mark.parametrize("name", CONFIGS)
def test_a_file_is_read(name: str, tmp_path: Path) -> None:
    fields, resolved = CONFIGS[name]
    shown = sampling_defaults("auto", write(tmp_path, fields)).shown()
    assert resolved.items() <= shown.items()
    assert set(shown) - set(resolved) <= {"temperature", "top_p", "top_k", "repetition_penalty", "max_tokens"}


def test_a_folder_without_the_file_has_the_fields_of_its_config(tmp_path: Path) -> None:
    assert sampling_defaults("auto", tmp_path) == NO_DEFAULTS
    assert sampling_defaults("auto", write(tmp_path, {"temperature": 0.5}, "config.json")).temperature == 0.5
    assert sampling_defaults("auto", write(tmp_path, {"top_k": 4})) == SamplingDefaults(top_k=4)


@pytest.mark.parametrize("choice", ["none", "vllm"])
def test_the_option_takes_none(choice: str, tmp_path: Path) -> None:
    assert sampling_defaults(choice, write(tmp_path, {"temperature": 0.5})) == NO_DEFAULTS
    assert gguf_defaults(choice, {"general.sampling.temp": 0.5}, tmp_path / "a.gguf") == NO_DEFAULTS


def test_the_option_names_another_folder(tmp_path: Path) -> None:
    write(tmp_path, {"temperature": 0.5})
    other = write(tmp_path / "other", {"temperature": 0.25})
    for defaults in (
        sampling_defaults(str(other), tmp_path),
        gguf_defaults(str(other), {"general.sampling.temp": 0.5}, tmp_path / "a.gguf"),
    ):
        assert defaults.temperature == 0.25
    with pytest.raises(CheckpointError, match=r"--generation-config: .* has no generation_config.json"):
        sampling_defaults(str(tmp_path / "missing"), tmp_path)


@pytest.mark.parametrize("fields", [{"temperature": -1}, {"top_p": "much"}, {"max_new_tokens": 0}, [1]])
def test_a_bad_file_is_named_with_the_remedy(fields: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"generation_config\.json|holds no JSON object"):
        sampling_defaults("auto", write(tmp_path, fields))


def test_gguf_files_hold_defaults_too(tmp_path: Path) -> None:
    metadata = {"general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.name": "a"}
    assert gguf_defaults("auto", metadata, tmp_path / "a.gguf") == SamplingDefaults(temperature=0.6, top_k=20)
