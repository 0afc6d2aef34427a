"""GGUF files of the Llama family: metadata to a ModelConfig, tensors under their Hugging Face names.

Files of architecture `llama` store the rows of q and k with the two halves of each head interleaved, for the other
convention of rotary embedding; they are put back in order here, on the stored blocks, before anything is dequantised.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from torch import Tensor

from worker.model.checkpoint import QuantisedTensor, digest_files, name_of_file
from worker.model.config import LEAN_MODEL_TYPES, ModelConfig, RopeConfig, RopeKind
from worker.model.errors import CheckpointError, UnsupportedModel

_UNQUANTISED: Final = frozenset({"F32", "F16", "BF16", "F64"})
_TOP: Final = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
_IN_LAYER: Final = {
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
}


class GGUFCheckpoint:
    """A `worker.model.checkpoint.Checkpoint` over one GGUF file."""

    __slots__ = ("_config", "_reader", "_tensors", "metadata", "name", "path", "revision")

    def __init__(self, path: Path) -> None:
        self.path = path
        self.name = name_of_file(path)
        try:
            self._reader = gguf.GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise CheckpointError(f"{path} is no readable GGUF file: {error}") from error
        self.metadata = Metadata(self._reader)
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        if self.metadata.get("split.count", 1) != 1:
            raise UnsupportedModel(f"{path} is one part of a split GGUF: merge it with gguf-split first")
        self.revision = digest_files([path])
        self._config: ModelConfig | None = None

    @property
    def model_type(self) -> str:
        return str(self.metadata["general.architecture"])

    def config(self) -> ModelConfig:
        if self._config is None:
            self._config = _config(self.metadata, self._tensors)
        return self._config

    def has(self, name: str) -> bool:
        return gguf_name(name) in self._tensors

    def tensor(self, name: str) -> Tensor:
        stored = self._stored(name)
        try:
            values = gguf.dequantize(self._rows(name, stored), stored.tensor_type)
        except NotImplementedError as error:
            raise UnsupportedModel(f"{name} is stored as {stored.tensor_type.name}, which is not supported") from error
        return torch.from_numpy(np.array(values, dtype=np.float32, order="C"))

    def quantised(self, name: str) -> QuantisedTensor | None:
        stored = self._stored(name)
        if stored.tensor_type.name in _UNQUANTISED:
            return None
        columns, rows = (int(size) for size in stored.shape)
        return QuantisedTensor(stored.tensor_type.name, self._rows(name, stored), (rows, columns))

    def rope_factors(self) -> Tensor | None:
        if (stored := self._tensors.get("rope_freqs.weight")) is None:
            return None
        return torch.from_numpy(np.array(stored.data, dtype=np.float32))

    def _stored(self, name: str) -> Any:
        if (stored := self._tensors.get(gguf_name(name))) is None:
            raise CheckpointError(f"{self.path} has no tensor {gguf_name(name)!r}")
        return stored

    def _rows(self, name: str, stored: Any) -> np.ndarray:
        """The stored rows in Hugging Face's order."""
        data: np.ndarray = stored.data
        if self.model_type != "llama" or not name.startswith("model.layers."):
            return data
        config = self.config()
        for projection, num_heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            if projection in name:
                # (heads, half, 2, ...) -> (heads, 2, half, ...)
                split = data.reshape(num_heads, data.shape[0] // num_heads // 2, 2, *data.shape[1:])
                return np.ascontiguousarray(split.swapaxes(1, 2)).reshape(data.shape)
        return data


class Metadata:
    """The key-value part of a GGUF file, values decoded when asked for."""

    __slots__ = ("_fields",)

    def __init__(self, reader: gguf.GGUFReader) -> None:
        self._fields = reader.fields

    def __getitem__(self, key: str) -> Any:
        if key not in self._fields:
            raise CheckpointError(f"the GGUF file has no metadata field {key!r}")
        return self._fields[key].contents()

    def get(self, key: str, default: Any = None) -> Any:
        return self._fields[key].contents() if key in self._fields else default


def gguf_name(name: str) -> str:
    """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    _, _, layer, inner = stem.split(".", 3)
    return f"blk.{layer}.{_IN_LAYER[inner]}.{kind}"


def _config(metadata: Metadata, tensor_names: Iterable[str]) -> ModelConfig:
    architecture = metadata["general.architecture"]
    if architecture not in LEAN_MODEL_TYPES:
        raise UnsupportedModel(
            f"GGUF architecture {architecture!r}: only llama, qwen2 and qwen3 are supported; "
            "use the model's safetensors instead"
        )
    if f"{architecture}.expert_count" in metadata._fields and metadata[f"{architecture}.expert_count"]:
        raise UnsupportedModel("mixture-of-experts models in GGUF are not supported; use the model's safetensors")

    def field(key: str, default: Any = None) -> Any:
        full = f"{architecture}.{key}"
        return metadata[full] if default is None else metadata.get(full, default)

    names = set(tensor_names)
    num_heads, hidden_size = int(field("attention.head_count")), int(field("embedding_length"))
    num_layers, max_len = int(field("block_count")), int(field("context_length"))
    head_dim = int(field("attention.key_length", hidden_size // num_heads))
    if int(field("rope.dimension_count", head_dim)) != head_dim:
        raise UnsupportedModel(f"{architecture}.rope.dimension_count differs from the head size {head_dim}")
    window = int(field("attention.sliding_window", 0))
    return ModelConfig(
        model_type=architecture,
        vocab_size=len(metadata["tokenizer.ggml.tokens"]),
        hidden_size=hidden_size,
        intermediate_size=int(field("feed_forward_length")),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=int(field("attention.head_count_kv", num_heads)),
        head_dim=head_dim,
        rms_norm_eps=float(np.float32(field("attention.layer_norm_rms_epsilon"))),
        rope=_rope(architecture, metadata, max_len),
        max_model_len=max_len,
        tie_embeddings="output.weight" not in names,
        qk_norm="blk.0.attn_q_norm.weight" in names,
        sliding_windows=(window,) * num_layers if window else (),
    )


def _rope(architecture: str, metadata: Metadata, max_len: int) -> RopeConfig:
    theta = float(metadata.get(f"{architecture}.rope.freq_base", 10_000.0))
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    factor = float(metadata.get(f"{architecture}.rope.scaling.factor", 1.0))
    kinds: dict[str, RopeKind] = {"none": "default", "linear": "linear", "yarn": "yarn"}
    if kind not in kinds:
        raise UnsupportedModel(f"{architecture}.rope.scaling.type {kind!r}: only none, linear and yarn are known")
    original = int(metadata.get(f"{architecture}.rope.scaling.original_context_length", max_len))
    return RopeConfig(theta=theta, kind=kinds[kind], factor=factor, original_max_len=original)
