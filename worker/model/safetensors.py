"""Hugging Face folders: config.json beside one or many safetensors files, read through memory maps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from worker.model.checkpoint import QuantisedTensor, digest_files
from worker.model.config import ModelConfig, config_from_hf
from worker.model.errors import CheckpointError, UnsupportedModel

_INDEX = "model.safetensors.index.json"


class SafetensorsCheckpoint:
    """A `worker.model.checkpoint.Checkpoint` over a folder."""

    __slots__ = ("_files", "_opened", "_raw", "name", "path", "revision")

    def __init__(self, path: Path, name: str | None = None, revision: str | None = None) -> None:
        self.path = path
        self.name = name or path.resolve().name
        self._raw = read_json(path / "config.json")
        if "auto_map" in self._raw and not self._raw.get("model_type"):
            raise UnsupportedModel(f"{path} needs code of its own (auto_map); remote code is never run")
        self._files = _files_by_tensor(path)
        self._opened: dict[Path, Any] = {}
        self.revision = revision or digest_files([path / "config.json", *set(self._files.values())])

    @property
    def model_type(self) -> str:
        return str(self._raw.get("model_type"))

    def config(self) -> ModelConfig:
        return config_from_hf(self._raw)

    def has(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> Tensor:
        if (file := self._files.get(name)) is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}")
        try:
            tensor: Tensor = self._open(file).get_tensor(name)
        except SafetensorError as error:
            raise CheckpointError(f"{file}: {error}") from error
        return tensor

    def quantised(self, name: str) -> QuantisedTensor | None:
        return None

    def rope_factors(self) -> Tensor | None:
        return None

    def _open(self, file: Path) -> Any:
        if file not in self._opened:
            self._opened[file] = safe_open(file, framework="pt")
        return self._opened[file]


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises CheckpointError."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value


def _files_by_tensor(path: Path) -> dict[str, Path]:
    if (index := path / _INDEX).is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index} has no weight_map")
        files = {path / str(file) for file in weight_map.values()}
        if any(file.parent != path for file in files):
            raise CheckpointError(f"{index} names a file outside of its folder")
        if missing := sorted(file.name for file in files if not file.is_file()):
            raise CheckpointError(f"{path} lacks {missing[0]} ({len(missing)} of {len(files)} files are missing)")
        return {str(name): path / str(file) for name, file in weight_map.items()}
    files = set(path.glob("*.safetensors"))
    if not files:
        hint = " (there are pickled weights, which are never loaded)" if list(path.glob("*.bin")) else ""
        raise CheckpointError(f"{path} has no *.safetensors files{hint}")
    return {name: file for file in sorted(files) for name in _tensor_names(file)}


def _tensor_names(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as opened:
            return list(opened.keys())
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
