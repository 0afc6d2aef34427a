"""Tiny random checkpoints of every family that the Llama decoder runs, written by `transformers` itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

_SHAPE = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.5,
    "attn_implementation": "eager",
}


def _rope(**fields: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_theta": 10_000.0, **fields}}


_LLAMA3 = _rope(
    rope_type="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=32
)
_YARN = _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"num_key_value_heads": 4}),
    "llama3": ("Llama", {"head_dim": 16, **_LLAMA3}),
    "llama_biased": ("Llama", {"attention_bias": True, "mlp_bias": True, **_rope(rope_type="linear", factor=2.0)}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "num_attention_heads": 6, "hidden_size": 48}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral_window": ("Mistral", {"sliding_window": 9, "head_dim": 16}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2_windows": ("Qwen2", {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}),
    "qwen2_yarn": ("Qwen2", _YARN),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def write_family(name: str, folder: Path, **overrides: Any) -> Any:
    """Save the family's checkpoint and return the reference model (float32, eager attention)."""
    import transformers

    prefix, fields = FAMILIES[name]
    config = getattr(transformers, f"{prefix}Config")(**{**_SHAPE, **fields, **overrides})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(hash_name(name))
        model = getattr(transformers, f"{prefix}ForCausalLM")(config).float().eval()
        for parameter_name, parameter in model.named_parameters():
            if "norm" in parameter_name or parameter_name.endswith("bias"):  # else ones and zeros: they would hide
                parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    return model


def hash_name(name: str) -> int:
    return sum(map(ord, name))
