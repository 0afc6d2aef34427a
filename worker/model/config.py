"""Load options, and the shape of a decoder in any file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from worker.attention.base import AttentionShape
from worker.files.errors import CheckpointError

WeightForm = Literal["auto", "dense", "packed"]
"""auto: on a CPU in float32, quantised weights stay packed. The results equal those of dense ones."""
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is held in memory."""

    dtype: str = "float32"
    """The dtype of activations and dense weights."""
    device: str = "cpu"
    weights: WeightForm = "auto"
    deterministic: bool = False
    """Every token's result is the same, bit for bit, however it is batched, chunked or cached. Slower."""
    max_model_len: int | None = None
    """The longest context to serve. None: the model's own."""

    def __post_init__(self) -> None:
        if self.weights == "packed" and (self.device != "cpu" or self.dtype == "float16"):
            raise ValueError(
                "weights=packed needs device=cpu and dtype=float32 or bfloat16: only these have its kernels"
            )
        if self.deterministic and (self.device != "cpu" or (self.weights, self.dtype) == ("packed", "bfloat16")):
            raise ValueError(
                "deterministic needs device=cpu, and dtype=float32 if weights=packed: other kernels are not "
                "batch-invariant"
            )

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    parameters: Mapping[str, float] = field(default_factory=dict)
    """Those of the kind, by their names in config.json."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    attention: AttentionShape
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int
    tie_embeddings: bool
    qk_norm: bool = False

    def __post_init__(self) -> None:
        shape, attention_sizes = self.attention, ("num_layers", "num_heads", "num_kv_heads", "head_dim")
        for owner, names in ((self, ("vocab_size", "hidden_size")), (shape, attention_sizes)):
            for name in names:
                if getattr(owner, name) < 1:
                    raise CheckpointError(f"{name} must be at least 1, got {getattr(owner, name)}")
        if shape.num_heads % shape.num_kv_heads:
            raise CheckpointError(
                f"num_heads ({shape.num_heads}) is no multiple of num_kv_heads ({shape.num_kv_heads})"
            )
