"""The entry point: from what stands after --model to a decoder that is ready to run."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from worker.device import current_device
from worker.model.checkpoint import Checkpoint, find_checkpoint
from worker.model.config import LEAN_MODEL_TYPES, ModelConfig
from worker.model.decoder import Decoder
from worker.model.errors import UnsupportedModel
from worker.model.gguf import GGUFCheckpoint
from worker.model.llama import LlamaDecoder
from worker.model.options import LoadOptions
from worker.model.weights import Progress, WeightLoader

__all__ = ["LoadOptions", "LoadedModel", "load_model"]


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A decoder on its device, and the checkpoint that it came from."""

    decoder: Decoder
    checkpoint: Checkpoint
    options: LoadOptions

    @property
    def dtype(self) -> torch.dtype:
        return self.options.torch_dtype

    @property
    def device(self) -> torch.device:
        return torch.device(self.options.device)

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
        elif self.dtype != torch.float32 or self.options.weights != "dense":
            device = f"cpu-{torch.backends.cpu.get_cpu_capability()}"
        return f"{device}/{str(self.dtype).removeprefix('torch.')}/{self.options.weights}"

    @property
    def revision(self) -> str:
        return self.checkpoint.revision


def load_model(source: str, options: LoadOptions, progress: Progress = lambda done, total: None) -> LoadedModel:
    """Open, check and load the model that `source` names ('' is the default model). Raises ModelError, ValueError.

    `progress` is called with (layers done, layers in all) from this thread.
    """
    checkpoint = find_checkpoint(source)
    with torch.inference_mode(), current_device(torch.device(options.device)):
        return LoadedModel(_decoder(checkpoint, options, progress), checkpoint, options)


def _decoder(checkpoint: Checkpoint, options: LoadOptions, progress: Progress) -> Decoder:
    """The lean decoder where it can run the model exactly, else the model of transformers over the paged cache."""
    if checkpoint.model_type in LEAN_MODEL_TYPES or isinstance(checkpoint, GGUFCheckpoint):
        config = checkpoint.config()
        return LlamaDecoder(config, WeightLoader(checkpoint, config, options).load(progress))
    if options.deterministic or options.weights == "packed":
        raise UnsupportedModel(
            f"model type {checkpoint.model_type!r} runs through transformers: without deterministic and weights=packed"
        )
    from worker.model.transformers_backend import ForeignDecoder

    progress(0, 1)
    decoder = ForeignDecoder(checkpoint, options)
    progress(1, 1)
    return decoder
