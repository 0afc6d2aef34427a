"""The entry point: from what stands after --model to a decoder that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from worker.model.checkpoint import Checkpoint, find_checkpoint
from worker.model.config import LEAN_MODEL_TYPES, ModelConfig
from worker.model.decoder import Decoder
from worker.model.errors import UnsupportedModel
from worker.model.llama import LlamaDecoder
from worker.model.weights import Progress, WeightLoader

WeightForm = Literal["dense", "packed"]

DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How a model is held: `dtype` of activations and dense weights, `device`, and the form of the weights."""

    dtype: str = "float32"
    device: str = "cpu"
    weights: WeightForm = "dense"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.weights not in get_args(WeightForm):
            raise ValueError(f"weights must be one of {', '.join(get_args(WeightForm))}, got {self.weights!r}")
        if self.weights == "packed" and (self.dtype, self.device) != ("bfloat16", "cpu"):
            raise ValueError(
                "weights=packed needs dtype=bfloat16 and device=cpu: the packed product exists there alone"
            )


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A decoder on its device, and the checkpoint that it came from."""

    decoder: Decoder
    checkpoint: Checkpoint
    dtype: torch.dtype
    device: torch.device
    weights: WeightForm

    @property
    def config(self) -> ModelConfig:
        return self.decoder.config

    @property
    def name(self) -> str:
        return self.checkpoint.name

    @property
    def numerics(self) -> str:
        """What decides how results round, short of the attention kernel. Below float32 the CPU's units count."""
        device = self.device.type
        if device == "cuda":
            device = torch.cuda.get_device_name(self.device).replace(" ", "-")
        elif self.dtype != torch.float32 or self.weights != "dense":
            device = f"cpu-{torch.backends.cpu.get_cpu_capability()}"
        return f"{device}/{str(self.dtype).removeprefix('torch.')}/{self.weights}"

    @property
    def revision(self) -> str:
        return self.checkpoint.revision


def load_model(source: str, options: LoadOptions, progress: Progress = lambda done, total: None) -> LoadedModel:
    """Open, check and load the model that `source` names ('' is the default model). Raises ModelError, ValueError.

    `progress` is called with (layers done, layers in all) from this thread.
    """
    checkpoint = find_checkpoint(source)
    dtype, device = DTYPES[options.dtype], torch.device(options.device)
    if checkpoint.model_type not in LEAN_MODEL_TYPES:
        raise UnsupportedModel(f"model type {checkpoint.model_type!r} of {checkpoint.path} is not supported")
    config = checkpoint.config()
    with torch.inference_mode():
        weights = WeightLoader(checkpoint, config, dtype, device, options.weights == "packed").load(progress)
    return LoadedModel(LlamaDecoder(config, weights), checkpoint, dtype, device, options.weights)
