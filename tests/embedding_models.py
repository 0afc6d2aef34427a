"""Embedding models for tests, as sentence-transformers saves them, and the reference for their embeddings."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, processors

from tests import smollm2

EOS = "<|endoftext|>"


def write_steps(folder: Path, mode: str, *, normalise: bool = True) -> None:
    """Write the pooling file and the list of steps. `mode` is that of sentence-transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    kinds = [("0", "Transformer", ""), ("1", "Pooling", "1_Pooling"), ("2", "Normalize", "2_Normalize")]
    steps = [
        {"idx": int(index), "name": index, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, kind, path in kinds[: 3 if normalise else 2]
    ]
    (folder / "modules.json").write_text(json.dumps(steps))
    modes = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    config = {f"pooling_mode_{name}": name == mode for name in modes}
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 1, **config}))


def write_qwen3(folder: Path, *, vocab_size: int) -> Any:
    """Write a small random Qwen3 without its head, whose tokenizer ends each text with EOS. Return the model."""
    from transformers import Qwen3Config, Qwen3Model

    tokenizer = Tokenizer.from_str(smollm2.tokenizer().to_str())
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.2,
        eos_token_id=2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen3Model(config).float().eval()
        for name, parameter in model.named_parameters():
            if "norm" in name:  # else ones, which would hide a norm left out
                parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    ends = processors.TemplateProcessing(single=f"$A {EOS}", special_tokens=[(EOS, tokenizer.token_to_id(EOS))])
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), ends])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return model


def write_smollm2(folder: Path, mode: str) -> Path:
    """Put SmolLM2's GGUF file into a folder with a pooling file."""
    write_steps(folder, mode)
    path = smollm2.checkpoint().path
    (folder / path.name).symlink_to(path)
    return folder


def reference(model: Any, token_ids: Sequence[int], mode: str, dimensions: int | None = None) -> torch.Tensor:
    """Return the embedding by `transformers`, normalised."""
    with torch.inference_mode():
        hidden = model(torch.tensor([list(token_ids)])).last_hidden_state[0].double()
    vector = (hidden[-1] if mode == "lasttoken" else hidden.mean(0))[:dimensions]
    return (vector / vector.norm()).float()
