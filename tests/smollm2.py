"""The reference for answers: SmolLM2 through `transformers`, from the same GGUF file that the product loads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer

from worker.model.gguf import GGUFCheckpoint
from worker.model.gguf_tokenizer import tokenizer_from_gguf
from worker.model.load import find_checkpoint


def checkpoint() -> GGUFCheckpoint:
    found = find_checkpoint("")
    assert isinstance(found, GGUFCheckpoint)
    return found


@functools.cache
def reference_model() -> Any:
    """float32, evaluation mode."""
    import gguf
    from transformers import AutoModelForCausalLM

    path = checkpoint().path
    with pytest.MonkeyPatch.context() as patch:
        for name in ("GGUFReader", "get_tensor_name_map"):  # transformers asks thrice for one, 398 times for the other
            patch.setattr(gguf, name, functools.cache(getattr(gguf, name)))
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32).eval()


@functools.cache
def tokenizer() -> Tokenizer:
    return tokenizer_from_gguf(checkpoint().metadata)
