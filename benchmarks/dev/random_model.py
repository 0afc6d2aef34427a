"""Models of random weights: the shape of a real one, for machines that cannot fetch it. Their output is noise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from worker.files.model_files import ModelFiles
from worker.model.base import Checkpoint, ModelFamily
from worker.model.config import LoadOptions, ModelConfig
from worker.model.huggingface import config_from_hf
from worker.model.load import FAMILIES, LoadedModel
from worker.model.weight_file import make_weight

_LLAMA3_ROPE: Final = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: Final[Mapping[str, Mapping[str, Any]]] = {
    "llama-8b": {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": _LLAMA3_ROPE,
    },
    "tiny": {
        "vocab_size": 1000,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
    },
}
"""The fields of config.json of Llama models, by the names that `--shape` takes."""
_STD: Final = 0.02


class RandomCheckpoint(Checkpoint):
    """No file. Its tensors are made where and as `options` want them."""

    path = Path()
    revision = "random"
    files = ModelFiles("random", ())
    model_type = "llama"

    def __init__(self, shape: str, options: LoadOptions) -> None:
        self.name = f"{shape} of random weights"
        self.fields: Mapping[str, Any] = {**SHAPES[shape], "tie_word_embeddings": False}
        self.shape = self.config(FAMILIES[self.model_type])
        self._options = options

    def config(self, family: ModelFamily) -> ModelConfig:
        return config_from_hf({**self.fields, "model_type": self.model_type}, family)

    def has(self, name: str) -> bool:
        return not name.endswith(".bias")

    def tensor(self, name: str) -> Tensor:
        config, options = self.shape, self._options
        attention, hidden, inner = config.attention, config.hidden_size, config.intermediate_size
        sizes = {
            "q_proj": (attention.query_size, hidden),
            "k_proj": (attention.kv_size, hidden),
            "v_proj": (attention.kv_size, hidden),
            "o_proj": (hidden, attention.query_size),
            "gate_proj": (inner, hidden),
            "up_proj": (inner, hidden),
            "down_proj": (hidden, inner),
            "embed_tokens": (config.vocab_size, hidden),
            "lm_head": (config.vocab_size, hidden),
        }
        kind = name.removesuffix(".weight").rpartition(".")[2]
        made: dict[str, Any] = {"dtype": options.torch_dtype, "device": options.device}
        return torch.randn(sizes[kind], **made).mul_(_STD) if kind in sizes else torch.ones(hidden, **made)


@torch.inference_mode()
def random_model(shape: str, options: LoadOptions) -> LoadedModel:
    """One of SHAPES on its device, in the forms that a checkpoint would be loaded in."""
    checkpoint = RandomCheckpoint(shape, options)
    family = FAMILIES[checkpoint.model_type]
    decoder = family.decoder(checkpoint, checkpoint.shape, options, make_weight, lambda done, total: None)
    return LoadedModel(decoder, checkpoint, options)


def random_reference(shape: str, options: LoadOptions) -> Any:
    """The same shape in `transformers`."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(**SHAPES[shape], tie_word_embeddings=False)
    with torch.device(options.device):
        return AutoModelForCausalLM.from_config(config, dtype=options.torch_dtype)  # type: ignore[no-untyped-call]
