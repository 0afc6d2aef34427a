"""A model with its matrices in other bits, to compare forms of weights. Its output may differ."""

from __future__ import annotations

import gguf
import torch
from torch import Tensor

from worker.model.base import Checkpoint, ModelFamily, QuantisedTensor
from worker.model.config import LoadOptions, ModelConfig
from worker.model.load import FAMILIES, LoadedModel
from worker.model.weight_file import make_weight


class RequantisedCheckpoint(Checkpoint):
    """Another checkpoint whose matrices are all of one kind, such as Q8_0."""

    def __init__(self, source: Checkpoint, kind: str) -> None:
        self.path, self.revision, self.model_type = source.path, source.revision, source.model_type
        self.files = source.files
        self.name = f"{source.name} in {kind}"
        self._source = source
        self._kind = kind

    def config(self, family: ModelFamily) -> ModelConfig:
        return self._source.config(family)

    def has(self, name: str) -> bool:
        return self._source.has(name)

    def tensor(self, name: str) -> Tensor:
        if (stored := self.quantised(name)) is None:
            return self._source.tensor(name)
        return torch.from_numpy(gguf.dequantize(stored.data, gguf.GGMLQuantizationType[self._kind]))

    def quantised(self, name: str) -> QuantisedTensor | None:
        values = self._source.tensor(name)
        if values.dim() != 2:
            return None
        data = gguf.quantize(values.float().numpy(), gguf.GGMLQuantizationType[self._kind])
        return QuantisedTensor(self._kind, data, (values.shape[0], values.shape[1]))

    def rope_factors(self) -> Tensor | None:
        return self._source.rope_factors()


@torch.inference_mode()
def requantised_model(model: LoadedModel, kind: str) -> LoadedModel:
    """Return the same model, of one of FAMILIES, with packed weights of this kind."""
    checkpoint = RequantisedCheckpoint(model.checkpoint, kind)
    options = LoadOptions(dtype=model.options.dtype, device=model.options.device, weights="packed")
    family = FAMILIES[model.checkpoint.model_type]
    decoder = family.decoder(checkpoint, model.config, options, make_weight, lambda done, total: None)
    return LoadedModel(decoder, checkpoint, options)
