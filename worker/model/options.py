"""How a model is held in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

WeightForm = Literal["dense", "packed"]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is held: `dtype` of activations and dense weights, `device`, and the form of the weights."""

    dtype: str = "float32"
    device: str = "cpu"
    weights: WeightForm = "dense"
    deterministic: bool = False
    """Every token's result is the same, bit for bit, however it is batched, chunked or cached; slower."""

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
