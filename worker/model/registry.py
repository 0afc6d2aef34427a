"""The families of models that run on a decoder of the worker's own. Others run through transformers.

A Llama-like family is one entry, by the `model_type` of config.json, which is also GGUF's architecture.
See docs/adding_a_model.md.
"""

from __future__ import annotations

from typing import Final

from worker.model.base import Checkpoint, ModelFamily
from worker.model.config import ModelConfig, UnsupportedModel
from worker.model.llama import LlamaDecoder

FAMILIES: Final = {
    "llama": ModelFamily(LlamaDecoder),
    "mistral": ModelFamily(LlamaDecoder),
    "qwen2": ModelFamily(LlamaDecoder, optional_window=True),
    "qwen3": ModelFamily(LlamaDecoder, optional_window=True, qk_norm=True),
}


def find_family(model_type: str) -> ModelFamily:
    """Raise UnsupportedModel when the model type has no family."""
    if model_type not in FAMILIES:
        known = ", ".join(FAMILIES)
        raise UnsupportedModel(f"model type {model_type!r} is none of {known}: it needs transformers and safetensors")
    return FAMILIES[model_type]


def read_config(checkpoint: Checkpoint) -> ModelConfig:
    """Raise ModelError, UnsupportedModel when the model type has no family."""
    return checkpoint.config(find_family(checkpoint.model_type))
