"""A tiny random Gemma 3: three layers with a window, and one with full attention."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from tests.tiny_model import write_tiny_model
from tests.vllm.engines import Options

WINDOW: Final = 64
NUM_BLOCKS: Final = 200
"""Too few for all prompts of the test, in four groups."""


def write_model(folder: Path) -> Path:
    """Write random weights with SmolLM2's tokenizer and chat template."""
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    write_tiny_model(folder)
    path = folder / "tokenizer_config.json"
    # Without the class, transformers takes Gemma's tokenizer for a model of this type.
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}))
    vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
    config = Gemma3TextConfig(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=1024,
        sliding_window=WINDOW,
        layer_types=["sliding_attention"] * 3 + ["full_attention"],
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        Gemma3ForCausalLM(config).save_pretrained(folder)
    return folder


def options(folder: Path) -> Options:
    """Return those of an engine with the model in `folder`."""
    return Options(model=folder, num_blocks=NUM_BLOCKS, max_model_len=640, niceness=5)
