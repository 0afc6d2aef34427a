"""A tiny random checkpoint of a real family, written to disk for the real loader: fast, and wrong about everything.

python -m tests.tiny_model FOLDER
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests import smollm2


def write_tiny_model(
    folder: Path, *, seed: int = 0, max_position_embeddings: int = 4096, hidden_size: int = 64
) -> Path:
    """A 2-layer Llama with SmolLM2's tokenizer and chat template, as safetensors. Returns `folder`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    metadata = smollm2.checkpoint().metadata
    tokenizer = smollm2.tokenizer()
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    template = metadata["tokenizer.chat_template"]
    tokenizer_config = {"chat_template": template, "eos_token": "<|im_end|>", "bos_token": "<|im_start|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    return folder


if __name__ == "__main__":
    write_tiny_model(Path(sys.argv[1]), max_position_embeddings=16384)
