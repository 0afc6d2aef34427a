"""GGUF files of tiny models, written with the `gguf` package in llama.cpp's conventions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}


def write_gguf(
    path: Path,
    model: Any,
    architecture: str,
    *,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    rope_factors: np.ndarray | None = None,
    rope_fields: dict[str, float] | None = None,
) -> None:
    """A transformers model of the Llama family as GGUF; matrices are stored as `kind`."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    for key, value in (rope_fields or {}).items():
        writer.add_float32(f"{architecture}.rope.{key}", value)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
    write_vocabulary(writer, [f"<{token_id}>" for token_id in range(config.vocab_size)], [], "gpt-2")
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        values = tensor.numpy()
        if architecture == "llama" and ("q_proj" in stem or "k_proj" in stem):
            values = _permute(values, config.num_attention_heads if "q_proj" in stem else config.num_key_value_heads)
        for long, short in _NAMES.items():
            stem = stem.replace(long, short)
        stem = stem.replace("model.layers.", "blk.")
        data = gguf.quantize(values, kind) if values.ndim == 2 else values
        writer.add_tensor(f"{stem}.{suffix}", data, raw_dtype=kind if values.ndim == 2 else None)
    if rope_factors is not None:
        writer.add_tensor("rope_freqs.weight", rope_factors.astype(np.float32))
    _finish(writer)


def write_vocabulary(
    writer: gguf.GGUFWriter, tokens: Sequence[str], merges: Sequence[str], family: str, control: Sequence[str] = ()
) -> None:
    """The tokenizer part; the first token is BOS and the second EOS."""
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(family)
    writer.add_token_list(list(tokens))
    writer.add_token_types([3 if token in control else 1 for token in tokens])
    writer.add_token_merges(list(merges))
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)


def write_tokenizer(path: Path, family: str, trained: Tokenizer, control: Sequence[str], **fields: Any) -> None:
    """A GGUF file of architecture llama with a tokenizer and no tensors. `fields`: add_bos, chat_template, eot."""
    import json

    raw = json.loads(trained.to_str())
    tokens = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    writer = gguf.GGUFWriter(path, "llama")
    write_vocabulary(writer, tokens, [" ".join(pair) for pair in raw["model"]["merges"]], family, control)
    if (add_bos := fields.get("add_bos", False)) is not None:
        writer.add_add_bos_token(add_bos)
    if template := fields.get("chat_template"):
        writer.add_chat_template(template)
    _finish(writer)


def train(text: Sequence[str], pattern: str | None, control: Sequence[str], *, digits: bool = False) -> Tokenizer:
    """A byte-level BPE of 600 tokens, cut by `pattern` (None: GPT-2's) before it merges."""
    tokenizer = Tokenizer(models.BPE())
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(control), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


def _permute(weights: np.ndarray, num_heads: int) -> np.ndarray:
    """Hugging Face's halves -> llama.cpp's pairs, per head."""
    halves = weights.reshape(num_heads, 2, weights.shape[0] // num_heads // 2, *weights.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
