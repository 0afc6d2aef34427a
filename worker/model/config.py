"""Model errors, load options, and the shape of a decoder in any file format.

ModelError (ValueError)
  +-- CheckpointError     files are missing, broken, or not what they claim to be
  +-- UnsupportedModel    the files are fine, but this engine cannot run them exactly
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from worker.attention.base import AttentionShape

WeightForm = Literal["dense", "packed"]
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class ModelError(ValueError):
    """A model that cannot be loaded. The text names the field or file and what to do."""


class CheckpointError(ModelError):
    """Files that are missing, broken, or not what they claim to be."""


class UnsupportedModel(ModelError):
    """Sound files of a model that this engine cannot run exactly."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is held in memory."""

    dtype: str = "float32"
    """The dtype of activations and dense weights."""
    device: str = "cpu"
    weights: WeightForm = "dense"
    deterministic: bool = False
    """Every token's result is the same, bit for bit, however it is batched, chunked or cached. Slower."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.weights not in get_args(WeightForm):
            raise ValueError(f"weights must be one of {', '.join(get_args(WeightForm))}, got {self.weights!r}")
        if self.weights == "packed" and (self.dtype, self.device) != ("bfloat16", "cpu"):
            raise ValueError(
                "weights=packed needs dtype=bfloat16 and device=cpu: the packed product exists there alone"
            )
        if self.deterministic and (self.weights, self.device) != ("dense", "cpu"):
            raise ValueError("deterministic needs weights=dense and device=cpu: no other kernels are batch-invariant")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]


RopeKind = Literal["default", "linear", "llama3", "yarn"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding. A comment names the kinds that read a field."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    original_max_len: int = 0  # llama3, yarn
    factor: float = 1.0  # linear, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: derived from factor
    truncate: bool = True  # yarn


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a decoder."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_model_len: int
    tie_embeddings: bool
    qk_norm: bool = False
    sliding_windows: tuple[int | None, ...] = ()
    """Per layer the number of tokens that a query sees, itself included, or None for all. Empty: all in every layer."""
    attention_scale: float | None = None
    """Factor on query-key products; None: head_dim ** -0.5."""

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise CheckpointError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(f"num_heads ({self.num_heads}) is no multiple of num_kv_heads ({self.num_kv_heads})")

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape(
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5 if self.attention_scale is None else self.attention_scale,
            windows=self.sliding_windows,
        )
