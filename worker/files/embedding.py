"""Embeddings: whether a model makes them, and how the hidden states of a text become one.

The files are those of sentence-transformers. `modules.json` lists the steps after the model, such as `1_Pooling`
and `2_Normalize`. The config.json of `1_Pooling` names the hidden states that count.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from worker.files.errors import CheckpointError, UnsupportedModel
from worker.files.tokenizer_files import read_json, read_json_list

PoolingKind = Literal["last", "mean"]
_KINDS: Final[dict[str, PoolingKind]] = {"lasttoken": "last", "mean": "mean", "mean_tokens": "mean"}
"""By sentence-transformers' names of the modes."""
_MODE: Final = "pooling_mode_"
_STEPS: Final = frozenset({"Transformer", "Pooling", "Normalize"})


@dataclass(frozen=True, slots=True)
class Pooling:
    """How the normalised hidden states after the last layer become an embedding."""

    kind: PoolingKind = "last"
    """The last token's, or the mean of all. A cached prefix keeps no states, so a mean computes every token."""
    normalise: bool = True

    def embedding(self, hidden: np.ndarray, num_tokens: int, dimensions: int | None) -> bytes:
        """Return float32, little-endian, from the last hidden state or the sum of `num_tokens` (hidden_size,)."""
        vector = hidden.astype(np.float64)
        if self.kind == "mean":
            vector /= num_tokens
        vector = vector[:dimensions]
        if self.normalise or dimensions is not None:
            vector /= max(float(np.linalg.norm(vector)), 1e-12)
        return vector.astype("<f4").tobytes()


def find_pooling(task: str, path: Path) -> Pooling | None:
    """Return how the model at `path`, a folder or a GGUF file in one, embeds. None: it generates text.

    `task` is that of the options. Raise ModelError for steps that are not offered.
    """
    folder = path if path.is_dir() else path.parent
    found = None if task == "generate" else _read_pooling(folder)
    return Pooling() if found is None and task == "embed" else found


def _read_pooling(folder: Path) -> Pooling | None:
    pooling, normalise = folder / "1_Pooling", True
    if (modules := folder / "modules.json").is_file():
        steps = {str(step.get("type")).rpartition(".")[2]: step for step in read_json_list(modules)}
        if strange := sorted(steps.keys() - _STEPS):
            raise UnsupportedModel(f"{modules}: the step {strange[0]} is not known; only {', '.join(sorted(_STEPS))}")
        normalise = "Normalize" in steps
        pooling = folder / str(steps.get("Pooling", {}).get("path") or pooling.name)
    file = pooling / "config.json"
    return Pooling(_kind(file), normalise) if file.is_file() else None


def _kind(file: Path) -> PoolingKind:
    config: dict[str, Any] = read_json(file)
    modes = [name.removeprefix(_MODE) for name, value in config.items() if name.startswith(_MODE) and value is True]
    if (named := config.get("pooling_mode")) is not None:
        modes = [str(named)]
    if not modes:
        raise CheckpointError(f"{file} names no pooling mode")
    if len(modes) > 1 or modes[0] not in _KINDS:
        raise UnsupportedModel(f"{file}: pooling by {' and '.join(modes)}; only lasttoken or mean_tokens are known")
    return _KINDS[modes[0]]
